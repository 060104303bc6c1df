"""The keywords of JSON schema: which constrain values, and which are compiled here.

Owns these lists and what a keyword's own value must look like. Does not own what a keyword means.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias  # Any: JSON of a user's schema

Schema: TypeAlias = dict[str, Any] | bool  # Any: a keyword's value is whatever the request says
"""A schema as `json.loads` returns it."""

TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")


@dataclass(frozen=True, eq=False)
class Several:
    """The value of a keyword that a conjunction holds several times. No document contains one."""

    values: tuple[Any, ...]


def several(schema: dict[str, Any], keyword: str) -> tuple[Any, ...]:
    """The values of a keyword: none, one, or those of `Several`."""
    if keyword not in schema:
        return ()
    value = schema[keyword]
    return value.values if isinstance(value, Several) else (value,)


@dataclass(frozen=True, eq=False)
class Contained:
    """`contains` with its bounds: from `low` to `high` items (None: any number), of those from
    index `start` on, are valid against `schema`."""

    schema: Schema
    low: int
    high: int | None
    start: int = 0


@dataclass(frozen=True, eq=False)
class Branch:
    """A branch of `oneOf`, alone and merged with what stands beside `oneOf`."""

    own: Schema
    whole: Schema


def branches_of(value: Any) -> tuple[Branch, ...]:
    """The branches of a value of `oneOf`."""
    if isinstance(value, Several):
        return value.values
    return tuple([Branch(schema, schema) for schema in value])


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

_ARE_NAMES = frozenset({str})
"""The types of names: a comparison of types takes a third less than a look at each name."""


def _is_schema(value: Any) -> bool:
    return isinstance(value, dict | bool)


def _is_dict(value: Any) -> bool:
    return isinstance(value, dict) and _ARE_NAMES.issuperset(map(type, value))


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


def _is_list_of_names(value: Any) -> bool:
    return _is_list(value) and _ARE_NAMES.issuperset(map(type, value))


def _is_dependencies(value: Any) -> bool:
    return _is_dict(value) and all(
        _is_schema(needed) or _is_list_of_names(needed) for needed in value.values()
    )


SHAPES: dict[str, Callable[[Any], bool]] = {
    "type": _is_type,
    "required": _is_list_of_names,
    "uniqueItems": lambda v: isinstance(v, bool),
    "multipleOf": lambda v: _is_number(v) and v > 0,
    "items": lambda v: _is_schema(v) or _is_list(v),
    **dict.fromkeys(
        _names(
            "additionalProperties additionalItems not if then else contains propertyNames "
            "unevaluatedProperties unevaluatedItems"
        ),
        _is_schema,
    ),
    **dict.fromkeys(_names("dependencies dependentRequired dependentSchemas"), _is_dependencies),
    **dict.fromkeys(_names("properties patternProperties"), _is_dict),
    **dict.fromkeys(_names("allOf anyOf oneOf enum prefixItems"), _is_list),
    **dict.fromkeys(_names("pattern format"), lambda v: isinstance(v, str)),
    **dict.fromkeys(
        _names(
            "minLength maxLength minItems maxItems minProperties maxProperties minimum maximum "
            "minContains maxContains"
        ),
        _is_number,
    ),
    **dict.fromkeys(
        _names("exclusiveMinimum exclusiveMaximum"), lambda v: isinstance(v, bool) or _is_number(v)
    ),
}
"""Says whether a keyword's value is what the specification asks for. Any value of others is."""
