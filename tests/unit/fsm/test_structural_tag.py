"""Which structural tags are left to other backends.

The texts of the others are compared with xgrammar's in tests/engine/test_structural_tags.py.
"""

from __future__ import annotations

from typing import Any

import pytest

from sgl_vllm.fsm import structural_tag
from sgl_vllm.fsm.automaton import Automaton
from sgl_vllm.fsm.errors import (
    TooComplexError,
    UnsupportedGrammarError,
    UnsupportedPatternError,
    UnsupportedTagError,
)
from sgl_vllm.fsm.schema import compiled_schema
from sgl_vllm.fsm.structural_tag import MAX_FORMATS, compile_structural_tag

JSON = {"type": "json_schema", "json_schema": {"enum": [1, 22]}}
TEXT = {"type": "any_text"}


def const(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


def tag(begin: str, content: dict[str, Any], end: str | list[str]) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


CALLS = [tag("<f=a>", JSON, "</f>"), tag("<f=ab>", const("x"), ["</f>", "."])]


def triggered(**options: Any) -> dict[str, Any]:
    return {"type": "triggered_tags", "triggers": ["<f="], "tags": CALLS, **options}


def sequence(*elements: dict[str, Any]) -> dict[str, Any]:
    return {"type": "sequence", "elements": [*elements]}


def automaton(form: dict[str, Any]) -> Automaton:
    def schema(one: Any, style: str) -> Any:
        assert style == "json"
        return compiled_schema(one, any_whitespace=True)

    tag = {"type": "structural_tag", "format": form}
    return Automaton(compile_structural_tag(tag, schema).expression)


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
