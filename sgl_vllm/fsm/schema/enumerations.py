"""`const` and `enum`."""

from __future__ import annotations

from typing import Any  # Any: JSON of a user's schema

from sgl_vllm.fsm.automaton import Automaton, State
from sgl_vllm.fsm.errors import NothingValidError
from sgl_vllm.fsm.expressions import Alt, Expression, Literals, literal
from sgl_vllm.fsm.schema.context import Context
from sgl_vllm.fsm.schema.keywords import CONSTRAINTS, Several, several
from sgl_vllm.fsm.schema.values import identity, is_a, listings, spelled

LISTING = frozenset({"const", "enum"})


def compile_enumeration(context: Context, schema: dict[str, Any]) -> Expression:
    """Any of the values that `schema` lists and that the rest of it allows.

    A value is spelled as `json.dumps` spells it, and an object's members keep their order.
    """
    texts: list[tuple[bytes, Expression | None]] = []
    containers: list[Expression] = []
    for value in allowed_values(context, schema):
        if isinstance(value, dict | list) and value:
            containers.append(exactly(context, value))
        else:
            texts.append((spelled(value), None))
    unique = tuple(dict.fromkeys(texts))
    options = [*([Literals(unique)] if unique else []), *containers]
    if not options:
        raise NothingValidError("no value of the enumeration is valid")
    return options[0] if len(options) == 1 else Alt(options)


def exactly(context: Context, value: Any) -> Expression:
    """One value, with whitespace between its tokens."""
    parts: list[Expression] = []
    if isinstance(value, list):
        for item in value:
            parts.extend([context.comma] if parts else [])
            parts.append(exactly(context, item))
        return context.enclosed(b"[", b"]", parts)
    if isinstance(value, dict):
        for name, item in value.items():
            parts.extend([context.comma] if parts else [])
            parts.extend([context.key(name), exactly(context, item)])
        return context.enclosed(b"{", b"}", parts)
    return literal(spelled(value))


def allowed_values(context: Context, schema: dict[str, Any]) -> list[Any]:
    """The values that `schema` lists and that the rest of it allows."""
    values, *more = listings(schema)
    for other in more:
        listed = {*map(identity, other)}
        values = [v for v in values if identity(v) in listed]
    if (types := schema.get("type")) is not None:
        names = [types] if isinstance(types, str) else types
        values = [v for v in values if True in [is_a(v, name) for name in names]]
        if not context.whole_is_integer and "number" not in names:
            values = [v for v in values if not isinstance(v, float)]
    excluded = {identity(v) for rule in several(schema, "not") for v in rule.get("enum", ())}
    values = [v for v in values if identity(v) not in excluded] if excluded else values
    rest = {k: v for k, v in schema.items() if k in CONSTRAINTS and k not in LISTING}
    others = tuple(rule for rule in several(rest, "not") if "enum" not in rule)
    if others:
        rest["not"] = Several(others)
    else:
        rest.pop("not", None)
    if rest.keys() <= {"type"}:
        return values
    expression = context.value_if_any(rest)
    if expression is None:
        return []
    start = Automaton(expression).start
    return [v for v in values if _is_accepted(context, start, v)]


def _is_accepted(context: Context, state: State | None, value: Any) -> bool:
    text = spelled(value)
    context.workspace.spend(len(text))
    for byte in text:
        state = state.step(byte) if state is not None else None
    return state is not None and state.accepting
