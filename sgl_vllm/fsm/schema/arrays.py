"""Arrays: `items`, `prefixItems`, `additionalItems`, `minItems`, `maxItems`."""

from __future__ import annotations

from typing import Any  # Any: JSON of a user's schema

from sgl_vllm.fsm.errors import UnsupportedSchemaError
from sgl_vllm.fsm.expressions import EMPTY, Alt, Expression, Lazy, Seq, literal
from sgl_vllm.fsm.schema.context import Compiled, Context
from sgl_vllm.fsm.schema.siblings import items_of
from sgl_vllm.fsm.schema.values import limits
from sgl_vllm.fsm.schema.workspace import ids

MAX_COUNTED_ITEMS = 1_000


def compile_array(context: Context, schema: dict[str, Any]) -> Compiled:
    """The arrays that are valid against `schema`."""
    low, high = limits(schema, "minItems", "maxItems")
    if low > MAX_COUNTED_ITEMS or (high or 0) > MAX_COUNTED_ITEMS:
        raise UnsupportedSchemaError(f"more than {MAX_COUNTED_ITEMS:,} items to count")
    first, rest = items_of(schema)
    if False in first:
        if context.is_strict:
            raise UnsupportedSchemaError("an item for which nothing is valid")
        first, rest = first[: first.index(False)], False
    prefix = [context.value(item) for item in first]
    if rest is False:
        high = len(prefix) if high is None else min(high, len(prefix))
    if high is not None and low > high:
        raise UnsupportedSchemaError("minItems is above maxItems")
    other = context.value(rest) if rest is not False else EMPTY
    needed = ids(*first[:low], *([rest] if low > len(first) else []))
    return Compiled(_items(context, prefix, other, low, high), needed)


def _items(
    context: Context, prefix: list[Expression], other: Expression, low: int, high: int | None
) -> Expression:
    """From `low` to `high` items: those of `prefix`, then any number of `other`."""
    if high == 0:
        return Seq(literal(b"["), context.blank, literal(b"]"))
    after: dict[int, Expression] = {}

    def following(count: int) -> Expression:
        """What may come after `count` items, at least one."""
        if high is not None and count >= high:
            return EMPTY
        if count >= max(low, len(prefix)) and high is None:
            count = max(low, len(prefix), 1)
        if count not in after:
            item = prefix[count] if count < len(prefix) else other
            more = Seq(context.comma, item, Lazy(lambda: following(count + 1)))
            after[count] = more if count < low else Alt((EMPTY, more))
        return after[count]

    some = Seq(prefix[0] if prefix else other, Lazy(lambda: following(1)), context.blank)
    inside = some if low else Alt((EMPTY, some))
    return Seq(literal(b"["), context.blank, inside, literal(b"]"))
