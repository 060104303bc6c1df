"""Structured output on every endpoint of one real server: what comes is what was asked for."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from typing import Any

import jsonschema
import openai
import pytest
from transformers import AutoTokenizer

from tests.server.conftest import MODEL


def closed(**properties: Any) -> dict[str, Any]:
    """An object of all these members and no others."""
    members = {"properties": properties, "required": [*properties]}
    return {"type": "object", **members, "additionalProperties": False}


SHORT = {"type": "string", "maxLength": 8}
KIND = {"enum": ["city", "river", "mountain"]}
CARD = closed(name=SHORT, kind=KIND, capital={"type": "boolean"})
TREE = closed(name=SHORT, child={"anyOf": [{"$ref": "#"}, {"type": "null"}]})
PATTERN = closed(code={"type": "string", "pattern": "^[A-Z]{2}[0-9]{3}$"})
CIRCLE = closed(shape={"const": "circle"}, r={"enum": [1, 2]})
SQUARE = closed(shape={"const": "square"}, side={"enum": [3, 4]})
ONE_OF = {"oneOf": [CIRCLE, SQUARE]}
REGEX = r"(Mon|Tues|Wednes)day, [0-9]{1,2} (May|June) 20[0-9]{2}\."
CHOICES = ["a city", "a city in Europe", 'é"\\\n', "日本"]
EBNF = 'root ::= greeting ", " name "."\ngreeting ::= "Hello" | "Bye"\nname ::= [a-z]{2,6}'
LARK = 'start: greeting ", " name "."\ngreeting: "Hello" | "Bye"\nname: /[a-z]{2,6}/'
GREETING = r"(Hello|Bye), [a-z]{2,6}\."
CONTENT = {"type": "json_schema", "json_schema": CARD}
CARD_TAG = {"type": "tag", "begin": "<card>", "content": CONTENT, "end": "</card>"}
TAG = {"type": "structural_tag", "format": CARD_TAG}


def is_valid(schema: dict[str, Any]) -> Callable[[str], object]:
    return lambda text: jsonschema.validate(json.loads(text), schema)


def matches(pattern: str) -> Callable[[str], object]:
    return lambda text: re.fullmatch(pattern, text) or pytest.fail(f"{text!r}: not {pattern!r}")


def is_tagged(text: str) -> None:
    matches("(?s)<card>.*</card>")(text)
    is_valid(CARD)(text.removeprefix("<card>").removesuffix("</card>"))


FORMATS: dict[str, tuple[dict[str, Any], Callable[[str], object]]] = {
    "choice": ({"choice": CHOICES}, lambda text: CHOICES.index(text)),
    "regex": ({"regex": REGEX}, matches(REGEX)),
    "json": ({"json": CARD}, is_valid(CARD)),
    "json, recursive": ({"json": TREE}, is_valid(TREE)),
    "json, pattern": ({"json": PATTERN}, is_valid(PATTERN)),
    "json, oneOf": ({"json": ONE_OF}, is_valid(ONE_OF)),
    "json_object": ({"json_object": True}, is_valid({"type": "object"})),
    "grammar, EBNF": ({"grammar": EBNF}, matches(GREETING)),
    "grammar, Lark": ({"grammar": LARK}, matches(GREETING)),
    "structural_tag": ({"structural_tag": json.dumps(TAG)}, is_tagged),
}
OF_CHATS = {
    "json_schema, strict": (
        {"type": "json_schema", "json_schema": {"name": "card", "schema": CARD, "strict": True}},
        is_valid(CARD),
    ),
    "json_object": ({"type": "json_object"}, is_valid({"type": "object"})),
    "structural_tag": (TAG, is_tagged),
}
TOOL = {"type": "function", "function": {"name": "show_card", "parameters": CARD, "strict": True}}
ASK = [{"role": "user", "content": "Tell me about a place."}]


@pytest.fixture
def complete(client) -> Callable[..., Any]:
    def complete(structured: dict[str, Any] | None, **options: Any) -> Any:
        extra = {} if structured is None else {"structured_outputs": structured}
        defaults = {"max_tokens": 150, "temperature": 0}
        return client.completions.create(
            model="demo",
            prompt="A card: ",
            extra_body={**extra, **options.pop("extra_body", {})},
            **{**defaults, **options},
        )

    return complete


@pytest.mark.parametrize("name", FORMATS)
def test_every_sample_of_a_completion_has_the_format(complete, name):
    structured, check = FORMATS[name]
    answer = complete(structured, n=4, temperature=1)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    for choice in answer.choices:
        if choice.finish_reason != "length":
            assert choice.finish_reason == "stop"
            check(choice.text)


@pytest.mark.parametrize("name", FORMATS)
def test_a_stream_is_the_answer_in_pieces(complete, name):
    structured, _ = FORMATS[name]
    whole = complete(structured)
    chunks = list(complete(structured, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].text for c in chunks if c.choices) == whole.choices[0].text
    reasons = [c.choices[0].finish_reason for c in chunks if c.choices]
    assert reasons[-1] == whole.choices[0].finish_reason and not any(reasons[:-1])
    assert [c.usage.completion_tokens for c in chunks if c.usage] == [whole.usage.completion_tokens]


@pytest.mark.parametrize("name", OF_CHATS)
def test_a_chat_has_the_format(client, name):
    response_format, check = OF_CHATS[name]
    request = {"model": "demo", "messages": ASK, "max_tokens": 150, "temperature": 0}
    (choice,) = client.chat.completions.create(**request, response_format=response_format).choices
    if choice.finish_reason != "length":
        check(choice.message.content)
    pieces = client.chat.completions.create(**request, response_format=response_format, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in pieces)
    assert text == choice.message.content


NAMED = {"type": "function", "function": {"name": "show_card"}}


@pytest.mark.parametrize("tool_choice", [NAMED, "required"], ids=["named", "required"])
def test_the_arguments_of_a_tool_call_are_valid(client, tool_choice):
    """The demo model's template does not show tools; a format decides without it."""
    request = {"model": "demo", "messages": ASK, "max_tokens": 200, "temperature": 0}
    tools = {"tools": [TOOL], "tool_choice": tool_choice}
    (choice,) = client.chat.completions.create(**request, **tools).choices
    (call,) = choice.message.tool_calls
    assert call.function.name == "show_card"
    is_valid(CARD)(call.function.arguments)
    deltas = client.chat.completions.create(**request, **tools, stream=True)
    calls = [c for chunk in deltas for c in chunk.choices[0].delta.tool_calls or ()]
    assert [c.function.name for c in calls if c.function.name] == ["show_card"]
    arguments = "".join(c.function.arguments or "" for c in calls)
    assert json.loads(arguments) == json.loads(call.function.arguments)


