"""`uniqueItems`, for items of which there are finitely many values.

    {"items": {"enum": ["a", "b"]}, "uniqueItems": true}

    none yet:  "a", then "b" or the end | "b", then "a" or the end | the end

Which items were used is not regular in general, so other arrays are refused. Owns this automaton,
and which schemas have finitely many values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any  # Any: JSON of a user's schema

from sgl_vllm.fsm.errors import NothingValidError, UnsupportedSchemaError
from sgl_vllm.fsm.expressions import Alt, Expression, Lazy, Seq, literal
from sgl_vllm.fsm.schema.context import Compiled, Context
from sgl_vllm.fsm.schema.enumerations import LISTING, allowed_values, exactly
from sgl_vllm.fsm.schema.keywords import TYPES, Schema
from sgl_vllm.fsm.schema.values import identity

_MAX_VALUES = 1_000
_ANY: Schema = {"type": [name for name in TYPES if name != "integer"]}


def compile_unique(
    context: Context,
    schema: dict[str, Any],
    first: Sequence[Schema],
    rest: Schema,
    low: int,
    high: int | None,
) -> Compiled:
    """Arrays of `low` to `high` different items: those of `first`, then any number of `rest`.

    Raises UnsupportedSchemaError: an item has infinitely many values, or something else constrains
        the array.
    """
    if "contains" in schema:
        raise UnsupportedSchemaError("uniqueItems beside contains")
    listed = [_values(context, item) for item in first]
    others = _values(context, rest) if rest is not False and high != len(first) else []
    distinct = {identity(value) for values in (*listed, others) for value in values}
    most = min(len(distinct), len(listed) + len(others))
    high = most if high is None else min(high, most)
    if low > high:
        raise NothingValidError("minItems is above the number of different items")
    if low > 1 and first:
        raise UnsupportedSchemaError("uniqueItems beside prefixItems and minItems")
    made: dict[frozenset[Any], Expression] = {}

    def after(used: frozenset[Any]) -> Expression:
        """What may follow these items, the closing bracket included."""
        if used not in made:
            made[used] = Lazy(lambda: following(used))
        return made[used]

    def following(used: frozenset[Any]) -> Expression:
        count = len(used)
        values = listed[count] if count < len(listed) else others
        blank = context.blank
        ways: list[Expression] = [literal(b"]")] if count >= low else []
        for value in values if count < high else ():
            key = identity(value)
            if key not in used:
                comma = [literal(b","), blank] if used else []
                ways.append(Seq(*comma, exactly(context, value), blank, after(used | {key})))
        return Alt(ways)

    return Compiled(Seq(literal(b"["), context.blank, after(frozenset())), [[]])


def _values(context: Context, schema: Schema) -> list[Any]:
    """The values of a schema that has finitely many."""
    found = context.both(_ANY, schema)
    if not isinstance(found, dict):
        return []
    branches = context.alternatives.of(found)
    values: list[Any] | None
    if branches is not None:
        values = [value for branch in branches for value in _values(context, branch)]
    elif found.keys() & LISTING:
        values = allowed_values(context, found)
    else:
        values = _of_types(found["type"])
    if values is None:
        raise UnsupportedSchemaError("uniqueItems of items with infinitely many values")
    if len(values) > _MAX_VALUES:
        raise UnsupportedSchemaError(f"uniqueItems of more than {_MAX_VALUES:,} values")
    return list({identity(value): value for value in values}.values())


def _of_types(types: str | list[str]) -> list[Any] | None:
    by_type: dict[str, list[Any]] = {"boolean": [True, False], "null": [None]}
    listed = [types] if isinstance(types, str) else types
    if not by_type.keys() >= {*listed}:
        return None
    return [value for name in listed for value in by_type[name]]
