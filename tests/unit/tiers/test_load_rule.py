"""The rule of what is loaded: against costs that are known, with noise and without."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from sgl_vllm.tiers.load_rule import (
    KEPT,
    MAX_SAMPLE_S,
    MEASURE_AGAIN,
    Line,
    LoadRule,
    MeasuredLine,
)

SIZES = (32, 100, 256, 1000, 4096)

fixed = st.floats(1e-5, 1.0)
slopes = st.floats(1e-7, 1e-3)


def measured(line: Line, sizes=SIZES) -> MeasuredLine:
    result = MeasuredLine()
    for size in sizes:
        result.add(size, line.seconds(size))
    return result


def rule_of(load: Line, compute: Line, **options) -> LoadRule:
    rule = LoadRule(**options)
    rule.loads, rule.passes = measured(load), measured(compute)
    return rule


@given(fixed, slopes)
def test_a_line_is_found_again(fixed_s, token_s):
    found = measured(Line(fixed_s, token_s)).fit()
    assert found is not None
    for size in SIZES:
        assert found.seconds(size) == pytest.approx(fixed_s + token_s * size, rel=1e-6)


@given(st.lists(st.tuples(st.integers(-5, 10**6), st.floats(allow_nan=True)), max_size=200))
def test_constants_are_finite_and_not_negative_whatever_is_measured(samples):
    line = MeasuredLine()
    for num_tokens, seconds in samples:
        line.add(num_tokens, seconds)
    found = line.fit()
    if found is not None:
        assert 0 <= found.fixed_s <= MAX_SAMPLE_S
        assert 0 <= found.token_s <= MAX_SAMPLE_S


def test_many_of_one_size_do_not_push_out_the_others():
    line = measured(Line(0.01, 1e-4))
    for _ in range(1000):
        line.add(1, 0.0101)
    found = line.fit()
    assert found is not None
    assert found.token_s == pytest.approx(1e-4, rel=0.01)


def test_outliers_do_not_count():
    line = MeasuredLine()
    for size in SIZES:
        for number in range(KEPT):
            seconds = 0.01 + 1e-4 * size
            line.add(size, seconds * 50 if number % 4 == 0 else seconds)
    assert line.fit() == measured(Line(0.01, 1e-4)).fit()


def test_everything_is_loaded_until_both_are_measured():
    rule = LoadRule()
    assert not rule.declines(1)
    rule.loads = measured(Line(1.0, 1e-4))
    assert not rule.declines(1)
    rule.passes = measured(Line(0.01, 1e-3))
    assert rule.declines(1)


@given(fixed, slopes, fixed, slopes, st.integers(1, 10**6))
def test_a_load_is_declined_exactly_where_computing_is_cheaper(a, b, c, d, num_tokens):
    load_s, compute_s = a + b * num_tokens, d * num_tokens
    assume(abs(load_s - compute_s) > 1e-3 * load_s)
    assert rule_of(Line(a, b), Line(c, d)).declines(num_tokens) == (load_s > compute_s)


def test_a_tier_that_is_slower_per_token_is_never_loaded_from_but_measured_again():
    rule = rule_of(Line(0.0, 1e-3), Line(0.01, 1e-4))
    assert rule.break_even == math.inf
    for _ in range(MEASURE_AGAIN):
        assert rule.declines(10**6)
        rule.declined()
    assert not rule.declines(10**6)
    rule.loaded(4096, 4.096)
    assert rule.declines(10**6)


def test_a_tier_that_became_faster_is_used_again():
    rule = rule_of(Line(0.0, 1e-3), Line(0.01, 1e-4))
    rng = random.Random(0)
    for _ in range(100 * MEASURE_AGAIN):
        size = rng.choice(SIZES)
        if rule.declines(size):
            rule.declined()
        else:
            rule.loaded(size, 1e-4 + 1e-6 * size)
    assert not rule.declines(256)


def test_a_least_number_of_tokens_holds_whatever_is_measured():
    rule = rule_of(Line(1e-6, 1e-9), Line(0.01, 1e-3), min_tokens=64)
    for _ in range(2 * MEASURE_AGAIN):
        rule.declined()
    assert rule.declines(63)
    assert not rule.declines(64)