FUNCTION = {"name": "show_card", "parameters": CARD}
EITHER = {"vllm_xargs": {"sgl_tools_and_format": 1}}


@pytest.mark.parametrize("bias", [100, -100], ids=["a call", "a document"])
def test_tools_and_a_format_are_answered_by_one_of_them(client, bias):
    """A call begins with `<`."""
    begins = [i for text, i in AutoTokenizer.from_pretrained(MODEL).vocab.items() if text[0] == "<"]
    form = {"type": "json_schema", "json_schema": {"name": "code", "schema": PATTERN}}
    request = {
        "model": "demo",
        "messages": ASK,
        "max_tokens": 200,
        "temperature": 0,
        "tools": [{"type": "function", "function": FUNCTION}],
        "response_format": form,
        "logit_bias": {str(token): bias for token in begins},
        "extra_body": EITHER,
    }
    (choice,) = client.chat.completions.create(**request).choices
    deltas = [c.choices[0].delta for c in client.chat.completions.create(**request, stream=True)]
    content = "".join(delta.content or "" for delta in deltas)
    calls = [call.function for delta in deltas for call in delta.tool_calls or ()]
    if bias < 0:
        assert content == choice.message.content and not choice.message.tool_calls and not calls
        is_valid(PATTERN)(content)
        return
    assert choice.finish_reason == "tool_calls" and not choice.message.content and not content
    assert {call.function.name for call in choice.message.tool_calls} == {"show_card"}
    whole = [call.function.arguments for call in choice.message.tool_calls]
    assert "".join(call.arguments or "" for call in calls) == "".join(whole)
    for arguments in whole:
        is_valid(CARD)(arguments)


def test_tools_and_another_format_are_refused_with_what_to_do(client):
    tools = [{"type": "function", "function": FUNCTION}]
    body = {**EITHER, "structured_outputs": {"regex": REGEX}}
    with pytest.raises(openai.BadRequestError, match="of type json_object or json_schema"):
        client.chat.completions.create(model="demo", messages=ASK, tools=tools, extra_body=body)


