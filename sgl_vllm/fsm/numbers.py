"""Automata of the decimal numbers within bounds, as JSON writes them.

Owns the patterns of such numbers. Does not own what a schema's bounds mean (`schema/`). Pure.

at least 12:    1[2-9] | [2-9][0-9] | [1-9][0-9]{2,}          whole
                (that)(\\.[0-9]+)?                              with fractions
at least 2.5:   2\\.([5][0-9]*|[6-9][0-9]*) | ([3-9]|[1-9][0-9]+)(\\.[0-9]+)?
"""

from __future__ import annotations

from decimal import Decimal
from functools import lru_cache

from sgl_vllm.fsm.byte_dfa import ByteDfa, combined
from sgl_vllm.fsm.regex import NOTHING, of_pattern

INTEGER = r"-?(?:0|[1-9][0-9]*)"
NUMBER = rf"{INTEGER}(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?"
_FRACTION = r"(?:\.[0-9]+)?"
DECIMAL = INTEGER + _FRACTION
"""All numbers, written without an exponent."""

WHOLE = rf"{INTEGER}(?:\.0+)?"
"""Whole numbers, written without an exponent."""

MAX_DIGITS = 40


def integers(low: int | None, high: int | None) -> ByteDfa:
    """Integers from `low` to `high`, both included; None: no bound."""
    return _within(low, high, False, False, whole=True)


def decimals(
    low: Decimal | None, high: Decimal | None, above_low: bool, below_high: bool
) -> ByteDfa:
    """Numbers from `low` to `high`, written without an exponent; None: no bound.

    Args:
        above_low, below_high: whether the bound itself is excluded.
    """
    return _within(low, high, above_low, below_high, whole=False)


def exactly(number: Decimal) -> ByteDfa:
    """One number in all its spellings without an exponent.

    Raises:
        ValueError: it has more than `MAX_DIGITS` digits.
    """
    head, tail = _digits(number)
    sign = "-?" if number == 0 else "-" if number < 0 else ""
    fraction = rf"\.{tail}0*" if tail else r"(?:\.0+)?"
    return of_pattern(f"{sign}{head}{fraction}")


@lru_cache(maxsize=1024)
def _within(
    low: Decimal | int | None,
    high: Decimal | int | None,
    above_low: bool,
    below_high: bool,
    whole: bool,
) -> ByteDfa:
    fraction = "" if whole else _FRACTION
    result = of_pattern(f"{INTEGER}{fraction}")
    if low is not None:
        result = combined(result, of_pattern(_at_least(Decimal(low), above_low, whole)))
    if high is not None:
        result = combined(result, of_pattern(_at_most(Decimal(high), below_high, whole)))
    return result


def _at_least(bound: Decimal, strict: bool, whole: bool) -> str:
    fraction = "" if whole else _FRACTION
    if bound < 0 or (bound == 0 and not strict):
        positive = f"(?:0|[1-9][0-9]*){fraction}"
        return (
            positive
            if bound == 0
            else f"{positive}|-(?:{_up_to(bound.copy_negate(), strict, whole)})"
        )
    return _from(bound, strict, whole)


def _at_most(bound: Decimal, strict: bool, whole: bool) -> str:
    fraction = "" if whole else _FRACTION
    negative = f"-(?:0|[1-9][0-9]*){fraction}"
    if bound < 0:
        return f"-(?:{_from(bound.copy_negate(), strict, whole)})"
    if bound == 0 and strict:
        return f"-(?:{_from(Decimal(0), True, whole)})"
    return f"{negative}|{_up_to(bound, strict, whole)}"


def _digits(bound: Decimal) -> tuple[str, str]:
    if abs(bound.adjusted()) > MAX_DIGITS or len(bound.as_tuple().digits) > MAX_DIGITS:
        raise ValueError(f"a bound of more than {MAX_DIGITS} digits")
    head, _, tail = f"{bound.copy_abs():f}".partition(".")
    return head, tail.rstrip("0")


def _from(bound: Decimal, strict: bool, whole: bool) -> str:
    """Unsigned numbers of at least `bound` >= 0."""
    head, tail = _digits(bound)
    if whole:
        exact = [] if strict or tail else [head]
        return "|".join([*exact, *_heads_above(head)])
    options = [f"(?:{option}){_FRACTION}" for option in _heads_above(head)]
    options.extend(f"{head}\\.{option}" for option in _tails_above(tail))
    if tail:
        options.append(rf"{head}\.{tail}" + ("0*[1-9][0-9]*" if strict else "[0-9]*"))
    else:
        options.append(rf"{head}\.0*[1-9][0-9]*" if strict else f"{head}{_FRACTION}")
    return "|".join(options)


def _up_to(bound: Decimal, strict: bool, whole: bool) -> str:
    """Unsigned numbers of at most `bound` >= 0."""
    head, tail = _digits(bound)
    if whole:
        exact = [head] if tail or not strict else []
        return "|".join([*exact, *_heads_below(head)]) or NOTHING
    options = [f"(?:{option}){_FRACTION}" for option in _heads_below(head)]
    if tail:
        options.append(head)
        options.extend(f"{head}\\.{option}" for option in _tails_below(tail))
        if not strict:
            options.append(rf"{head}\.{tail}0*")
    elif not strict:
        options.append(rf"{head}(?:\.0+)?")
    return "|".join(options) or NOTHING


def _heads_above(head: str) -> list[str]:
    """Patterns of whole numbers greater than `head`."""
    options = [f"[1-9][0-9]{{{len(head)},}}"]
    for i, digit in enumerate(head):
        if digit != "9":
            rest = len(head) - i - 1
            options.append(f"{head[:i]}[{int(digit) + 1}-9][0-9]{{{rest}}}")
    return options


def _heads_below(head: str) -> list[str]:
    """Patterns of whole numbers less than `head`."""
    options = []
    if len(head) > 1:
        options.append("0")
        options.append(f"[1-9][0-9]{{0,{len(head) - 2}}}")
    for i, digit in enumerate(head):
        lowest = 1 if i == 0 and len(head) > 1 else 0
        if int(digit) > lowest:
            rest = len(head) - i - 1
            options.append(f"{head[:i]}[{lowest}-{int(digit) - 1}][0-9]{{{rest}}}")
    return options


def _tails_above(tail: str) -> list[str]:
    """Patterns of fractions greater than `tail` in one of its digits."""
    return [f"{tail[:i]}[{int(digit) + 1}-9][0-9]*" for i, digit in enumerate(tail) if digit != "9"]


def _tails_below(tail: str) -> list[str]:
    """Patterns of fractions less than `tail`: a smaller digit, or fewer digits."""
    smaller = [
        f"{tail[:i]}[0-{int(digit) - 1}][0-9]*" for i, digit in enumerate(tail) if digit != "0"
    ]
    return [*smaller, *[tail[:i] for i in range(1, len(tail))]]
