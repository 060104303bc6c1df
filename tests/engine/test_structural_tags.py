"""Tool calls and other structural tags by our automata: the masks are stock's, bit for bit.

No model is needed: both backends are asked through vLLM's interface, over the demo's vocabulary.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import random
from typing import Any

import pytest
import vllm
import xgrammar
from vllm.tool_parsers import structural_tag_registry
from vllm.v1.structured_output.backend_types import StructuredOutputOptions as Options
from xgrammar.testing import _is_grammar_accept_string as is_grammar_accept_string

from sgl_vllm.fsm.automaton import Automaton
from sgl_vllm.fsm.errors import UnsupportedGrammarError
from sgl_vllm.fsm.vllm.backend import SglBackend
from sgl_vllm.fsm.vllm.grammar import SglGrammar
from tests import tool_tags
from tests.effort import requests, some_nightly
from tests.engine.fsm_backends import backend, bits, walk_beside_stock
from tests.unit.fsm.parsed import compile_by

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
}
ANY = {"type": "json_schema", "json_schema": True}
TEXT = {"type": "any_text"}


@pytest.fixture(scope="module")
def ours() -> SglBackend:
    return backend()


def tag(begin: str, content: dict[str, Any], end: str | list[str]) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


CALLS = [
    tag(
        '<call>{"name": "a", "arguments": ',
        {"type": "json_schema", "json_schema": CITY},
        "}</call>",
    ),
    tag('<call>\n{"name": "ab", "arguments": ', ANY, "}\n</call>"),
]
TRIGGERED = {"type": "triggered_tags", "triggers": ["<call>"], "tags": CALLS}
SEPARATED = {"type": "tags_with_separator", "tags": CALLS, "separator": ""}
TRIP = {
    "type": "object",
    "properties": {
        "day": {"type": "string", "pattern": "^[0-9]{2}$"},
        "people": {"type": "integer", "minimum": 2},
    },
    "required": ["day"],
}
"""Read as the grammar that xgrammar prints for it."""
FIRST = '<call>{"name": "a", "arguments": {"city": "Rome"}}</call>'
SECOND = '<call>\n{"name": "ab", "arguments": [1, {"x": null}]}\n</call>'
THOUGHT = tag("", {"type": "any_text", "excludes": ["<think>", "</think>"]}, "</think>")
LINE_END = {"type": "const_string", "value": "\n"}
END_OF_VALUE = {"type": "const_string", "value": "</v>."}
REGEX = {"type": "regex", "pattern": r"[0-9]{2,3}|é+"}
LINE = {"type": "regex", "pattern": r"[^\n]+"}
GRAMMAR = {"type": "grammar", "grammar": 'root ::= pair ("," pair)*\npair ::= [a-z]+ "=" [0-9]+'}


def xml(style: str, schema: Any = CITY) -> dict[str, Any]:
    return tag("<c>\n", {"type": "json_schema", "json_schema": schema, "style": style}, "\n</c>")


MARK = "｜DSML｜"
PARAMETERS = {
    "qwen_xml": "<parameter=city>a <b </ é\n</parameter>\n<parameter=days>\n-3\n</parameter>",
    "minimax_xml": '<parameter name="city">Rome</parameter>\n<parameter name="days">12</parameter>',
    "glm_xml": "<arg_key>city</arg_key>\n<arg_value></arg></arg_value><arg_key>days</arg_key>",
    "deepseek_xml": f'<{MARK}parameter name="city" string="true">Rome</{MARK}parameter>\n'
    f'<{MARK}parameter name="days" string="false">3</{MARK}parameter>',
}
"""Arguments in XML, by style, as models write them."""

FORMATS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "text, calls": (TRIGGERED, [f"Hi <b <ca <{FIRST} é {SECOND} bye", "日本 <call>"]),
    "a call, text": ({**TRIGGERED, "at_least_one": True}, [f"{FIRST} and{SECOND}"]),
    "one call": ({**TRIGGERED, "stop_after_first": True}, [f"x{SECOND}", FIRST]),
    "no thoughts": ({**TRIGGERED, "excludes": ["<think>"]}, [f"a <thi {FIRST} <think"]),
    "at most one call": ({**SEPARATED, "stop_after_first": True}, [FIRST, FIRST + SECOND, ""]),
    "calls": ({**SEPARATED, "at_least_one": True}, [FIRST + SECOND]),
    "a thought, then calls": (
        {"type": "sequence", "elements": [THOUGHT, LINE_END, TRIGGERED]},
        [f"Hm </think>\n{FIRST}", "</th</think>"],
    ),
    "calls in a tag": (tag("<t>", TRIGGERED, ["</t>", "[end]"]), [f"<t>{FIRST} [e[end]"]),
    "a call or text": ({"type": "or", "elements": [CALLS[0], TEXT]}, [FIRST, "no"]),
    "text that ends where an excluded word begins": (
        tag("<t>", {"type": "any_text", "excludes": ["</", "<t>"]}, ["</t>", "!"]),
        ["<t>a < b</t>", "<t>x!", "<t></x", "<t><t>"],
    ),
    "text before a string that it excludes": (
        {
            "type": "sequence",
            "elements": [LINE_END, {"type": "any_text", "excludes": ["</v>"]}, END_OF_VALUE, REGEX],
        },
        ["\na </b> é</v>.12", "\n</v>é"],
    ),
    "text in a tag that need not end": (tag("<t>", TEXT, ["</t>", ""]), ["<t>a </b", "<t></t>"]),
    "a grammar": (tag("<g>", GRAMMAR, "</g>"), ["<g>a=1,bc=23</g>", "<g>a=,"]),
    "grammars": ({"type": "star", "content": GRAMMAR}, ["a=1b=2,c=3", ""]),
    **{style: (xml(style), [f"<c>\n{text}\n</c>"]) for style, text in PARAMETERS.items()},
    **{
        f"{style}, any": (xml(style, True), [f"<c>\n{text}\n</c>"])
        for style, text in PARAMETERS.items()
    },
    "two triggers": (
        {
            "type": "triggered_tags",
            "triggers": ["<a", "[b"],
            "tags": [
                tag("<a>", ANY, "</a>"),
                tag("<ab", REGEX, ["x", "xy"]),
                tag("[b]", REGEX, "]"),
            ],
        },
        ["t <a>{}</a>..[b]123]<ab12x", "<abééxy [b]"],
    ),
    "a call with a pattern": (
        tag("<call>", {"type": "json_schema", "json_schema": TRIP}, "</call>"),
        ['<call>{"day": "07", "people": 12}</call>', '<call>{"day": "7"'],
    ),
    "lines, and anything but a line end": (
        {"type": "sequence", "elements": [LINE, {**LINE, "pattern": r"[^\n]*"}]},
        ["a é  b", "\n"],
    ),
    "wide parts, each of them optional": (
        {
            "type": "sequence",
            "elements": [{"type": "regex", "pattern": f"[^{letter}]*"} for letter in "aeiou"],
        },
        ["some text, and more", "aeiou", "uoiea"],
    ),
    "calls whose trigger is banned": (
        {**TRIGGERED, "excludes": ["<call>"]},
        [FIRST, "text <call", "text"],
    ),
    "repeated": (
        {
            "type": "sequence",
            "elements": [
                {"type": "repeat", "min": 1, "max": 3, "content": REGEX},
                {"type": "optional", "content": CALLS[0]},
                {"type": "plus", "content": {"type": "const_string", "value": "."}},
            ],
        },
        ["12é345..", f"12{FIRST}."],
    ),
}


def follow_beside_stock(ours: SglBackend, spec: str, text: str) -> bool:
    """Compares the masks of both before each token of a text, as far as it is allowed. Returns
    whether that is to its end."""
    grammar = ours.compile_grammar(Options.STRUCTURAL_TAG, spec)
    stock = ours.xgrammar.compile_grammar(Options.STRUCTURAL_TAG, spec)
    assert isinstance(grammar, SglGrammar), "handed on: nothing is compared"
    for token in ours.tokenizer.encode(text, add_special_tokens=False):
        legal = bits(ours, grammar)
        assert legal == bits(ours, stock)
        if token not in legal:
            return False
        assert grammar.accept_tokens("", [token]) and stock.accept_tokens("", [token])
    assert bits(ours, grammar) == bits(ours, stock)
    return True


QUICK = ("text, calls", "calls", "a thought, then calls", "qwen_xml", "a grammar", "repeated")
SOME_SLOW = some_nightly(FORMATS, QUICK, [pytest.mark.slow])


@pytest.mark.parametrize("name", SOME_SLOW)
def test_the_masks_are_those_of_stock(name: str, ours: SglBackend) -> None:
    form, texts = FORMATS[name]
    spec = json.dumps({"type": "structural_tag", "format": form})
    walk_beside_stock(ours, Options.STRUCTURAL_TAG, spec)
    for text in texts:
        follow_beside_stock(ours, spec, text)


def test_so_are_those_of_the_older_form() -> None:
    """White space stays allowed where the server forbids it elsewhere: vLLM does not hand
    `disable_any_whitespace` to xgrammar for structural tags."""
    compact = backend(compact=True)
    structures = [{"begin": f"<{name}>", "schema": CITY, "end": "</>"} for name in ("a", "ab")]
    spec = json.dumps({"structures": structures, "triggers": ["<a"]})
    walk_beside_stock(compact, Options.STRUCTURAL_TAG, spec)
    follow_beside_stock(compact, spec, 'x <ab>{"city": "Rome", "days": 3}</> <a')


@pytest.mark.parametrize("depth", [600, 5_000])
def test_a_tag_nested_too_deeply_is_no_error_of_ours(depth: int) -> None:
    by_spec = backend(by_spec=True)
    nested = '{"type":"optional","content":' * depth + '{"type":"any_text"}' + "}" * depth
    with contextlib.suppress(ValueError):
        by_spec.compile_grammar(Options.STRUCTURAL_TAG, f'{{"format":{nested}}}')
    assert not by_spec.num_errors


# -- calls as models write them


UNLISTED = {"harmony", "minimax"}
"""Known, but not in vLLM's list."""


