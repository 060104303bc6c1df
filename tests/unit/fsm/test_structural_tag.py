"""Which texts a structural tag allows."""

from __future__ import annotations

from typing import Any

import pytest

from sgl_vllm.fsm import structural_tag
from sgl_vllm.fsm.automaton import Automaton
from sgl_vllm.fsm.byte_dfa import CompiledFormat
from sgl_vllm.fsm.errors import (
    TooComplexError,
    UnsupportedGrammarError,
    UnsupportedPatternError,
    UnsupportedTagError,
)
from sgl_vllm.fsm.schema import SchemaSemantics, compile_schema, compiled_schema
from sgl_vllm.fsm.structural_tag import MAX_FORMATS, compile_structural_tag
from tests.unit.fsm.texts import after

JSON = {"type": "json_schema", "json_schema": {"enum": [1, 22]}}
TEXT = {"type": "any_text"}


def const(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


def tag(begin: str, content: dict[str, Any], end: str | list[str]) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


CALLS = [tag("<f=a>", JSON, "</f>"), tag("<f=ab>", const("x"), ["</f>", "."])]


def triggered(**options: Any) -> dict[str, Any]:
    return {"type": "triggered_tags", "triggers": ["<f="], "tags": CALLS, **options}


def separated(**options: Any) -> dict[str, Any]:
    return {"type": "tags_with_separator", "tags": CALLS, "separator": ";", **options}


def sequence(*elements: dict[str, Any]) -> dict[str, Any]:
    return {"type": "sequence", "elements": [*elements]}


def automaton(form: dict[str, Any]) -> Automaton:
    def schema(one: Any, style: str) -> Any:
        assert style == "json"
        return compiled_schema(one, semantics=SchemaSemantics.STRICT, any_whitespace=True)

    tag = {"type": "structural_tag", "format": form}
    return Automaton(compile_structural_tag(tag, schema).expression)


def allows(form: dict[str, Any], text: str) -> bool:
    state = after(automaton(form).start, text.encode())
    return state is not None and state.accepting


@pytest.mark.parametrize(
    ("form", "allowed", "refused"),
    [
        (const("ab"), ["ab"], ["", "a", "abc"]),
        (tag("<", TEXT, [">", "|"]), ["<>", "<x|", "<<>"], ["<x", "<>>", "<a|>"]),
        (sequence(const("a"), TEXT), ["a", "a b"], ["", "b"]),
        ({"type": "any_text", "excludes": ["no"]}, ["", "n o"], ["no", "a no"]),
        (tag("<", TEXT, ["/>", ""]), ["<", "<a>", "<a/>"], ["<a/>b"]),
        (tag("<", {"type": "any_text", "excludes": ["/"]}, "/>"), ["</>", "<a/>"], ["<", "<a/b/>"]),
        (
            sequence({"type": "any_text", "excludes": ["/", "!"]}, const("/>"), const("/>")),
            ["/>/>", "a/>/>"],
            ["a/>", "!/>/>", "/b/>/>", "/>a/>"],
        ),
        ({"type": "grammar", "grammar": 'root ::= "a" root?'}, ["a", "aa"], ["", "b"]),
        ({"type": "or", "elements": [const("a"), JSON]}, ["a", "22"], ["", "a22", "2"]),
        ({"type": "regex", "pattern": "a+"}, ["a", "aa"], ["", "ab"]),
        ({"type": "optional", "content": JSON}, ["", "1"], ["11"]),
        ({"type": "star", "content": JSON}, ["", "1221"], ["2"]),
        ({"type": "plus", "content": JSON}, ["1", "11"], [""]),
        ({"type": "repeat", "min": 1, "max": 2, "content": const("a")}, ["a", "aa"], ["", "aaa"]),
        ({"type": "repeat", "min": 2, "max": -1, "content": const("a")}, ["aa", "aaa"], ["a"]),
        (triggered(), ["", "hi <f", "x<f=a>1</f>y<f=ab>x.z"], ["<f=", "<f=a>", "<f=a>3</f>"]),
        (triggered(at_least_one=True), ["<f=a>1</f>", "<f=ab>x. ok"], ["", "x<f=a>1</f>"]),
        (triggered(stop_after_first=True), ["", "a<f=ab>x</f>"], ["<f=ab>x</f>b"]),
        (triggered(excludes=["<t>"]), ["<t"], ["<t>", "<f=ab>x.<t>"]),
        (separated(), ["", "<f=a>22</f>;<f=ab>x."], [";", "<f=a>1</f><f=a>1</f>", "a"]),
        (separated(at_least_one=True), ["<f=a>1</f>"], ["", "<f=a>1</f>;"]),
        (separated(stop_after_first=True), ["", "<f=ab>x."], ["<f=ab>x.;<f=ab>x."]),
        (tag("[", triggered(), "]"), ["[]", "[a<f=a>1</f>b]"], ["[", "[]]", "[<f=]"]),
    ],
    ids=lambda value: value.get("type") if isinstance(value, dict) else "",
)
def test_texts(form, allowed, refused) -> None:
    assert [text for text in allowed if not allows(form, text)] == []
    assert [text for text in refused if allows(form, text)] == []


def test_the_older_form_is_text_with_tags() -> None:
    structures = [{"begin": "<a>", "schema": {"enum": [1]}, "end": "</a>"}]
    made = Automaton(
        compile_structural_tag(
            {"structures": structures, "triggers": ["<a"]},
            lambda one, style: CompiledFormat(compile_schema(one)),
        ).expression
    )
    for text, is_allowed in ((b"x <a>1</a> y", True), (b"<a>2", False), (b"<a", False)):
        state = after(made.start, text)
        assert (state is not None and state.accepting) == is_allowed


@pytest.mark.parametrize(
    "form",
    [
        sequence(TEXT, const("a")),
        {"type": "star", "content": TEXT},
        {"type": "any_text", "max_tokens": 5},
        {"type": "json_schema", "json_schema": {}, "any_order": True},
        {"type": "grammar", "grammar": "no grammar"},
        sequence({"type": "any_text", "excludes": ["<"]}, const(">")),
        tag("[", TEXT, "```"),  # it may begin in the text
        tag("[", triggered(), "=a>]"),
        tag("<", {"type": "token", "token": 5}, ">"),
        {"type": "tag", "begin": {"type": "token", "token": 5}, "content": JSON, "end": ">"},
        triggered(tags=[tag("<g>", JSON, "</g>")]),
        triggered(triggers=["<f=", "<f=a"]),
        triggered(new_option=True),
        {"type": "triggered_tags"},
        sequence(),
        {"type": "repeat", "min": 0, "max": 1_000, "content": JSON},
        {"no": "type"},
        ["no format"],
        sequence(*[const("a")] * (MAX_FORMATS + 1)),
        {"type": "regex", "pattern": r"[^\s\S]"},
        const("\ud800"),
    ],
    ids=lambda form: str(form)[:50],
)
def test_other_formats_are_left_to_other_backends(form) -> None:
    with pytest.raises((UnsupportedTagError, UnsupportedPatternError, UnsupportedGrammarError)):
        automaton(form)


def test_parts_that_take_too_long_together_are_left_to_other_backends(monkeypatch) -> None:
    clock = iter(range(0, 100, 2))
    monkeypatch.setattr(structural_tag, "monotonic", lambda: next(clock))
    with pytest.raises(TooComplexError, match="too long"):
        automaton(sequence(*[const("a")] * 4))


def test_a_tag_nested_too_deeply_is_left_to_other_backends() -> None:
    form = JSON
    for _ in range(5_000):
        form = {"type": "optional", "content": form}
    with pytest.raises(UnsupportedTagError):
        automaton(form)
