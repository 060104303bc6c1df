"""Forecasts whether forced text follows the next token, before that token is known.

Owns the forecast: as a processor predicts branches, from how often it was so before. For an
automaton each state has one, which all requests with the same format share. What is asked about a
state that no request has left yet is answered from some of the tokens that may come next. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from sgl_vllm.fsm.automaton import State
from sgl_vllm.fsm.errors import TooComplexError

_WEIGHT_OF_LATEST = 1 / 8
_LIKELY, _UNLIKELY = 0.6, 0.2

MAX_PIECES_TRIED = 8
_MAX_THREADS_TRIED = 32
"""A step of the automaton costs some microseconds for each thread."""


class Forecast:
    """How often forced text, or the end of the text, has followed, the latest times most."""

    __slots__ = ("_share",)

    def __init__(self) -> None:
        self._share: float | None = None
        """From 0 to 1; None if nothing has happened or was guessed."""

    def learn(self, was_forced: bool) -> None:
        """It has followed once more, or not."""
        if self._share is None:
            self._share = _LIKELY if was_forced else _UNLIKELY
        else:
            self._share += (was_forced - self._share) * _WEIGHT_OF_LATEST

    def likelihood(self, guess: Callable[[], bool]) -> float:
        """How likely it is to follow the next time, from 0 to 1.

        Args:
            guess: whether to expect it. Called if nothing has happened yet.
        """
        if self._share is None:
            self.learn(guess())
            assert self._share is not None
        return self._share


def forecast_of(state: State) -> Forecast:
    """The forecast for the next token in a state of an automaton. Takes no step of it."""
    known = state.forecast
    if not isinstance(known, Forecast):
        known = state.forecast = Forecast()
    return known


def likelihood_of_forced(state: State, pieces: Callable[[], Sequence[bytes]]) -> float:
    """How likely forced text is after the next token in a state, from 0 to 1.

    Args:
        pieces: some of the tokens that may come next, as bytes. If nothing has happened in this
            state yet, it is called, and the automaton walks them.
    """
    return forecast_of(state).likelihood(partial(_is_mostly_forced, state, pieces))


def _is_mostly_forced(state: State, pieces: Callable[[], Sequence[bytes]]) -> bool:
    """Whether one byte only, or the end, may follow at least half of some tokens."""
    if len(state.threads) > _MAX_THREADS_TRIED:
        return False
    try:
        following = [one for one in map(state.walk, pieces()) if one is not None]
    except TooComplexError:
        return False
    forced = [one for one in following if one.first.bit_count() + one.accepting == 1]
    return 2 * len(forced) >= len(following) > 0
