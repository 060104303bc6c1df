"""JSON schemas that OpenAI's services keep to strictly.

Owns which schemas can be asked for with `strict`, where the decoder enforces them, and how they are
written then: every object closed, all its properties required. Pure.
"""

from __future__ import annotations

from typing import Any

_KEYWORDS = {
    "$defs",
    "$ref",
    "additionalProperties",
    "anyOf",
    "const",
    "definitions",
    "description",
    "enum",
    "exclusiveMaximum",
    "exclusiveMinimum",
    "items",
    "maxItems",
    "maximum",
    "minItems",
    "minimum",
    "multipleOf",
    "properties",
    "required",
    "title",
    "type",
}


def strict_schema(schema: dict[str, Any]) -> dict[str, Any] | None:
    """`schema` as strict mode takes it, or None if it cannot say the same there.

    Objects that leave open whether they may have more properties are closed, so that every
    document of the result is one of `schema`.
    """
    if schema.get("type") != "object":
        return None
    try:
        return _strict(schema)
    except _NotStrictError:
        return None


class _NotStrictError(Exception):
    """Strict mode has no words for this."""


def _strict(schema: Any) -> dict[str, Any]:
    if not isinstance(schema, dict) or not schema or not schema.keys() <= _KEYWORDS:
        raise _NotStrictError
    if "$ref" in schema and len(schema) > 1:
        raise _NotStrictError
    result = dict(schema)
    for key in ("properties", "$defs", "definitions"):
        if key in schema:
            result[key] = {name: _strict(inner) for name, inner in schema[key].items()}
    if "items" in schema:
        result["items"] = _strict(schema["items"])
    if "anyOf" in schema:
        result["anyOf"] = [_strict(inner) for inner in schema["anyOf"]]
    if "properties" in schema or schema.get("type") == "object":
        if set(schema.get("required", ())) != set(schema.get("properties", ())):
            raise _NotStrictError
        if schema.get("additionalProperties", False) is not False:
            raise _NotStrictError
        result["additionalProperties"] = False
    return result
