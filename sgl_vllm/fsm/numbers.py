"""Automata of decimal numbers, as JSON writes them: within bounds, and multiples of a number.

Owns how such numbers are written, and the tables that compare them and divide them. Does not own
what a schema's bounds mean (`schema/`). Pure.

    below 25.4        the number of digits before the point decides, or the first that differs
    multiple of 0.25  all digits, with two behind the point, make a multiple of 25
"""

from __future__ import annotations

from decimal import Decimal
from functools import lru_cache

import numpy as np

from sgl_vllm.fsm.byte_dfa import ByteDfa, combined, minimal
from sgl_vllm.fsm.errors import TooComplexError
from sgl_vllm.fsm.regex import of_pattern

_UNSIGNED = "(?:0|[1-9][0-9]*)"
_FRACTION = r"(?:\.[0-9]+)?"
INTEGER = f"-?{_UNSIGNED}"
NUMBER = rf"{INTEGER}{_FRACTION}(?:[eE][+-]?[0-9]+)?"
DECIMAL = f"{INTEGER}{_FRACTION}"
"""All numbers, written without an exponent."""

WHOLE = rf"{INTEGER}(?:\.0+)?"
"""Whole numbers, written without an exponent."""

MAX_DIGITS = 40
MAX_STATES = 20_000
"""Of the automaton of multiples."""

_POINT, _MINUS, _NUM_COLUMNS = 10, 11, 13
_COLUMNS = np.full(256, _NUM_COLUMNS - 1, np.int32)
_COLUMNS[[*b"0123456789.-"]] = np.arange(_NUM_COLUMNS - 1)
"""The column of each byte in the tables below: digits, the point, the minus sign, all others."""


@lru_cache(maxsize=1024)
def within(
    low: Decimal | None,
    high: Decimal | None,
    *,
    above_low: bool = False,
    below_high: bool = False,
    are_integers: bool = False,
) -> ByteDfa:
    """Numbers from `low` to `high`, written without an exponent; None: no bound.

    Args:
        above_low, below_high: whether the bound itself is excluded.
        are_integers: whether only integers are meant, written without a fraction.

    Raises:
        TooComplexError: a bound has more than `MAX_DIGITS` digits.
    """
    sign = "-?" if low is None or low < 0 else ""  # a lower bound of 0 excludes -0, too
    found = of_pattern(f"{sign}{_UNSIGNED}" + ("" if are_integers else _FRACTION))
    if low is not None:
        found = combined(found, _compared(low, (1,) if above_low else (0, 1)))
    if high is not None:
        found = combined(found, _compared(high, (-1,) if below_high else (-1, 0)))
    return found


def exactly(number: Decimal) -> ByteDfa:
    """All spellings of one number without an exponent.

    Raises:
        TooComplexError: it has more than `MAX_DIGITS` digits.
    """
    return combined(of_pattern(DECIMAL), _compared(number, (0,)))


def _compared(bound: Decimal, orders: tuple[int, ...]) -> ByteDfa:
    """Numbers whose order to `bound` is one of some: -1 if they are less, 0 if equal, 1 if greater.
    Also takes texts that are no numbers.

        25.40    (0) --2--> (1) --5--> (2) --.--> (3) --4--> (4) --0--> (4)     read so far

    A state records how many of these characters have been read, and how the digits compare so far.
    Three more states are for numbers with more digits before the point. The second half of the
    table is the same for negative numbers.
    """
    head, tail = _digits_of(bound)
    characters = f"{head}.{tail}0"
    point, last = len(head), len(characters) - 1
    longer = 3 * len(characters)
    size = longer + 3
    table = np.full((2 * size, _NUM_COLUMNS), -1, np.int32)
    order_of = np.tile([-1, 0, 1], len(characters) + 1)
    less, equal, greater = range(3)
    for position, character in enumerate(characters):
        state = 3 * position
        if position == point:
            table[state : state + 3, :_POINT] = longer
            table[state : state + 3, _POINT] = state + 3 + np.arange(3)
            order_of[state + equal] = -1 if tail else 0
            continue
        following = 3 * min(position + 1, last)
        table[state + less, :_POINT] = following + less
        table[state + equal, :_POINT] = following + 1 + np.sign(np.arange(10) - int(character))
        table[state + greater, :_POINT] = following + greater
        if position < point:
            table[state : state + 3, _POINT] = 3 * (point + 1) + less
            order_of[state : state + 3] = -1
        elif position < last:
            order_of[state + equal] = -1
    table[longer:size, :_POINT] = longer
    table[longer:size, _POINT] = 3 * (point + 1) + greater
    order_of[longer:size] = 1
    table[size:] = np.where(table[:size] < 0, -1, table[:size] + size)
    table[equal, _MINUS] = size + equal
    positive = order_of if bound >= 0 else np.ones_like(order_of)
    negative = -order_of if bound <= 0 else -np.ones_like(order_of)
    accepting = np.isin(np.concatenate([positive, negative]), orders)
    return ByteDfa(table, _COLUMNS, accepting, start=equal)


def _digits_of(bound: Decimal) -> tuple[str, str]:
    if abs(bound.adjusted()) > MAX_DIGITS or len(bound.as_tuple().digits) > MAX_DIGITS:
        raise TooComplexError(f"a bound of more than {MAX_DIGITS} digits or decimal places")
    head, _, tail = f"{bound.copy_abs():f}".partition(".")
    return head, tail.rstrip("0")


@lru_cache(maxsize=16)  # of up to a megabyte
def multiples(of: Decimal) -> ByteDfa:
    """The multiples of `of`, which is greater than 0, in all their spellings without an exponent.

    Cost: time and memory in proportion to the digits of `of` as a whole number: 0.25 counts as 25.

    Raises:
        TooComplexError: it would need more than `MAX_STATES` states.
    """
    sign, digits, exponent = of.normalize().as_tuple()
    assert not sign and isinstance(exponent, int)
    places = max(0, -exponent)
    if max(exponent, places, len(digits)) > 30:
        raise TooComplexError("a multiple of a number with too many digits")
    modulus = int("".join(map(str, digits))) * 10 ** max(0, exponent)
    num_states = (places + 2) * modulus
    if num_states > MAX_STATES:
        raise TooComplexError(f"multiples of {of} need more than {MAX_STATES} states")
    # A state is the rest that all digits so far leave, in one of several layers: before the point,
    # and after it, with 0, 1, ... digits behind it.
    rests = np.arange(modulus)
    table = np.full((num_states, _NUM_COLUMNS), -1, np.int32)
    accepting = np.zeros(num_states, np.bool_)
    for layer in range(places + 2):
        begin = layer * modulus
        rows = slice(begin, begin + modulus)
        missing = min(places, places - layer + 1)
        accepting[rows] = rests * (10**missing % modulus) % modulus == 0
        if missing or layer == 0:
            following = begin if layer == 0 else begin + modulus
            for digit in range(10):
                table[rows, digit] = following + (rests * 10 + digit) % modulus
        else:
            table[begin, 0] = begin  # only zeros may follow
    table[0, _MINUS] = 0
    table[:modulus, _POINT] = modulus + rests
    return combined(of_pattern(DECIMAL), minimal(ByteDfa(table, _COLUMNS, accepting)))
