"""Arrays: `items`, `prefixItems`, `additionalItems`, `minItems`, `maxItems`.

Does not own `contains` (`contains.py`) and `uniqueItems` (`unique_items.py`).
"""

from __future__ import annotations

from typing import Any  # Any: JSON of a user's schema

from sgl_vllm.fsm.errors import NothingValidError, UnsupportedSchemaError
from sgl_vllm.fsm.expressions import EMPTY, Alt, Expression, Lazy, Seq, literal
from sgl_vllm.fsm.schema.contains import compile_containing
from sgl_vllm.fsm.schema.context import Compiled, Context
from sgl_vllm.fsm.schema.siblings import items_of
from sgl_vllm.fsm.schema.unique_items import compile_unique
from sgl_vllm.fsm.schema.values import limits
from sgl_vllm.fsm.schema.workspace import ids

MAX_COUNTED_ITEMS = 10_000


def compile_array(context: Context, schema: dict[str, Any]) -> Compiled:
    """The arrays that are valid against `schema`."""
    low, high = limits(schema, "minItems", "maxItems")
    if low > MAX_COUNTED_ITEMS or (high or 0) > MAX_COUNTED_ITEMS:
        raise UnsupportedSchemaError(f"more than {MAX_COUNTED_ITEMS:,} items to count")
    first, rest = items_of(schema)
    if schema.get("uniqueItems") is True and (high is None or high > 1):
        return compile_unique(context, schema, first, rest, low, high)
    if "contains" in schema:
        return compile_containing(context, schema["contains"].values, first, rest, low, high)
    prefix: list[Expression] = []
    for i, item in enumerate(first):
        expression = context.value_if_any(item) if item is not False else None
        if expression is None:
            first, rest = first[:i], False
            break
        prefix.append(expression)
    is_over = high == len(prefix)
    other = context.value_if_any(rest) if rest is not False and not is_over else None
    if other is None:
        high = len(prefix) if high is None else min(high, len(prefix))
    if high is not None and low > high:
        raise NothingValidError("minItems is above maxItems")
    needed = ids(*first[:low], *([rest] if low > len(first) else []))
    return Compiled(_items(context, prefix, other or EMPTY, low, high), [needed])


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
