"""Numbers and integers: bounds, `multipleOf`, and these below `not`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from typing import Any  # Any: JSON of a user's schema

from sgl_vllm.fsm import numbers
from sgl_vllm.fsm.byte_dfa import ByteDfa
from sgl_vllm.fsm.errors import NothingValidError, UnsupportedSchemaError
from sgl_vllm.fsm.expressions import Expression
from sgl_vllm.fsm.multiples import multiples
from sgl_vllm.fsm.regex import of_pattern
from sgl_vllm.fsm.schema.context import Context, of_valid
from sgl_vllm.fsm.schema.keywords import several


@dataclass(frozen=True)
class _Bounds:
    """None: no bound. `above_low`, `below_high`: the bound itself is excluded."""

    low: Decimal | None
    high: Decimal | None
    above_low: bool
    below_high: bool

    @property
    def are_open(self) -> bool:
        return self.low is None and self.high is None


def compile_number(context: Context, schema: dict[str, Any], *, whole: bool) -> Expression:
    """The numbers that are valid against `schema`: integers if `whole`, of which 1.0 is one from
    draft 6 on.

    A number that something else constrains is written without an exponent.
    """
    bounds = _bounds(schema)
    is_plain = bounds.are_open and "multipleOf" not in schema and "not" not in schema
    if is_plain and not whole:
        return of_pattern(numbers.NUMBER).expression
    common = context.workspace.common
    try:
        dfa = _within(bounds, whole)
        if whole and not context.whole_is_integer:
            dfa = common(dfa, of_pattern(numbers.INTEGER))
        for one in several(schema, "multipleOf"):
            dfa = common(dfa, multiples(_decimal(one)))
        for other in several(schema, "not"):
            dfa = _without(dfa, other, common)
    except UnsupportedSchemaError:
        raise
    except ValueError as error:
        raise UnsupportedSchemaError(str(error)) from None
    return of_valid(dfa)


def _without(dfa: ByteDfa, other: dict[str, Any], common: Callable[..., ByteDfa]) -> ByteDfa:
    """Numbers that are not valid against `other`, which has one keyword beside or instead of
    `type`."""
    if "enum" in other:
        for value in other["enum"]:
            dfa = common(dfa, numbers.exactly(_decimal(value)), minus=True)
        return dfa
    if "multipleOf" in other:
        return common(dfa, multiples(_decimal(other["multipleOf"])), minus=True)
    return common(dfa, of_pattern(numbers.WHOLE), minus=True)


def _within(bounds: _Bounds, whole: bool) -> ByteDfa:
    if bounds.are_open:
        return of_pattern(numbers.WHOLE if whole else numbers.DECIMAL)
    if not whole:
        return numbers.decimals(bounds.low, bounds.high, bounds.above_low, bounds.below_high)
    low, high = bounds.low, bounds.high
    first = None if low is None else _integer_within(low, up=True, exclusive=bounds.above_low)
    last = None if high is None else _integer_within(high, up=False, exclusive=bounds.below_high)
    if first is not None and last is not None and first > last:
        raise NothingValidError("no number is within the bounds")
    return numbers.integers(first, last)


def _bounds(schema: dict[str, Any]) -> _Bounds:
    low = _bound(schema.get("minimum"))
    high = _bound(schema.get("maximum"))
    above_low = below_high = False
    exclusive_low = schema.get("exclusiveMinimum")
    exclusive_high = schema.get("exclusiveMaximum")
    if isinstance(exclusive_low, bool):  # draft 4: says whether `minimum` itself is excluded
        above_low = exclusive_low
    elif (bound := _bound(exclusive_low)) is not None and (low is None or bound >= low):
        low, above_low = bound, True
    if isinstance(exclusive_high, bool):
        below_high = exclusive_high
    elif (bound := _bound(exclusive_high)) is not None and (high is None or bound <= high):
        high, below_high = bound, True
    return _Bounds(low, high, above_low, below_high)


def _bound(value: Any) -> Decimal | None:
    return None if value is None else _decimal(value)


def _decimal(value: Any) -> Decimal:
    try:
        return Decimal(repr(value))
    except ValueError:
        raise UnsupportedSchemaError("a number with too many digits") from None


def _integer_within(bound: Decimal, *, up: bool, exclusive: bool) -> int:
    """The first integer within a bound, looking up or down from it."""
    whole = int(bound.to_integral_value("ROUND_CEILING" if up else "ROUND_FLOOR"))
    if exclusive and whole == bound:
        whole += 1 if up else -1
    return whole
