"""Tools and a format in one grammar: what it allows is a valid call or a valid document.

No model is needed: random tokens are drawn from the masks, and vLLM's parsers read the text.
"""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.exceptions import VLLMValidationError
from vllm.parser import Parser, ParserManager
from vllm.parser.abstract_parser import DelegatingParser
from vllm.v1.structured_output.backend_types import StructuredOutputOptions as Options

from sgl_vllm.config import Options as ServerOptions
from sgl_vllm.fsm.vllm.backend import SglBackend
from sgl_vllm.fsm.vllm.grammar import SglGrammar
from sgl_vllm.routes.tools_and_format import combine_tools_and_formats
from tests.effort import examples, some_nightly
from tests.engine.fsm_backends import backend, bits

DEEPSEEK = [f"<｜tool▁call{mark}｜>" for mark in ("▁begin", "▁end", "s▁begin", "s▁end")]
"""Tokens that vLLM's parser wants in a vocabulary. It reads no calls with line ends in JSON."""

XML = ("qwen3_coder", "mimo", "minimax_m2", "glm47", "deepseek_v32", "deepseek_v4")
"""Notations in which the text of a value is not quoted."""

PARSERS = ("hermes", "qwen3_json", "longcat", "kimi_k2", "deepseek_v31", *XML)

CONTROL = bytes(set(range(32)) - set(b"\n\r"))
"""What xgrammar allows in strings, and JSON does not."""

NUM_PAIRS = examples(3)
NUM_WILD = 40
"""Tokens that are drawn from all. From there on, what ends a value is drawn first."""

ENDS = ('"', "}", "]", "\n</parameter>", "</parameter>", "</arg_value>", "</｜DSML｜parameter>")


def random_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    kinds: list[dict[str, Any]] = [
        {"type": "string"},
        {"type": "integer"},
        {"type": "number"},
        {"type": "boolean"},
        {"enum": ["a", "<tool_call>", "b c"]},
        {"type": "string", "maxLength": 9},
        {"type": "integer", "minimum": 2, "maximum": 40},
        {"type": ["string", "null"]},
    ]
    if depth < 2:
        items = {"type": "array", "items": random_schema(rng, 2), "maxItems": 3}
        kinds += [items, random_object(rng, depth + 1), random_object(rng, depth + 1)]
    return rng.choice(kinds)


def random_object(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """With depth 2, of plain values."""
    names = rng.sample(("city", "days", "name", "parameters", "x-y", "größe"), rng.randint(0, 4))
    return {
        "type": "object",
        "properties": {name: random_schema(rng, depth) for name in names},
        "required": [name for name in names if rng.random() < 0.6],
        "additionalProperties": False,
    }


def random_request(rng: random.Random, name: str = "", **body: Any) -> ChatCompletionRequest:
    functions = [
        {"name": function, "parameters": random_object(rng, 2 if name in XML else 0)}
        for function in rng.sample(("f", "f_2", "search", "get-x"), rng.randint(1, 3))
    ]
    schema = random_schema(rng) if rng.random() < 0.3 else random_object(rng)
    asked = {
        "messages": [{"role": "user", "content": "?"}],
        "model": "demo",
        "tools": [{"type": "function", "function": one} for one in functions],
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": schema},
        },
        "vllm_xargs": {"sgl_tools_and_format": 1},
    }
    return ChatCompletionRequest(**{**asked, **body})


@pytest.fixture(scope="module", params=["stock", "spec"])
def ours(request: pytest.FixtureRequest) -> SglBackend:
    combine_tools_and_formats(ServerOptions())
    made = backend(by_spec=request.param == "spec")
    made.tokenizer.add_tokens([*DEEPSEEK, "<|python_tag|>"])
    return made


def parser_of(name: str, ours: SglBackend, request: ChatCompletionRequest) -> Parser:
    made = ParserManager.get_parser(tool_parser_name=name, enable_auto_tools=True)
    return made(ours.tokenizer, request.tools)