@pytest.mark.parametrize("tools", [[], [{"type": "function", **FUNCTION, "strict": False}]])
def test_a_response_has_the_schema(client, tools):
    answer = client.responses.create(
        model="demo",
        input="Tell me about a place.",
        max_output_tokens=150,
        temperature=0,
        text={"format": {"type": "json_schema", "name": "card", "schema": CARD, "strict": True}},
        tools=tools,
        extra_body=EITHER,
    )
    assert answer.status == "completed"
    (item,) = answer.output
    is_valid(CARD)(item.arguments if item.type == "function_call" else item.content[0].text)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("n", [1, 3])
def test_usage_has_the_tokens_that_the_engine_has_forced(client, complete, http, n, stream):
    def num_forced() -> int:
        return http.get("/sgl/stats").json()["jump_forward"]["forced_tokens"]

    def chat(_: object, **options: Any) -> Any:
        how = {"max_tokens": 150, "response_format": OF_CHATS["json_schema, strict"][0], **options}
        return client.chat.completions.create(model="demo", messages=ASK, **how)

    in_chunks = {"stream": True, "stream_options": {"include_usage": True}}
    options = {"n": n, "temperature": min(n - 1, 1), **(in_chunks if stream else {})}
    for ask in (complete, chat):
        before = num_forced()
        answer = ask({"json": CARD}, **options)
        last = [*answer][-1] if stream else answer
        told = last.usage.completion_tokens_details.accepted_prediction_tokens
        assert 0 < told == num_forced() - before
        assert getattr(last, "kv_transfer_params", None) is None
    free = complete(None, max_tokens=3).usage
    assert free.completion_tokens == 3 and free.completion_tokens_details is None


# -- the whitespace of JSON

RECORD = closed(kind=closed(of=KIND), size=closed(width={"enum": [1, 2]}, height={"enum": [3, 4]}))
HOT = {"temperature": 1.5, "seed": 5}
"""Any whitespace that is legal is written."""


def xargs(whitespace: str) -> dict[str, Any]:
    return {"vllm_xargs": {"sgl_whitespace": whitespace}}


def test_json_has_the_whitespace_of_its_request_in_every_way_to_ask(complete, client):
    own = complete({"json": RECORD, "disable_any_whitespace": True}, **HOT).choices[0].text
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": RECORD}}
    form = {**schema, "disable_any_whitespace": True}
    request = {"model": "demo", "messages": ASK, "max_tokens": 150, **HOT}
    chat = client.chat.completions.create(**request, response_format=form)
    tag = complete({"structural_tag": json.dumps(TAG)}, extra_body=xargs("compact"), **HOT)
    card = tag.choices[0].text.removeprefix("<card>").removesuffix("</card>")
    for text in (own, chat.choices[0].message.content, card):
        assert text == json.dumps(json.loads(text), separators=(",", ":"), ensure_ascii=False)
    spaced = complete({"json": RECORD}, extra_body=xargs("spaced"), **HOT).choices[0].text
    assert spaced == json.dumps(json.loads(spaced))
    follows = complete({"json": RECORD}, extra_body=xargs("follow"), **HOT).choices[0].text
    styles: list[dict[str, Any]] = [
        {"separators": (",", ":")},
        {},
        *({"indent": unit} for unit in (1, 2, 3, 4, "\t")),
    ]
    assert follows in [json.dumps(json.loads(follows), **style) for style in styles]
    with pytest.raises(openai.BadRequestError, match="must be one of any, compact, spaced, follow"):
        complete({"json": RECORD}, extra_body=xargs("tight"))


# -- the end of a stream

MAY_END = {
    "all forced": {"choice": ["The quick brown fox jumps over the lazy dog, again and again."]},
    "may end early": {"regex": "Yes( or no)?"},
    "%llguidance": {"grammar": '%llguidance {}\nstart: "The end of it."'},
}


@pytest.mark.parametrize("structured", MAY_END.values(), ids=MAY_END)
def test_a_stream_that_shows_its_end_sends_it_in_its_own_chunk(client, structured):
    """If a chunk has several tokens, guidance treats each of them as text."""
    request = {"model": "demo", "messages": ASK, "temperature": 0, "logprobs": True}
    extra = {"structured_outputs": structured}
    chunks = [*client.chat.completions.create(**request, stream=True, extra_body=extra)]
    logprobs = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices[0].logprobs]
    *before, (end,) = [[one.token for one in row.content] for row in logprobs]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert end.startswith("<|") and "".join(itertools.chain(*before)) == text
