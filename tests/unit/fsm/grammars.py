"""Grammars of every kind that a server is asked for, by name."""

from collections.abc import Callable
from functools import partial
from typing import Any

from sgl_vllm.fsm.expressions import Expression, Literals
from sgl_vllm.fsm.regex import full_match
from sgl_vllm.fsm.schema import SchemaSemantics, compile_schema

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
    f"{name}, tight": partial(compile_schema, _SCHEMAS[name], any_whitespace=False)
    for name in ("tree", "names excluded", "anything")
}


def _choices() -> Expression:
    texts = ["a", "ab", "abacus", "b c", "ü", "ün", "yes", "yesterday"]
    return Literals(tuple((text.encode(), None) for text in texts))


GRAMMARS |= {
    "tree, strict": lambda: compile_schema(_TREE, semantics=SchemaSemantics.STRICT),
    "regex": lambda: full_match(r"(?:[a-z]+ )*\d{1,3}(?:\.\d+)?").expression,
    "regex of any character": lambda: full_match(r"[^é]{0,20}é.*").expression,
    "choices": _choices,
}
