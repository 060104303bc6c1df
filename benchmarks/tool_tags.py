"""Tool calls in the tags of models: the plugin's automata and xgrammar, in one run.

    python -m benchmarks.tool_tags                      # Mistral's vocabulary of 131,072 tokens
    python -m benchmarks.tool_tags --quick              # two texts of each model
    python -m benchmarks.tool_tags --tokenizer FOLDER --json FILE

vLLM makes a structural tag of a request with tools and `tool_choice=required`, in the notation of
the server's model. Both backends are asked through vLLM's interface, token by token along random
calls as a model writes them, and every row of the bitmask is compared.

- *compile* is the first time the tag is met. xgrammar compiles with up to 8 threads.
- *mask* is one `fill_bitmask` of one row, at the second walk along the same texts.
- *forced* is the share of the text that can only be written in one way.

Absolute times mean little on a shared machine: compare within one run.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any  # Any: the JSON of tags, and backends of vLLM

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.command import positive
from benchmarks.masks import TEKKEN, native_code_silenced, tokenizer_of

MODELS = (
    *("qwen_3", "qwen_3_coder", "qwen_3_5", "deepseek_v3_1", "deepseek_v3_2", "deepseek_v4"),
    *("glm_4_7", "minimax", "mimo", "kimi", "kimi_k3", "harmony", "llama", "hermes"),
)
"""As vLLM calls the notations of models."""

OURS, STOCK = 0, 1
"""The backends: the plugin's, and xgrammar's."""

NUM_TEXTS = 10
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


@dataclass(frozen=True)
class Result:
    """Of the tag of one model.

    Attributes:
        by_automata: whether the plugin compiled it, or handed it to xgrammar.
        compile_ms, mask_us: of the plugin and of xgrammar; of masks, the mean.
        forced: the share of the texts' bytes, from 0 to 1.
        rows: of the bitmask, that were compared.
        different_rows: those in which the two differ.
    """

    model: str
    by_automata: bool
    compile_ms: tuple[float, float]
    mask_us: tuple[float, float]
    forced: float
    rows: int
    different_rows: int


def main(argv: Sequence[str] | None = None) -> int:
    """The command. 1 if rows differ or a tag is not compiled by the plugin."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tool_tags",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--models", metavar="A,B", help=f"default: {','.join(MODELS)}")
    parser.add_argument("--texts", type=positive, default=NUM_TEXTS, metavar="N", help="per model")
    parser.add_argument("--quick", action="store_true", help="2 texts per model")
    parser.add_argument("--tokenizer", metavar="FOLDER", help=f"default: Mistral's {TEKKEN}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="all numbers")
    arguments = parser.parse_args(argv)
    names = arguments.models.split(",") if arguments.models else MODELS
    if unknown := set(names) - {*MODELS}:
        parser.error(f"--models: {', '.join(sorted(unknown))} is not one of {', '.join(MODELS)}")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    try:
        tokenizer = tokenizer_of(arguments.tokenizer)
    except ValueError as error:
        parser.error(str(error))
    bench = Bench(tokenizer)
    num_texts = 2 if arguments.quick else arguments.texts
    with native_code_silenced():
        results = [bench.run(name, num_texts) for name in names]
    Console(highlight=False).print(table_of(results))
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(one) for one in results], indent=1) + "\n")
    return int(any(one.different_rows or not one.by_automata for one in results))


class Bench:
    """Both backends over one vocabulary."""

    def __init__(self, tokenizer: Any) -> None:
        from vllm.config import VllmConfig
        from vllm.v1.structured_output.backend_types import StructuredOutputOptions

        from sgl_vllm.fsm.schema import SchemaSemantics
        from sgl_vllm.fsm.vllm.backend import SglBackend

        self._tokenizer = tokenizer
        self._kind = StructuredOutputOptions.STRUCTURAL_TAG
        self._ours = SglBackend(
            VllmConfig(),
            tokenizer=tokenizer,
            vocab_size=len(tokenizer),
            semantics=SchemaSemantics.STRICT,
        )
        self._backends = (self._ours, self._ours.xgrammar)
        self._rows = [self._ours.allocate_token_bitmask(1) for _ in self._backends]
        schema = {"type": "json_schema", "json_schema": TOOLS["weather"], "style": "qwen_xml"}
        self._compiled({"type": "structural_tag", "format": schema})  # starts what others need

    def run(self, model: str, num_texts: int) -> Result:
        tag = tag_of(model)
        grammars, compile_ms = [], []
        for number in OURS, STOCK:
            started = time.perf_counter()
            grammars.append(self._compiled(tag, number))
            compile_ms.append(1e3 * (time.perf_counter() - started))
        by_automata = type(grammars[OURS]).__name__ == "SglGrammar"
        num_rows = different = num_forced = num_bytes = 0
        times_us: tuple[list[float], list[float]] = ([], [])
        for seed in range(num_texts):
            text = written(tag["format"], random.Random(seed))
            tokens = self._tokenizer.encode(text, add_special_tokens=False)
            for ours, stock in zip_longest(*[self._walk(n, tag, tokens) for n in (OURS, STOCK)]):
                num_rows += 1
                different += not np.array_equal(ours, stock)
            for number in OURS, STOCK:
                for _ in self._walk(number, tag, tokens, times_us[number]):
                    pass
            if by_automata:
                num_forced += self._num_forced_bytes(tag, tokens)
                num_bytes += len(text.encode())
        ours_us, stock_us = map(statistics.fmean, times_us)
        return Result(
            model,
            by_automata,
            (compile_ms[OURS], compile_ms[STOCK]),
            (ours_us, stock_us),
            num_forced / max(1, num_bytes),
            num_rows,
            different,
        )

    def _compiled(self, tag: Any, number: int = OURS) -> Any:
        return self._backends[number].compile_grammar(self._kind, json.dumps(tag))

    def _walk(
        self, number: int, tag: Any, tokens: Sequence[int], times_us: list[float] | None = None
    ) -> Iterator[Any]:
        """The row before each token, uint32 (words,), as far as the tokens are legal."""
        grammar, bitmask = self._compiled(tag, number), self._rows[number]
        row = bitmask.numpy()[0].view(np.uint32)
        for token in tokens:
            started = time.perf_counter()
            grammar.fill_bitmask(bitmask, 0)
            if times_us is not None:
                times_us.append(1e6 * (time.perf_counter() - started))
            yield row
            if not grammar.accept_tokens("", [token]):
                return

    def _num_forced_bytes(self, tag: Any, tokens: Sequence[int]) -> int:
        grammar = self._compiled(tag)
        pieces = self._ours.resources_of(self._kind).token_bytes
        position = forced_to = count = 0
        for token in tokens:
            run, _, _ = grammar.forced()
            count += max(0, position + len(run) - max(position, forced_to))
            forced_to = max(forced_to, position + len(run))
            if not grammar.accept_tokens("", [token]):
                break
            position += len(pieces[token])
        return count


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


def table_of(results: Sequence[Result]) -> Table:
    table = Table("tag", "compile, ms", "mask, µs", "forced", "rows", "differ")
    table.caption = "compile and mask: the plugin / xgrammar"
    for column in table.columns[1:]:
        column.justify = "right"
    for one in results:
        name = one.model if one.by_automata else f"{one.model} (by xgrammar)"
        times = [f"{ours:.1f} / {stock:.1f}" for ours, stock in (one.compile_ms, one.mask_us)]
        counts = [f"{one.rows:,}", f"{one.different_rows:,}"]
        table.add_row(name, *times, f"{one.forced:.0%}", *counts)
    return table


if __name__ == "__main__":
    sys.exit(main())
