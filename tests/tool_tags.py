"""Structural tags of tool calls as vLLM makes them for models, and random calls written in them."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from typing import Any  # Any: the JSON of tags

MODELS = (
    *("qwen_3", "qwen_3_coder", "qwen_3_5", "deepseek_v3_1", "deepseek_v3_2", "deepseek_v4"),
    *("glm_4_7", "minimax", "mimo", "kimi", "kimi_k3", "harmony", "llama", "hermes"),
)
"""As vLLM calls the notations of models."""

WORDS = ("Rome", "a < b </", "日本", "", "two words", "x\ny", "é")

TOOLS: dict[str, dict[str, Any]] = {
    "search": {
        "type": "object",
        "properties": {
            "query": {"type": "string"},
            "limit": {"type": "integer"},
            "tags": {"type": "array", "items": {"type": "string"}},
            "order": {"type": "string", "enum": ["newest", "oldest"]},
        },
        "required": ["query", "limit"],
    },
    "weather": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "compare": {
        "type": "object",
        "properties": {"left": {"$ref": "#/$defs/side"}, "right": {"$ref": "#/$defs/side"}},
        "required": ["left"],
        "$defs": {"side": {"enum": ["x", "y", None]}},
    },
    "now": {"type": "object", "properties": {}},
}

XML: dict[str, Callable[[str, str, bool], str]] = {
    "qwen_xml": lambda name, value, is_text: f"<parameter={name}>{value}</parameter>\n",
    "minimax_xml": lambda name, value, is_text: f'<parameter name="{name}">{value}</parameter>',
    "glm_xml": lambda name, value, is_text: (
        f"<arg_key>{name}</arg_key>\n<arg_value>{value}</arg_value>\n"
    ),
    "deepseek_xml": lambda name, value, is_text: (
        f'<｜DSML｜parameter name="{name}" string="{json.dumps(is_text)}">{value}'
        "</｜DSML｜parameter>\n"
    ),
}
"""How models write an argument, by the style of xgrammar's structural tags."""

KIMIS = ("12", 'key="query" type="string"<|sep|>')
"""What Kimi K3 writes for the patterns of its tags: the number of a call, and an argument."""


def tag_of(model: str, *, choice: str = "required", strict: bool = True) -> dict[str, Any]:
    """vLLM's structural tag for a request with `TOOLS`."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers.structural_tag_registry import get_model_structural_tag

    functions = [
        {"name": name, "parameters": schema, "strict": strict} for name, schema in TOOLS.items()
    ]
    tools = [{"type": "function", "function": function} for function in functions]
    request = ChatCompletionRequest(messages=[], model="any", tools=tools, tool_choice=choice)
    tag = get_model_structural_tag(
        model=model, tools=request.tools, tool_choice=request.tool_choice, reasoning=False
    )
    assert tag is not None, "no tag for these tools"
    return tag.model_dump()


def written(form: dict[str, Any], rng: random.Random) -> str:
    """A text that a format of a structural tag allows, as a model may write it."""
    match form["type"]:
        case "const_string":
            return form["value"]
        case "any_text":
            return rng.choice(("", "Let me see.", "1 < 2"))
        case "regex":
            return next(text for text in KIMIS if re.fullmatch(form["pattern"], text))
        case "sequence":
            return "".join([written(one, rng) for one in form["elements"]])
        case "or":
            return written(rng.choice(form["elements"]), rng)
        case "optional" | "plus" | "star" | "repeat":
            return written(form["content"], rng)
        case "tag":
            ends = form["end"] if isinstance(form["end"], list) else [form["end"]]
            return form["begin"] + written(form["content"], rng) + rng.choice(ends)
        case "tags_with_separator":
            return form["separator"].join([written(rng.choice(form["tags"]), rng) for _ in "ab"])
        case "triggered_tags":
            before = "" if form["at_least_one"] else "I look it up. "
            return before + written(rng.choice(form["tags"]), rng)
        case "json_schema":
            schema = form["json_schema"]
            if form["style"] == "json":
                return json.dumps(_value(schema, rng), ensure_ascii=False)
            arguments = _arguments(schema, rng)
            write = XML[form["style"]]
            return "".join(
                write(
                    name, value if isinstance(value, str) else json.dumps(value), type(value) is str
                )
                for name, value in arguments.items()
            )
        case other:
            raise ValueError(f"a format of type {other}")


def _value(schema: Any, rng: random.Random) -> Any:
    """What a schema describes: all arguments of a tool, or one of them."""
    one = schema if isinstance(schema, dict) else {}
    if "enum" in one:
        return one["enum"][0]
    values = {"string": "a", "integer": 12, "number": 1.5, "boolean": True, "array": ["a", "b c"]}
    return values[one["type"]] if one.get("type") in values else _arguments(schema, rng)


def _arguments(schema: Any, rng: random.Random) -> dict[str, Any]:
    """Arguments for a schema of `TOOLS`, or for the first of them."""
    if not isinstance(schema, dict) or "properties" not in schema:
        schema = TOOLS["search"]
    values: dict[str, Any] = {
        "query": rng.choice(WORDS),
        "limit": rng.randrange(-3, 200),
        "tags": ["a", "b c"],
        "order": "newest",
        "city": rng.choice(WORDS),
        "days": 7,
        "left": "x",
        "right": None,
    }
    required = schema.get("required", ())
    return {
        name: values[name]
        for name in schema["properties"]
        if name in required or rng.random() < 0.5
    }