def written(ours: SglBackend, spec: str, rng: random.Random, first: str, avoid: bytes) -> str:
    """A text of random tokens that the grammar allows, which begins with a character of `first`,
    and has none of `avoid`."""
    grammar = ours.compile_grammar(Options.STRUCTURAL_TAG, spec)
    assert isinstance(grammar, SglGrammar), "handed on"
    pieces, end = ours.resources.token_bytes, ours.resources.end_token
    ends = [ours.tokenizer.encode(one, add_special_tokens=False) for one in ENDS]
    text = b""
    for number in range(2000):
        allowed = sorted(bits(ours, grammar))
        not_now = b"eE" if text[-1:].isdigit() else b""  # no number that is infinite for Python
        legal = [[one] for one in allowed if set(pieces[one]).isdisjoint(avoid + not_now)]
        if number == 0:
            legal = [[one] for one in allowed if pieces[one][:1].decode("latin1") in first]
        elif number > NUM_WILD:
            legal = (
                [one for one in ends if grammar.validate_tokens(one) == one]
                or [[one] for (one,) in legal if pieces[one].strip()]
                or legal
            )
            legal = [[end]] if end in allowed else legal
        tokens = rng.choice(legal or [allowed[:1]])
        assert grammar.accept_tokens("", tokens)
        if grammar.is_terminated():
            return text.decode(errors="replace")
        text += b"".join([pieces[one] for one in tokens])
    pytest.fail(f"no end: {text[-200:]!r}")


def read(name: str, request: ChatCompletionRequest, text: str, ours: SglBackend) -> Any:
    """Content and calls, read at once and as a stream."""
    streaming = parser_of(name, ours, request)
    _, content, calls = parser_of(name, ours, request).parse(text, request, enable_auto_tools=True)
    calls = [(one.name, one.arguments) for one in calls or ()]
    streamed = ""
    names: dict[int, str] = {}
    arguments: dict[int, str] = {}
    tokens = ours.tokenizer.encode(text, add_special_tokens=False)
    so_far = ""
    for number in range(1, len(tokens) + 1):
        now = ours.tokenizer.decode(tokens[:number])
        delta = streaming.parse_delta(
            now.removeprefix(so_far) if not now.endswith("�") else "",
            [tokens[number - 1]],
            request,
            prompt_token_ids=[1],
            finished=number == len(tokens),
        )
        so_far = so_far if now.endswith("�") else now
        streamed += (delta and delta.content) or ""
        for call in (delta and delta.tool_calls) or ():
            names[call.index] = (call.function and call.function.name) or names[call.index]
            added = (call.function and call.function.arguments) or ""
            arguments[call.index] = arguments.get(call.index, "") + added
    return content, calls, streamed, [(names[n], arguments[n]) for n in sorted(names)]


@pytest.mark.parametrize(
    "name", some_nightly(PARSERS, ("hermes", "qwen3_coder"), [pytest.mark.slow])
)
def test_an_answer_is_a_valid_call_or_a_valid_document(name: str, ours: SglBackend) -> None:
    rng = random.Random()
    for _ in range(NUM_PAIRS):
        request = random_request(rng, name)
        schema = request.response_format.json_schema.json_schema
        parameters = {one.function.name: one.function.parameters for one in request.tools}
        request = parser_of(name, ours, request).adjust_request(request)
        for first in ("\n<", '{["-0123456789tfn'):
            spec = request.structured_outputs.structural_tag
            avoid = CONTROL + (b"\n\r" if name == "deepseek_v31" and first == "\n<" else b"")
            text = written(ours, spec, rng, first, avoid)
            content, calls, streamed, streamed_calls = read(name, request, text, ours)
            print(f"{name}: {text!r} for {parameters} and {schema}")  # of a failure
            assert bool(calls) == (first == "\n<") and len(calls) == len(streamed_calls)
            for called, arguments in (*calls, *streamed_calls):
                values = json.loads(arguments)
                if name in XML:  # which has no marks around the text of a value
                    values = {
                        key: value.strip() if isinstance(value, str) else value
                        for key, value in values.items()
                    }
                jsonschema.validate(values, parameters[called])
            if not calls:
                jsonschema.validate(json.loads(content), schema)
                assert content == streamed == text


