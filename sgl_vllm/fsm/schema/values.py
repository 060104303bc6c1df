"""JSON values inside schemas: equality, types, spelling and counts."""

from __future__ import annotations

import json
from collections.abc import Hashable
from typing import Any  # Any: JSON of a user's schema

from sgl_vllm.fsm.errors import UnsupportedSchemaError

MAX_COUNT = 1_000_000
"""A larger `minLength`, `maxItems`, ... is refused."""


_to_json = json.JSONEncoder(
    ensure_ascii=False, allow_nan=False, separators=(",", ":"), check_circular=False
).encode


def identity(value: Any) -> Hashable:
    """A key that is equal for values that are equal in JSON: 1 and 1.0 are, 1 and true are not."""
    if isinstance(value, dict):
        return "object", frozenset([(k, identity(v)) for k, v in value.items()])
    if isinstance(value, list):
        return "array", tuple([identity(v) for v in value])
    return ("boolean", value) if isinstance(value, bool) else value


def is_a(value: Any, type_name: str) -> bool:
    """Whether a value has a type of JSON schema; 1.0 is an integer."""
    if type_name == "null":
        return value is None
    if type_name == "boolean":
        return isinstance(value, bool)
    if type_name in ("number", "integer"):
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        return type_name == "number" or isinstance(value, int) or value.is_integer()
    return isinstance(value, {"object": dict, "array": list, "string": str}[type_name])


def listed_values(schema: dict[str, Any]) -> list[Any] | None:
    """The values that `const` or `enum` lists; None without them."""
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else None


def listings(schema: dict[str, Any]) -> list[list[Any]]:
    """The values of `const` and those of `enum`, as far as the schema has them."""
    found = [[schema["const"]]] if "const" in schema else []
    return [*found, schema["enum"]] if "enum" in schema else found


def spelled(value: Any) -> bytes:
    """A value as JSON, without whitespace."""
    if isinstance(value, str) and value.isidentifier():  # nothing in it is escaped
        return f'"{value}"'.encode()
    try:
        return _to_json(value).encode()
    except (ValueError, TypeError):
        raise UnsupportedSchemaError("a value that cannot be written as JSON") from None


def quoted(name: Any) -> bytes:
    """A property's name, as JSON."""
    if not isinstance(name, str):
        raise UnsupportedSchemaError("a property's name must be a string")
    return spelled(name)


def limits(schema: dict[str, Any], least: str, most: str) -> tuple[int, int | None]:
    """The counts of two keywords: 0 without the first, None without the second."""
    high = schema.get(most)
    return _count(schema.get(least, 0), least), None if high is None else _count(high, most)


def _count(value: Any, keyword: str) -> int:
    if not is_a(value, "integer"):
        raise UnsupportedSchemaError(f"{keyword} must be an integer")
    if not 0 <= value <= MAX_COUNT:
        raise UnsupportedSchemaError(f"{keyword} must be between 0 and {MAX_COUNT:,}")
    return int(value)