@pytest.mark.slow
@pytest.mark.parametrize("model", tool_tags.MODELS)
def test_the_masks_along_calls_are_those_of_stock(model: str, ours: SglBackend) -> None:
    if model not in structural_tag_registry.SUPPORTED_STRUCTURAL_TAG_MODELS | UNLISTED:
        pytest.skip(f"vLLM {vllm.__version__} does not know {model}")
    for choice, strict in (("required", True), ("required", False), ("auto", True)):
        form = tool_tags.tag_of(model, choice=choice, strict=strict)
        texts = [tool_tags.written(form["format"], random.Random(seed)) for seed in range(4)]
        followed = [follow_beside_stock(ours, json.dumps(form), text) for text in texts]
        assert all(followed) if strict and choice == "required" else any(followed)


# -- free text, by brute force

ALPHABET = "abc"
OPTIONS = ("at_least_one", "stop_after_first")
TEXTS = ["".join(text) for n in range(6) for text in itertools.product(ALPHABET, repeat=n)]


def random_format(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    def word() -> str:
        return "".join(rng.choices(ALPHABET, k=rng.choice((1, 1, 2, 2, 3))))

    def words(*counts: int) -> list[str]:
        return [word() for _ in range(rng.choice(counts))]

    def inner() -> dict[str, Any]:
        return random_format(rng, depth + 1)

    text = {"type": "any_text", "excludes": words(0, 1, 1, 2)}
    const = {"type": "const_string", "value": word()}
    regex = {"type": "regex", "pattern": rng.choice(("[^a]", "[ab]", ".")) + rng.choice("*+")}
    match rng.randrange(4) if depth > 2 else rng.randrange(12):
        case 0 | 1:
            return text
        case 2:
            return const
        case 3:
            return regex
        case 4 | 5:
            return tag(word(), inner(), words(1, 1, 2) + [""] * (rng.random() < 0.2))
        case 6 | 7:
            follower = {
                **const,
                "value": rng.choice(text["excludes"] or ["a"]) + rng.choice(["", "b"]),
            }
            elements = rng.choice(([text, follower], [inner(), const], [regex, inner(), regex]))
            return {"type": "sequence", "elements": elements}
        case 8 | 9:
            triggers = words(1, 1, 2)
            return {
                "type": "triggered_tags",
                "triggers": triggers,
                "tags": [
                    tag(one + rng.choice(["", "a", "b"]), inner(), word()) for one in triggers
                ],
                "excludes": words(0, 1, 1, 2) + triggers[: rng.random() < 0.2],
                **{name: True for name in OPTIONS if rng.random() < 0.3},
            }
        case _:
            return {"type": rng.choice(("star", "optional", "plus")), "content": inner()}


@pytest.mark.slow
def test_free_text_ends_where_stock_s_does() -> None:
    """All short texts of three characters, in random formats whose words overlap."""
    rng = random.Random(1)
    num_compared = 0
    while num_compared < requests(150):
        form = {"type": "structural_tag", "format": random_format(rng)}
        try:
            start = Automaton(compile_by("compile_structural_tag", json.dumps(form))).start
            stock = xgrammar.Grammar.from_structural_tag(json.dumps(form))
        except (UnsupportedGrammarError, RuntimeError):
            continue
        for text in TEXTS:
            state = start.walk(text.encode())
            is_allowed = state is not None and state.accepting
            assert is_allowed == is_grammar_accept_string(stock, text), (form, text)
        num_compared += 1
