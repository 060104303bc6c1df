"""Patterns of numbers within bounds, compared with Decimal."""

import re
from decimal import Decimal

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sgl_vllm.fsm.byte_dfa import ByteDfa
from sgl_vllm.fsm.numbers import INTEGER, MAX_DIGITS, within
from tests.effort import examples

few_digits = st.integers(-1100, 1100)
any_digits = few_digits | st.integers(-(10**33), 10**33)
bounds = st.builds(lambda n, e: Decimal(n).scaleb(-e), few_digits, st.integers(0, 5))


def near(bound: int | None) -> st.SearchStrategy[int]:
    return any_digits if bound is None else any_digits | st.integers(bound - 12, bound + 12)


@settings(deadline=None, max_examples=examples(50))
@given(st.none() | any_digits, st.none() | any_digits, st.data())
@example(low=12345678901234567890123456789012345, high=None, data=None)
def test_whole_numbers_are_within_their_bounds(low, high, data):
    if data is None:
        numbers = [low - 1, low, low + 1]
    else:
        numbers = data.draw(st.lists(near(low) | near(high), min_size=8))
    dfa = integers(low, high)
    for number in numbers:
        is_within = (low is None or number >= low) and (high is None or number <= high)
        assert dfa.accepts(str(number).encode()) == is_within, number


@settings(deadline=None, max_examples=examples(50))
@given(st.none() | bounds, st.none() | bounds, st.booleans(), st.booleans(), st.data())
def test_decimals_are_within_their_bounds(low, high, above, below, data):
    dfa = within(low, high, above_low=above, below_high=below)
    centres = [b for b in (low, high) if b is not None]
    close = st.builds(
        lambda b, n, e, zeros: f"{b + Decimal(n).scaleb(-e):f}" + zeros,
        st.sampled_from(centres or [Decimal(0)]),
        st.integers(-30, 30),
        st.integers(0, 7),
        st.sampled_from(["", "", "0", "000"]),
    )
    for text in data.draw(st.lists(close, min_size=12)):
        if not re.fullmatch(rf"{INTEGER}(\.[0-9]+)?", text):
            continue
        number = Decimal(text)
        if number == 0 and text.startswith("-"):
            continue  # whether minus zero is offered does not matter
        is_within = (low is None or number > low or (number == low and not above)) and (
            high is None or number < high or (number == high and not below)
        )
        assert dfa.accepts(text.encode()) == is_within, text


@settings(deadline=None, max_examples=examples(50))
@given(st.none() | bounds, st.none() | bounds, st.booleans(), st.booleans())
def test_integers_are_within_bounds_that_are_no_integers(low, high, above, below):
    dfa = within(low, high, above_low=above, below_high=below, are_integers=True)
    centers = [round(b) for b in (low, high) if b is not None] or [0]
    for number in {center + near for center in centers for near in range(-3, 4)}:
        is_within = (low is None or number > low or (number == low and not above)) and (
            high is None or number < high or (number == high and not below)
        )
        assert dfa.accepts(str(number).encode()) == is_within, number


def integers(low: int | None, high: int | None) -> ByteDfa:
    bounds = [None if bound is None else Decimal(bound) for bound in (low, high)]
    return within(*bounds, are_integers=True)


def test_minus_zero_is_never_taken_for_less_than_zero():
    assert not integers(None, -1).accepts(b"-0")
    assert not within(None, Decimal(0), below_high=True).accepts(b"-0.0")


def test_bounds_of_very_many_digits_are_refused():
    for bound in (10 ** (MAX_DIGITS + 1), int("7" * (MAX_DIGITS + 1))):
        with pytest.raises(ValueError, match="digits"):
            integers(bound, None)
    for text in ("1e308", "1e-300", "5e-324"):
        with pytest.raises(ValueError, match="digits"):
            within(Decimal(text), None)
