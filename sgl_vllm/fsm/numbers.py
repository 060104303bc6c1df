"""Automata of the decimal numbers within bounds, as JSON writes them.

Owns the patterns of such numbers: as trees, because reading them from text takes longer than
compiling them. Does not own what a schema's bounds mean (`schema/`). Pure.

at least 12:    1[2-9] | [2-9][0-9] | [1-9][0-9]{2,}          whole
                (that)(\\.[0-9]+)?                              with fractions
at least 2.5:   2\\.([5][0-9]*|[6-9][0-9]*) | ([3-9]|[1-9][0-9]+)(\\.[0-9]+)?
"""

from __future__ import annotations

from decimal import Decimal
from functools import lru_cache

from sgl_vllm.fsm.byte_dfa import ByteDfa, combined
from sgl_vllm.fsm.nfa import dfa_of
from sgl_vllm.fsm.regex import of_pattern
from sgl_vllm.fsm.syntax import CharacterClass, Choice, Node, Repetition, Sequence, Text

INTEGER = r"-?(?:0|[1-9][0-9]*)"
NUMBER = rf"{INTEGER}(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?"
DECIMAL = rf"{INTEGER}(?:\.[0-9]+)?"
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
    head, tail = _digits_of(number)
    parts = [_text(head), _tail_and_zeros(tail) if tail else _ONLY_ZEROS]
    if number <= 0:
        parts.insert(0, _optional(_MINUS) if number == 0 else _MINUS)
    return dfa_of(_sequence(*parts))


@lru_cache(maxsize=1024)
def _within(
    low: Decimal | int | None,
    high: Decimal | int | None,
    above_low: bool,
    below_high: bool,
    whole: bool,
) -> ByteDfa:
    result = of_pattern(INTEGER if whole else DECIMAL)
    if low is not None:
        result = combined(result, dfa_of(_at_least(Decimal(low), above_low, whole)))
    if high is not None:
        result = combined(result, dfa_of(_at_most(Decimal(high), below_high, whole)))
    return result


def _text(text: str) -> Node:
    return Text(text.encode())


def _sequence(*parts: Node) -> Node:
    return Sequence(parts)


def _optional(part: Node) -> Node:
    return Repetition(part, 0, 1)


def _digit(low: int, high: int = 9) -> Node:
    return CharacterClass(((ord("0") + low, ord("0") + high),))


def _digits(least: int, most: int | None) -> Node:
    return Repetition(_digit(0), least, most)


_MINUS = _text("-")
_POINT = _text(".")
_ZEROS = Repetition(_text("0"), 0, None)
_FRACTION = _optional(_sequence(_POINT, _digits(1, None)))
_ONLY_ZEROS = _optional(_sequence(_POINT, Repetition(_text("0"), 1, None)))
_UNSIGNED = Choice((_text("0"), _sequence(_digit(1), _digits(0, None))))
_SOMETHING = _sequence(_ZEROS, _digit(1), _digits(0, None))
"""Digits that are not all 0."""


def _at_least(bound: Decimal, strict: bool, whole: bool) -> Node:
    if bound < 0 or (bound == 0 and not strict):
        positive = _unsigned(whole)
        if bound == 0:
            return positive
        return Choice((positive, _negative(_up_to(bound.copy_negate(), strict, whole))))
    return _from(bound, strict, whole)


def _at_most(bound: Decimal, strict: bool, whole: bool) -> Node:
    if bound < 0:
        return _negative(_from(bound.copy_negate(), strict, whole))
    if bound == 0 and strict:
        return _negative(_from(Decimal(0), True, whole))
    return Choice((_negative(_unsigned(whole)), _up_to(bound, strict, whole)))


def _unsigned(whole: bool) -> Node:
    return _UNSIGNED if whole else _sequence(_UNSIGNED, _FRACTION)


def _negative(unsigned: Node) -> Node:
    return _sequence(_MINUS, unsigned)


def _digits_of(bound: Decimal) -> tuple[str, str]:
    if abs(bound.adjusted()) > MAX_DIGITS or len(bound.as_tuple().digits) > MAX_DIGITS:
        raise ValueError(f"a bound of more than {MAX_DIGITS} digits")
    head, _, tail = f"{bound.copy_abs():f}".partition(".")
    return head, tail.rstrip("0")


def _tail_and_zeros(tail: str) -> Node:
    return _sequence(_text(f".{tail}"), _ZEROS)


def _from(bound: Decimal, strict: bool, whole: bool) -> Node:
    """Unsigned numbers of at least `bound` >= 0."""
    head, tail = _digits_of(bound)
    if whole:
        exact = [] if strict or tail else [_text(head)]
        return Choice((*exact, *_heads_above(head)))
    options = [_sequence(option, _FRACTION) for option in _heads_above(head)]
    options += [_sequence(_text(f"{head}."), option) for option in _tails_above(tail)]
    if tail:
        more = _SOMETHING if strict else _digits(0, None)
        options.append(_sequence(_text(f"{head}.{tail}"), more))
    elif strict:
        options.append(_sequence(_text(f"{head}."), _SOMETHING))
    else:
        options.append(_sequence(_text(head), _FRACTION))
    return Choice(tuple(options))


def _up_to(bound: Decimal, strict: bool, whole: bool) -> Node:
    """Unsigned numbers of at most `bound` >= 0. There may be none."""
    head, tail = _digits_of(bound)
    if whole:
        exact = [_text(head)] if tail or not strict else []
        return Choice((*exact, *_heads_below(head)))
    options = [_sequence(option, _FRACTION) for option in _heads_below(head)]
    if tail:
        options.append(_text(head))
        options += [_sequence(_text(f"{head}."), option) for option in _tails_below(tail)]
        if not strict:
            options.append(_sequence(_text(head), _tail_and_zeros(tail)))
    elif not strict:
        options.append(_sequence(_text(head), _ONLY_ZEROS))
    return Choice(tuple(options))


def _heads_above(head: str) -> list[Node]:
    """Whole numbers greater than `head`."""
    options = [_sequence(_digit(1), _digits(len(head), None))]
    for i, digit in enumerate(head):
        if digit != "9":
            rest = len(head) - i - 1
            options.append(_sequence(_text(head[:i]), _digit(int(digit) + 1), _digits(rest, rest)))
    return options


def _heads_below(head: str) -> list[Node]:
    """Whole numbers less than `head`."""
    options = []
    if len(head) > 1:
        options.append(_text("0"))
        options.append(_sequence(_digit(1), _digits(0, len(head) - 2)))
    for i, digit in enumerate(head):
        lowest = 1 if i == 0 and len(head) > 1 else 0
        if int(digit) > lowest:
            rest = len(head) - i - 1
            options.append(
                _sequence(_text(head[:i]), _digit(lowest, int(digit) - 1), _digits(rest, rest))
            )
    return options


def _tails_above(tail: str) -> list[Node]:
    """Fractions greater than `tail` in one of its digits."""
    return [
        _sequence(_text(tail[:i]), _digit(int(digit) + 1), _digits(0, None))
        for i, digit in enumerate(tail)
        if digit != "9"
    ]


def _tails_below(tail: str) -> list[Node]:
    """Fractions less than `tail`: a smaller digit, or fewer digits."""
    smaller = [
        _sequence(_text(tail[:i]), _digit(0, int(digit) - 1), _digits(0, None))
        for i, digit in enumerate(tail)
        if digit != "0"
    ]
    return [*smaller, *[_text(tail[:i]) for i in range(1, len(tail))]]
