"""Keywords whose meaning depends on their siblings, in one form, and their intersection.

    {"prefixItems": [A], "items": R}                 item 0 is A, any other R
    {"properties": {n: A}, "patternProperties": {p: B}, "additionalProperties": R}
                                                     member n is A, one that p names is B, others R
    {"minimum": 1, "exclusiveMinimum": true}         above 1 (draft 4)

Keyword by keyword, such schemas cannot be merged: `items` of one schema constrains what
`prefixItems` of the other names. Here each schema first says what it makes of *every* item and
member. Owns that form; merging two subschemas is left to the caller (`conjunctions.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any  # Any: JSON of a user's schema

from sgl_vllm.fsm.errors import UnsupportedSchemaError
from sgl_vllm.fsm.schema.keywords import Contained, Schema, Several, several
from sgl_vllm.fsm.schema.values import limits

ARRAYS = frozenset({"prefixItems", "items", "additionalItems"})
OBJECTS = frozenset({"properties", "patternProperties", "additionalProperties"})
DEPENDENCIES = frozenset({"dependencies", "dependentRequired", "dependentSchemas"})

Both = Callable[[Schema, Schema], Schema]
"""A schema of the values that are valid against two."""


def items_of(schema: dict[str, Any]) -> tuple[list[Schema], Schema]:
    """The schemas of the first items, and of all others.

    Raises UnsupportedSchemaError: `prefixItems` stands beside a list of `items`.
    """
    first, rest = schema.get("prefixItems", []), schema.get("items", True)
    if isinstance(rest, list):
        if "prefixItems" in schema:
            raise UnsupportedSchemaError("prefixItems beside a list of items")
        first, rest = rest, schema.get("additionalItems", True)
    return first, rest


def contained_in(schema: dict[str, Any]) -> tuple[Contained, ...]:
    """What `contains` asks for, with the bounds beside it."""
    value = schema["contains"]
    if isinstance(value, Several):
        return value.values
    low, high = limits({"minContains": 1, **schema}, "minContains", "maxContains")
    return (Contained(value, low, high),)


def dependencies_of(value: dict[str, Any]) -> dict[str, Schema]:
    """What the presence of each property asks of the object: any of `DEPENDENCIES`."""
    return {
        name: {"required": needed} if isinstance(needed, list) else needed
        for name, needed in value.items()
    }


def both_items(a: dict[str, Any], b: dict[str, Any], both: Both) -> dict[str, Any]:
    """The keywords of `ARRAYS` that hold what those of `a` and those of `b` say."""
    (first_a, rest_a), (first_b, rest_b) = items_of(a), items_of(b)
    length = max(len(first_a), len(first_b))
    padded_a = [*first_a, *[rest_a] * (length - len(first_a))]
    padded_b = [*first_b, *[rest_b] * (length - len(first_b))]
    merged: dict[str, Any] = {"items": both(rest_a, rest_b)}
    if length:
        merged["prefixItems"] = [both(x, y) for x, y in zip(padded_a, padded_b, strict=True)]
    return merged


def rules_of(schema: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    """The schemas whose keywords of `OBJECTS`, and `propertyNames`, each member must satisfy."""
    if not isinstance(schema.get("patternProperties"), Several):
        return (schema,)
    names = [{"propertyNames": schema["propertyNames"]}] if "propertyNames" in schema else []
    return (*several(schema, "patternProperties"), *names)


def both_members(a: dict[str, Any], b: dict[str, Any], both: Both) -> dict[str, Any]:
    """The keywords of `OBJECTS` that hold what those of `a` and those of `b` say.

    Which names a pattern matches is found out when the object is compiled (`rules.py`): with
    patterns, the result holds both schemas as they are.
    """
    if a.get("patternProperties") or b.get("patternProperties"):
        first = rules_of(a)
        known = {*map(id, first)}
        others = [rule for rule in rules_of(b) if id(rule) not in known]
        return {"patternProperties": Several((*first, *others))}
    rest_a, rest_b = a.get("additionalProperties", True), b.get("additionalProperties", True)
    merged: dict[str, Any] = {}
    named_a, named_b = a.get("properties", {}), b.get("properties", {})
    if named_a or named_b:
        merged["properties"] = {
            name: both(named_a.get(name, rest_a), named_b.get(name, rest_b))
            for name in (*named_a, *(n for n in named_b if n not in named_a))
        }
    if "additionalProperties" in a or "additionalProperties" in b:
        merged["additionalProperties"] = both(rest_a, rest_b)
    return merged


def with_plain_bounds(schema: dict[str, Any]) -> dict[str, Any]:
    """The same schema without the `exclusiveMinimum` and `exclusiveMaximum` of draft 4, which are
    booleans."""
    plain = schema
    for inclusive, exclusive in (
        ("minimum", "exclusiveMinimum"),
        ("maximum", "exclusiveMaximum"),
    ):
        if isinstance(flag := plain.get(exclusive), bool):
            plain = {k: v for k, v in plain.items() if k != exclusive}
            if flag and inclusive in plain:
                plain[exclusive] = plain.pop(inclusive)
    return plain
