"""`const` and `enum`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any  # Any: JSON of a user's schema

from sgl_vllm.fsm.errors import UnsupportedSchemaError
from sgl_vllm.fsm.expressions import Alt, Expression, Literals, literal
from sgl_vllm.fsm.schema.context import Context
from sgl_vllm.fsm.schema.keywords import CONSTRAINTS
from sgl_vllm.fsm.schema.values import identity, is_a, spelled


def compile_enumeration(
    context: Context, values: Sequence[Any], schema: dict[str, Any]
) -> Expression:
    """Any of `values`, which `schema` lists, that the rest of `schema` allows.

    A value is spelled as `json.dumps` spells it, and an object's members keep their order.
    """
    allowed = [v for v in values if _is_allowed(v, schema)]
    if not allowed:
        raise UnsupportedSchemaError("no value of the enumeration is valid")
    texts: list[tuple[bytes, Expression | None]] = []
    containers: list[Expression] = []
    for value in allowed:
        if isinstance(value, dict | list) and value:
            if context.is_strict:
                raise UnsupportedSchemaError("an enumeration of objects or arrays")
            containers.append(_exactly(context, value))
        else:
            texts.append((spelled(value), None))
    unique = tuple(dict.fromkeys(texts))
    options = [*([Literals(unique)] if unique else []), *containers]
    return options[0] if len(options) == 1 else Alt(options)


def _exactly(context: Context, value: Any) -> Expression:
    """One value, with white space between its tokens."""
    parts: list[Expression] = []
    if isinstance(value, list):
        for item in value:
            parts.extend([context.comma] if parts else [])
            parts.append(_exactly(context, item))
        return context.enclosed(b"[", b"]", parts)
    if isinstance(value, dict):
        for name, item in value.items():
            parts.extend([context.comma] if parts else [])
            parts.extend([context.key(name), _exactly(context, item)])
        return context.enclosed(b"{", b"}", parts)
    return literal(spelled(value))


def _is_allowed(value: Any, schema: dict[str, Any]) -> bool:
    """Whether `schema` allows a listed value. Beside `enum`, only `const` and `type` are read."""
    for name in schema.keys() & CONSTRAINTS - {"enum", "const", "type"}:
        raise UnsupportedSchemaError(f"enum with {name}")
    if "const" in schema and "enum" in schema:
        listed = {*map(identity, schema["enum"])}
        if identity(value) not in listed:
            return False
    types = schema.get("type")
    if types is None:
        return True
    return any(is_a(value, t) for t in ([types] if isinstance(types, str) else types))
