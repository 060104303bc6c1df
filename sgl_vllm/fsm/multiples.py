"""Automata of the multiples of a number, as JSON writes them without an exponent.

    multiples of 0.25     all digits, of which two stand behind the point, make a multiple of 25

Owns this construction. Does not own bounds (`numbers.py`). Pure.
"""

from __future__ import annotations

from decimal import Decimal
from functools import lru_cache

import numpy as np

from sgl_vllm.fsm.byte_dfa import ByteDfa, combined, minimal
from sgl_vllm.fsm.errors import TooComplexError
from sgl_vllm.fsm.numbers import DECIMAL
from sgl_vllm.fsm.regex import of_pattern

MAX_STATES = 20_000
_ZERO = ord("0")


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
    table = np.full((num_states, 256), -1, np.int32)
    accepting = np.zeros(num_states, np.bool_)
    for layer in range(places + 2):
        begin = layer * modulus
        rows = slice(begin, begin + modulus)
        missing = min(places, places - layer + 1)
        accepting[rows] = rests * (10**missing % modulus) % modulus == 0
        if missing or layer == 0:
            following = begin if layer == 0 else begin + modulus
            for digit in range(10):
                table[rows, _ZERO + digit] = following + (rests * 10 + digit) % modulus
        else:
            table[begin, _ZERO] = begin  # only zeros may follow
    table[0, ord("-")] = 0
    table[:modulus, ord(".")] = modulus + rests
    return combined(of_pattern(DECIMAL), minimal(ByteDfa.of_table(table, accepting)))
