"""The scoring methods of select, and where scoring begins."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_vllm.lang.choices import (
    greedy_token_selection,
    token_length_normalized,
    unconditional_likelihood_normalized,
)
from sgl_vllm.protocol.scoring import ChoiceTokens, first_scored_position

METHODS = [token_length_normalized, greedy_token_selection, unconditional_likelihood_normalized]

logprob_lists = st.lists(
    st.lists(st.floats(-20, 0), min_size=1, max_size=5), min_size=1, max_size=5
)


def scored(*logprobs: list[float], alone: list[list[float | None]] | None = None):
    return [
        ChoiceTokens(
            tuple(range(len(row))), tuple(row), tuple(alone[i]) if alone is not None else None
        )
        for i, row in enumerate(logprobs)
    ]


def test_token_length_normalized_prefers_the_highest_mean_not_the_longest():
    decision = token_length_normalized(scored([-1.0, -1.0, -1.0], [-0.9]))
    assert decision.index == 1
    assert decision.scores == pytest.approx((-1.0, -0.9))


def test_greedy_token_selection_decides_at_the_first_token_that_differs():
    # The second choice has the better mean, the first one the better second token.
    decision = greedy_token_selection(scored([-1.0, -0.1, -9.0], [-1.0, -0.2, -0.2]))
    assert decision.index == 0


def test_greedy_token_selection_takes_the_same_token_for_the_same():
    """Scored in two sequences, a token may differ in its last digits."""
    first = ChoiceTokens((7, 1), (-0.1000001, -0.1))
    second = ChoiceTokens((7, 2), (-0.1, -5.0))
    assert greedy_token_selection([first, second]).index == 0


def test_greedy_token_selection_compares_an_ended_choice_by_its_mean():
    assert greedy_token_selection(scored([-1.0], [-1.0, -0.5])).index == 1
    assert greedy_token_selection(scored([-1.0], [-1.0, -2.0])).index == 0


def test_unconditional_likelihood_corrects_for_choices_that_are_likely_anyway():
    choices = scored([-1.0], [-2.0], alone=[[-1.0], [-5.0]])
    assert token_length_normalized(choices).index == 0
    decision = unconditional_likelihood_normalized(choices)
    assert decision.index == 1
    assert decision.scores == (0.0, 3.0)


def test_an_unknown_unconditional_logprob_counts_as_zero():
    decision = unconditional_likelihood_normalized(scored([-1.0, -2.0], alone=[[None, -1.0]]))
    assert decision.scores == (-1.0,)


@pytest.mark.parametrize("method", METHODS)
@given(rows=logprob_lists)
def test_ties_are_won_by_the_choice_listed_first(method, rows):
    once = scored(*rows, alone=[[-1.0] * len(row) for row in rows])
    winner = method(once).index
    assert method(once + once).index == winner
    assert method([once[winner]] * 3).index == 0


@pytest.mark.parametrize("method", METHODS)
@given(rows=logprob_lists)
def test_every_choice_has_a_finite_score_and_the_winner_is_among_them(method, rows):
    decision = method(scored(*rows, alone=[[-1.0] * len(row) for row in rows]))
    assert len(decision.scores) == len(rows)
    assert all(math.isfinite(score) for score in decision.scores)
    assert 0 <= decision.index < len(rows)


@given(
    prefix=st.lists(st.integers(0, 3), max_size=6),
    endings=st.lists(st.lists(st.integers(0, 3), max_size=6), min_size=1, max_size=4),
)
def test_what_is_before_the_scored_position_is_common_to_all(prefix, endings):
    position = first_scored_position(prefix, endings)
    assert position <= len(prefix)
    assert all(ids[:position] == prefix[:position] for ids in endings)
    assert position == len(prefix) or any(
        len(ids) == position or ids[position] != prefix[position] for ids in endings
    )
