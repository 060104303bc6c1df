"""JSON schemas for the strict mode of OpenAI's services, in which the decoder enforces them.

Owns which schemas strict mode can express, and their form there: every object is closed, and all
its properties are required. Pure.
"""

from __future__ import annotations

from sgl_vllm.lang.backends.base import Json

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


def strict_schema(schema: Json) -> Json | None:
    """`schema` in the form of strict mode, or None if strict mode cannot express it.

    Objects that do not say whether more properties are allowed are closed, so that every document
    of the result is valid for `schema`.
    """
    if schema.get("type") != "object":
        return None
    try:
        return _strict(schema)
    except _NotStrictError:
        return None


class _NotStrictError(Exception):
    """Strict mode cannot express this."""


def _strict(schema: object) -> Json:
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
