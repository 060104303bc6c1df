"""The keywords of JSON schema: which constrain values, and which are compiled here.

Owns these lists and what a keyword's own value must look like. Does not own what a keyword means.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from typing import Any, TypeAlias  # Any: JSON of a user's schema

Schema: TypeAlias = dict[str, Any] | bool  # Any: a keyword's value is whatever the request says
"""A schema as `json.loads` returns it."""

TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")


class SchemaSemantics(enum.Enum):
    """What a schema means where backends differ.

    SPEC: what the JSON Schema specification says.
    STRICT: what xgrammar, vLLM's default backend, makes of it. An object has no other properties
        than the listed ones unless `additionalProperties` says so, and `properties` implies
        `"type": "object"`.
    """

    SPEC = "spec"
    STRICT = "strict"


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


CONSTRAINTS = _names(
    "$ref allOf anyOf oneOf not if then else const enum type properties required "
    "additionalProperties patternProperties minProperties maxProperties propertyNames "
    "dependencies dependentRequired dependentSchemas unevaluatedProperties items prefixItems "
    "additionalItems minItems maxItems uniqueItems contains minContains maxContains "
    "unevaluatedItems minLength maxLength pattern format minimum maximum exclusiveMinimum "
    "exclusiveMaximum multipleOf $dynamicRef $recursiveRef $anchor $dynamicAnchor"
)
"""Keywords that constrain values. All others, such as `title`, are ignored."""

SUPPORTED = {
    SchemaSemantics.SPEC: _names(
        "$ref allOf anyOf oneOf const enum type properties required additionalProperties "
        "patternProperties minProperties maxProperties items prefixItems additionalItems minItems "
        "maxItems minLength maxLength pattern format minimum maximum exclusiveMinimum "
        "exclusiveMaximum"
    ),
    SchemaSemantics.STRICT: _names(
        "$ref anyOf const enum type properties required additionalProperties items minItems "
        "maxItems minLength maxLength"
    ),
}


def is_well_formed(keyword: str, value: Any) -> bool:
    """Whether a keyword's value has the shape that the specification asks for."""
    shape = _SHAPES.get(keyword)
    return shape is None or shape(value)


def has_shape(keyword: str) -> bool:
    """Whether `is_well_formed` checks this keyword at all."""
    return keyword in _SHAPES


def _is_schema(value: Any) -> bool:
    return isinstance(value, dict | bool)


def _is_dict(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(name, str) for name in value)


def _is_list(value: Any) -> bool:
    return isinstance(value, list)


def _is_number(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and not isinstance(value, bool)


def _is_type(value: Any) -> bool:
    if isinstance(value, str):
        return value in TYPES
    return _is_list(value) and value != [] and all(t in TYPES for t in value)


_SHAPES: dict[str, Callable[[Any], bool]] = {
    "type": _is_type,
    "required": lambda v: _is_list(v) and all(isinstance(name, str) for name in v),
    "items": lambda v: _is_schema(v) or _is_list(v),
    **dict.fromkeys(_names("additionalProperties additionalItems"), _is_schema),
    **dict.fromkeys(_names("properties patternProperties"), _is_dict),
    **dict.fromkeys(_names("allOf anyOf oneOf enum prefixItems"), _is_list),
    **dict.fromkeys(_names("pattern format"), lambda v: isinstance(v, str)),
    **dict.fromkeys(
        _names("minLength maxLength minItems maxItems minProperties maxProperties minimum maximum"),
        _is_number,
    ),
    **dict.fromkeys(
        _names("exclusiveMinimum exclusiveMaximum"), lambda v: isinstance(v, bool) or _is_number(v)
    ),
}
