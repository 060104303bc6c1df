"""Tools and a format in one grammar: what it allows is a valid call or a valid document.

No model is needed: random tokens are drawn from the masks, and vLLM's parsers read the text.
"""

from __future__ import annotations

import json
import random
import re
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
from sgl_vllm.routes.tools_and_format import combine_tools_and_formats
from tests.effort import examples, some_nightly
from tests.engine.fsm_backends import backend, bits
from tests.tool_tags import TOOLS

XML = ("qwen3_coder", "mimo", "minimax_m2", "glm47", "deepseek_v32", "deepseek_v4")
PARSERS = ("hermes", "qwen3_json", "longcat", "kimi_k2", *XML)
ENDS = ('"', "}", "]", "\n</parameter>", "</parameter>", "</arg_value>", "</｜DSML｜parameter>")
AVOIDED = re.compile(rb"[\x00-\x09\x0b\x0c\x0e-\x1f]|[0-9][eE]|[0-9]{40}")
"""What xgrammar allows in strings and JSON does not; numbers that may be infinite for Python."""
CALL, DOCUMENT = "\n<", '{["-0123456789tfn'
SCHEMAS = [*TOOLS.values(), {"enum": ["<tool_call>", 1]}, {"type": ["string", "boolean"]}]


def asking(names: Any, schema: Any, **body: Any) -> ChatCompletionRequest:
    functions = [{"name": name, "parameters": TOOLS[name]} for name in names]
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    ask = {"vllm_xargs": {"sgl_tools_and_format": 1}, "request_id": "1", "messages": []}
    tools = [{"type": "function", "function": one} for one in [*functions, {"name": "end"}]]
    return ChatCompletionRequest(**{**ask, "tools": tools, "response_format": form, **body})


@pytest.fixture(scope="module", params=["stock", "spec"])
def ours(request: pytest.FixtureRequest) -> SglBackend:
    combine_tools_and_formats(ServerOptions())
    return backend(by_spec=request.param == "spec")


def parser_of(name: str, ours: SglBackend, request: ChatCompletionRequest) -> Parser:
    made = ParserManager.get_parser(tool_parser_name=name, enable_auto_tools=True)
    return made(ours.tokenizer, request.tools)


def written(ours: SglBackend, spec: str, rng: random.Random, first: str) -> str:
    """A text that the grammar allows. It begins as told, and ends soon after random tokens."""
    grammar = ours.compile_grammar(Options.STRUCTURAL_TAG, spec)
    pieces, end = ours.resources.token_bytes, ours.resources.end_token
    ends = [ours.tokenizer.encode(one, add_special_tokens=False) for one in ENDS]
    text = b""
    while not grammar.is_terminated():
        allowed = sorted(bits(ours, grammar))
        legal = [[one] for one in allowed if not AVOIDED.search(text[-40:] + pieces[one])]
        if not text:
            legal = [[one] for one in allowed if pieces[one][:1].decode("latin1") in first]
        elif len(text) > 160:
            closing = [one for one in ends if grammar.validate_tokens(one) == one]
            legal = closing or [one for one in legal if pieces[one[0]].strip()] or legal
            legal = [[end]] if end in allowed else legal
        tokens = rng.choice(legal)
        assert grammar.accept_tokens("", tokens) and len(text) < 9_000, text
        text += b"".join([pieces[one] for one in tokens])
    return text.removesuffix(pieces[end]).decode(errors="replace")


def streamed(parser: Parser, request: Any, text: str, ours: SglBackend) -> tuple[str, list[Any]]:
    """Content and calls of an answer that comes token by token."""
    content, calls, start = "", dict[int, tuple[str, str]](), 0
    tokens = ours.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    for token, (_, end) in zip(tokens["input_ids"], tokens["offset_mapping"], strict=True):
        last = {"prompt_token_ids": [1], "finished": end == len(text)}
        delta = parser.parse_delta(text[start:end], [token], request, **last)
        start = end
        content += (delta and delta.content) or ""
        for call in (delta and delta.tool_calls) or ():
            name, arguments = calls.get(call.index, ("", ""))
            added = call.function.arguments or ""
            calls[call.index] = (call.function.name or name, arguments + added)
    return content, [*calls.values()]


@pytest.mark.parametrize("name", some_nightly(PARSERS, ("hermes", "mimo"), [pytest.mark.slow]))
def test_an_answer_is_a_valid_call_or_a_valid_document(name: str, ours: SglBackend) -> None:
    rng = random.Random()
    for _ in range(examples(3)):
        # In XML, the text of a string may end an array. Kimi's parser does not know `$ref`.
        names = rng.sample(["weather", "now", "search"][: 3 - (name in XML)], rng.randint(1, 2))
        schema = rng.choice(SCHEMAS)
        parallel = rng.random() < 0.5
        request = asking(names, schema, parallel_tool_calls=parallel)
        request = parser_of(name, ours, request).adjust_request(request)
        for first in (CALL, DOCUMENT):
            text = written(ours, request.structured_outputs.structural_tag, rng, first)
            print(repr(text), names, schema)  # if it fails
            _, content, calls = parser_of(name, ours, request).parse(text, request, True)
            pieces, later = streamed(parser_of(name, ours, request), request, text, ours)
            if first == DOCUMENT:
                jsonschema.validate(json.loads(content), schema)
                assert content == text == pieces and not calls and not later
                continue
            assert len(calls) == len(later) >= 1 and (parallel or len(calls) == 1)
            for called, arguments in [*((one.name, one.arguments) for one in calls), *later]:
                assert called in (*names, "end")
                jsonschema.validate(json.loads(arguments), TOOLS.get(called, {"maxProperties": 0}))


STRICT = {"name": "weather", "parameters": TOOLS["weather"], "strict": True}
REGEX = {"response_format": None, "structured_outputs": {"regex": "a"}}
UNIQUE = {"name": "a", "schema": {"type": "array", "uniqueItems": True}}
LISTS = {"response_format": {"type": "json_schema", "json_schema": UNIQUE}}
PLAINLY: list[dict[str, Any]] = [
    {"vllm_xargs": None},
    {"vllm_xargs": None, "tools": [{"type": "function", "function": STRICT}]},
    {"vllm_xargs": {"sgl_tools_and_format": 0}},
    *({"response_format": form} for form in (None, {"type": "text"})),
    *({"tool_choice": choice} for choice in ("none", "required")),
]


@pytest.mark.parametrize("body", PLAINLY)
def test_other_requests_are_as_in_stock(body: dict[str, Any], ours: SglBackend) -> None:
    stock = DelegatingParser._apply_structural_tag.__wrapped__
    parser = parser_of("hermes", ours, asking(["now"], TOOLS["now"], **body))
    expected = stock(parser, asking(["now"], TOOLS["now"], **body)).model_dump()
    assert (
        parser._apply_structural_tag(asking(["now"], TOOLS["now"], **body)).model_dump() == expected
    )


@pytest.mark.parametrize(
    ("name", "body", "said"),
    [
        ("pythonic", {}, "PythonicToolParser has no grammar for its calls, or they begin like"),
        ("hermes", REGEX, "of type json_object or json_schema"),
        ("hermes", LISTS, "not with uniqueItems"),
    ],
)
def test_what_cannot_be_combined_is_refused(name: str, body: Any, said: str, ours: Any) -> None:
    request = asking(["now"], TOOLS["now"], **body)
    with pytest.raises(VLLMValidationError, match=f"{said}.* or send vllm_xargs.*=0"):
        parser_of(name, ours, request)._apply_structural_tag(request)
