"""Numbers and integers: `minimum`, `maximum`, `exclusiveMinimum`, `exclusiveMaximum`."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal
from typing import Any  # Any: JSON of a user's schema

from sgl_vllm.fsm import numbers
from sgl_vllm.fsm.errors import UnsupportedSchemaError
from sgl_vllm.fsm.expressions import Expression
from sgl_vllm.fsm.rust_regex import compile_trusted
from sgl_vllm.fsm.schema.context import Context, all_of


@dataclass(frozen=True)
class _Bounds:
    """None: no bound. `above_low`, `below_high`: the bound itself is excluded."""

    low: Decimal | None
    high: Decimal | None
    above_low: bool
    below_high: bool


def compile_number(context: Context, schema: dict[str, Any]) -> Expression:
    """The numbers that are valid against `schema`; within bounds, written without an exponent."""
    bounds = _bounds(schema)
    if bounds.low is None and bounds.high is None:
        return compile_trusted(numbers.NUMBER).expression
    try:
        return all_of(
            [numbers.decimals(bounds.low, bounds.high, bounds.above_low, bounds.below_high)]
        )
    except ValueError as error:
        raise UnsupportedSchemaError(str(error)) from None


def compile_integer(context: Context, schema: dict[str, Any]) -> Expression:
    """The integers that are valid against `schema`. Without bounds, 1.0 is one, too."""
    bounds = _bounds(schema)
    low, high = bounds.low, bounds.high
    if low is None and high is None:
        if context.is_strict:
            return compile_trusted("0|-?[1-9][0-9]*").expression
        return compile_trusted(rf"{numbers.INTEGER}(?:\.0+)?").expression
    first = None if low is None else _integer_within(low, up=True, exclusive=bounds.above_low)
    last = None if high is None else _integer_within(high, up=False, exclusive=bounds.below_high)
    if first is not None and last is not None and first > last:
        raise UnsupportedSchemaError("no number is within the bounds")
    try:
        return all_of([numbers.integers(first, last)])
    except ValueError as error:
        raise UnsupportedSchemaError(str(error)) from None


def _bounds(schema: dict[str, Any]) -> _Bounds:
    low = _decimal(schema.get("minimum"))
    high = _decimal(schema.get("maximum"))
    above_low = below_high = False
    exclusive_low = schema.get("exclusiveMinimum")
    exclusive_high = schema.get("exclusiveMaximum")
    if isinstance(exclusive_low, bool):  # draft 4: says whether `minimum` itself is excluded
        above_low = exclusive_low
    elif (bound := _decimal(exclusive_low)) is not None and (low is None or bound >= low):
        low, above_low = bound, True
    if isinstance(exclusive_high, bool):
        below_high = exclusive_high
    elif (bound := _decimal(exclusive_high)) is not None and (high is None or bound <= high):
        high, below_high = bound, True
    return _Bounds(low, high, above_low, below_high)


def _decimal(value: Any) -> Decimal | None:
    if value is None:
        return None
    try:
        return Decimal(repr(value))
    except ValueError:
        raise UnsupportedSchemaError("a bound with too many digits") from None


def _integer_within(bound: Decimal, *, up: bool, exclusive: bool) -> int:
    """The first integer within a bound, looking up or down from it."""
    whole = int(bound.to_integral_value("ROUND_CEILING" if up else "ROUND_FLOOR"))
    if exclusive and whole == bound:
        whole += 1 if up else -1
    return whole
