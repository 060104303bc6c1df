"""Grammars of every kind that a server is asked for, by name."""

from collections.abc import Callable
from functools import partial
from typing import Any

from sgl_vllm.fsm.expressions import EMPTY, Alt, Expression, Lazy, Literals, Seq
from sgl_vllm.fsm.regex import full_match
from sgl_vllm.fsm.schema import compile_schema

_TREE = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["node", "nest", "é", 1, 12, None]},
        "children": {"type": "array", "items": {"$ref": "#"}, "maxItems": 3},
    },
    "required": ["name"],
    "additionalProperties": False,
}

_SCHEMAS: dict[str, dict[str, Any] | bool] = {
    "tree": _TREE,
    "anything": True,
    "short strings": {"type": "array", "items": {"type": "string", "maxLength": 3}},
    "long strings": {"type": "string", "minLength": 30, "maxLength": 900},
    "at least two characters": {"type": "string", "minLength": 2},
    "exactly two characters": {"type": "string", "minLength": 2, "maxLength": 2},
    "pattern": {"type": "string", "pattern": "^[a-c]+é?$", "maxLength": 9},
    "pattern anywhere": {"type": "string", "pattern": "[0-9]{3}x"},
    "names excluded": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "ab": {"type": "null"}, "é": {"type": "null"}},
        "additionalProperties": {"type": "string"},
    },
    "names of patterns": {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "patternProperties": {"^i": {"type": "integer"}},
        "additionalProperties": {"type": "boolean"},
    },
    "shared beginnings": {
        "anyOf": [
            {"const": "ab"},
            {"const": "abc"},
            {"type": "string", "pattern": "^ab*$"},
            {"type": "string", "maxLength": 4},
            {"type": "integer", "minimum": 12, "maximum": 3456},
            {"type": "number"},
        ]
    },
    "counted members": {
        "type": "object",
        "properties": {name: {"type": "integer"} for name in ("a", "ab", "b", "c")},
        "minProperties": 2,
        "maxProperties": 3,
        "additionalProperties": False,
    },
    "date": {"type": "string", "format": "date-time"},
}
GRAMMARS: dict[str, Callable[[], Expression]] = {
    name: partial(compile_schema, schema) for name, schema in _SCHEMAS.items()
}
GRAMMARS |= {
    f"{name}, tight": partial(compile_schema, _SCHEMAS[name], whitespace="compact")
    for name in ("tree", "names excluded", "anything")
}


def _choices() -> Expression:
    texts = ["a", "ab", "abacus", "b c", "ü", "ün", "yes", "yesterday"]
    return Literals(tuple((text.encode(), None) for text in texts))


GRAMMARS |= {
    "regex": lambda: full_match(r"(?:[a-z]+ )*\d{1,3}(?:\.\d+)?").expression,
    "regex of any character": lambda: full_match(r"[^é]{0,20}é.*").expression,
    "choices": _choices,
}


# -- automata next to each other, each of which may end anywhere, as in structural tags

_WIDE = {
    "twice": ["[^x]+", "[^x]*"],
    "three times": ["[^x]+", "[^b]*", ".+"],
    "eight times": ["[^x]+"] * 8,
    "each may be missing": [f"[^{letter}]*" for letter in "abcdefgh"],
}


def _in_a_row(patterns: list[str]) -> Expression:
    return Seq(*[full_match(pattern).expression for pattern in patterns])


def _again_and_again(pattern: str) -> Expression:
    part = full_match(pattern).expression
    more: Expression = Lazy(lambda: Alt((EMPTY, Seq(part, more))))
    return more


GRAMMARS |= {f"wide, {name}": partial(_in_a_row, patterns) for name, patterns in _WIDE.items()}
GRAMMARS |= {
    "wide, again and again": partial(_again_and_again, "[^x]+"),
    "wide, some again and again": partial(_again_and_again, "[^x]{1,3}|xx.?"),
}
