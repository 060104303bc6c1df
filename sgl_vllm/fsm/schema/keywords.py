"""The keywords of JSON schema: which constrain values, in which draft, and their own values.

Owns these lists, and reads values that are no subschemas. Does not own what a keyword means.
"""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Any, TypeAlias  # Any: JSON of a user's schema

from sgl_vllm.fsm.errors import UnsupportedSchemaError

Schema: TypeAlias = dict[str, Any] | bool  # Any: a keyword's value is whatever the request says
"""A schema as `json.loads` returns it."""

TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")

MAX_COUNT = 1_000_000
"""A larger `minLength`, `maxItems`, ... is refused."""

_ARE_NAMES = frozenset({str})
"""The types of names: a comparison of types takes a third less than a look at each name."""


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


OF_OBJECTS = _names(
    "properties required additionalProperties patternProperties minProperties maxProperties "
    "propertyNames"
)
OF_ARRAYS = _names(
    "items prefixItems additionalItems minItems maxItems uniqueItems contains minContains "
    "maxContains"
)
OF_STRINGS = _names("minLength maxLength pattern format")
OF_NUMBERS = _names("minimum maximum exclusiveMinimum exclusiveMaximum multipleOf")
LEAVES = OF_OBJECTS | OF_ARRAYS | OF_STRINGS | OF_NUMBERS | {"type", "const", "enum"}
"""Keywords that a leaf holds."""

DEPENDENCIES = _names("dependencies dependentRequired dependentSchemas")
UNEVALUATED = _names("unevaluatedProperties unevaluatedItems")
CONSTRAINTS = (
    LEAVES
    | DEPENDENCIES
    | UNEVALUATED
    | _names("$ref $dynamicRef $recursiveRef allOf anyOf oneOf not if then else")
)
"""Keywords that constrain values. All others, such as `title`, are ignored."""

_DRAFTS = {"draft-03": 3, "draft-04": 4, "draft-06": 6, "draft-07": 7, "2019-09": 2019}
_NEWEST = 2020
_SINCE = {
    6: _names("const contains propertyNames"),
    7: _names("if then else"),
    2019: UNEVALUATED | _names("dependentRequired dependentSchemas minContains maxContains"),
    2020: _names("prefixItems"),
}
"""The drafts that brought keywords. `dependencies`, which newer drafts do not know, is read in all:
many of their schemas still have it."""

KNOWN = {
    draft: CONSTRAINTS.difference(*[names for since, names in _SINCE.items() if since > draft])
    for draft in (*_DRAFTS.values(), _NEWEST)
}
"""The keywords that constrain values, by draft."""


def draft_of(dialect: str) -> int:
    """The draft that a value of `$schema` names; the newest if it names none."""
    return next((number for name, number in _DRAFTS.items() if name in dialect), _NEWEST)


def value(schema: dict[str, Any], keyword: str, *types: type) -> Any:
    """The value of a keyword, which is of one of some types.

    Raises UnsupportedSchemaError: as all below, it is malformed.
    """
    found = schema[keyword]
    if not isinstance(found, types):
        raise _malformed(keyword)
    return found


def types(schema: dict[str, Any]) -> list[str]:
    """The types that `type` names."""
    found = schema["type"]
    names: list[str] = [found] if isinstance(found, str) else value(schema, "type", list)
    if not names or not all(name in TYPES for name in names):
        raise _malformed("type")
    return names


def by_name(schema: dict[str, Any], keyword: str) -> dict[str, Any]:
    """The values that a keyword holds by the names of properties."""
    found: dict[str, Any] = value(schema, keyword, dict)
    if not _ARE_NAMES.issuperset(map(type, found)):
        raise _malformed(keyword)
    return found


def names(schema: dict[str, Any], keyword: str) -> tuple[str, ...]:
    """The names that a keyword lists, each once; none without the keyword."""
    if keyword not in schema:
        return ()
    found = value(schema, keyword, list)
    if not _ARE_NAMES.issuperset(map(type, found)):
        raise _malformed(keyword)
    return tuple(dict.fromkeys(found))


def number(schema: dict[str, Any], keyword: str) -> Decimal | None:
    """A number, exactly as its shortest spelling says; None without the keyword."""
    if keyword not in schema:
        return None
    found = value(schema, keyword, int, float)
    if isinstance(found, bool) or (isinstance(found, float) and not math.isfinite(found)):
        raise _malformed(keyword)
    return decimal(found)


def decimal(found: int | float) -> Decimal:
    """A number, exactly as its shortest spelling says."""
    try:
        return Decimal(repr(found))
    except ValueError:
        raise UnsupportedSchemaError("a number with too many digits") from None


def limits(schema: dict[str, Any], least: str, most: str) -> tuple[int, int | None]:
    """The counts of two keywords: 0 without the first, None without the second."""
    return _count(schema, least) or 0, _count(schema, most)


def _count(schema: dict[str, Any], keyword: str) -> int | None:
    if keyword not in schema:
        return None
    found = value(schema, keyword, int, float)
    if isinstance(found, bool):
        raise _malformed(keyword)
    if found != found // 1:
        raise UnsupportedSchemaError(f"{keyword} must be an integer")
    if not 0 <= found <= MAX_COUNT:
        raise UnsupportedSchemaError(f"{keyword} must be between 0 and {MAX_COUNT:,}")
    return int(found)


def _malformed(keyword: str) -> UnsupportedSchemaError:
    return UnsupportedSchemaError(f"{keyword} has a value of the wrong type")
