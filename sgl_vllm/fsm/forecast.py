"""Forecasts whether forced text follows the next token, before that token is known.

Owns the forecast: as a processor predicts branches, from how often it was so before. Each state of
an automaton is one, which all requests with the same format share. Pure.
"""

from __future__ import annotations

from collections.abc import Callable

_WEIGHT_OF_LATEST = 1 / 8
_LIKELY, _UNLIKELY = 0.6, 0.2


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