DAY = {"type": "object", "properties": {"day": {"type": "string"}}, "required": ["day"]}
ANSWER = {"type": "json_schema", "json_schema": {"name": "answer", "schema": DAY}}
FUNCTION = {"name": "f", "parameters": DAY}
CALL = '<tool_call>\n{"name": "f", "arguments": {"day": "1"}}\n</tool_call>'
XML_CALL = "<tool_call>\n<function=f>\n<parameter=day>\n1\n</parameter>\n</function>\n</tool_call>"


def asked(**body: Any) -> ChatCompletionRequest:
    tools = [{"type": "function", "function": FUNCTION}]
    plain = {"messages": [], "tools": tools, "response_format": ANSWER, "request_id": "1"}
    return ChatCompletionRequest(**{**plain, **body})


ASK = {"vllm_xargs": {"sgl_tools_and_format": 1}}
STRICT = {"tools": [{"type": "function", "function": {**FUNCTION, "strict": True}}]}
TAG = {"type": "structural_tag", "format": {"type": "any_text"}}


@pytest.mark.parametrize(
    "body",
    [
        {},
        STRICT,
        {"vllm_xargs": {"sgl_tools_and_format": 0}},
        {**ASK, "response_format": None},
        {**ASK, "response_format": {"type": "text"}},
        {**ASK, "tool_choice": "none"},
        {**ASK, "tool_choice": "required"},
    ],
)
def test_other_requests_are_as_in_stock(body: dict[str, Any], ours: SglBackend) -> None:
    stock = DelegatingParser._apply_structural_tag.__wrapped__
    parser = parser_of("hermes", ours, asked(**body))
    adjusted = parser._apply_structural_tag(asked(**body))
    assert adjusted.model_dump() == stock(parser, asked(**body)).model_dump()


@pytest.mark.parametrize(
    ("name", "body", "said"),
    [
        ("pythonic", {}, "PythonicToolParser has no grammar of its calls"),
        ("llama3_json", {}, "they begin like JSON"),
        ("openai", {}, "cannot be combined"),
        (
            "hermes",
            {"response_format": None, "structured_outputs": {"regex": "a"}},
            "only with a response_format of type json_schema or json_object",
        ),
        (
            "hermes",
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "a", "schema": {"type": "array", "uniqueItems": True}},
                }
            },
            "start the server with schema_reading=spec",
        ),
    ],
)
def test_what_cannot_be_combined_is_refused(
    name: str, body: dict[str, Any], said: str, ours: SglBackend
) -> None:
    request = asked(**ASK, **body)
    with pytest.raises(VLLMValidationError, match=said) as refused:
        parser_of(name, ours, request)._apply_structural_tag(request)
    assert "vllm_xargs.sgl_tools_and_format=0" in str(refused.value)


@pytest.mark.parametrize(
    ("name", "calls"), [("hermes", CALL + CALL), ("qwen3_coder", XML_CALL + "\n" + XML_CALL)]
)
def test_one_call_is_allowed_where_calls_are_not_parallel(
    name: str, calls: str, ours: SglBackend
) -> None:
    for body, is_legal in (({}, True), ({"parallel_tool_calls": False}, False)):
        request = asked(**ASK, **body)
        spec = parser_of(name, ours, request).adjust_request(request).structured_outputs
        grammar = ours.compile_grammar(Options.STRUCTURAL_TAG, spec.structural_tag)
        tokens = ours.tokenizer.encode(calls, add_special_tokens=False)
        assert (grammar.validate_tokens(tokens) == tokens) == is_legal
