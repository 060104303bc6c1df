"""JSON values inside schemas: equality, types, spelling and counts."""

from __future__ import annotations

import json
from collections.abc import Hashable
from typing import Any  # Any: JSON of a user's schema

from sgl_vllm.fsm.errors import UnsupportedSchemaError

MAX_COUNT = 1_000_000
"""A larger `minLength`, `maxItems`, ... is refused."""


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


def spelled(value: Any) -> bytes:
    """A value that contains no others, as JSON."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
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


def non_empty_list(value: Any, keyword: str) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise UnsupportedSchemaError(f"{keyword} must be a non-empty list")
    return value
