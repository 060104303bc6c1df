"""Whether two answers to one canary are the same, within floating-point rounding.

Owns the rule; `stages.py` says which answers are compared. Pure.

Tokens are compared along the same path: up to the first that differs. There the reference must have
both tokens within the tolerance, so that rounding decides; any other difference is a fault. What
follows is a different text, of which only the end is checked.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

Row = Mapping[int, float]
"""The log-probabilities of some tokens at one position, among them the chosen one's."""

MAX_TOLERANCE = 2.0

_ENDS = ("stop", "length")
"""How an answer ends by itself."""


@dataclass(slots=True)
class Answer:
    """What the engine has answered to one canary.

    Attributes:
        rows: for each token its row; empty without log-probabilities.
        scores: for each scored prompt token its row.
        finish_reason: vLLM's name of it, such as "length". Empty if it has not ended.
        forced: half-open intervals of `tokens` that jumps have appended.
    """

    tokens: list[int] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    scores: list[Row] = field(default_factory=list)
    finish_reason: str = ""
    num_preemptions: int = 0
    num_cached_tokens: int = 0
    forced: list[tuple[int, int]] = field(default_factory=list)


@dataclass(slots=True)
class Agreement:
    """What comparisons have found.

    Attributes:
        num_compared: positions at which the reference had the same token or score, or a tie.
        num_ties: answers that leave the reference where two tokens are equally likely.
        largest, total: of the differences between log-probabilities.
        problems: one sentence each; empty if all agree.
    """

    num_compared: int = 0
    num_ties: int = 0
    num_measured: int = 0
    largest: float = 0.0
    total: float = 0.0
    problems: list[str] = field(default_factory=list)

    @property
    def mean(self) -> float:
        return self.total / self.num_measured if self.num_measured else 0.0

    def measure(self, difference: float) -> None:
        self.num_measured += 1
        self.largest = max(self.largest, difference)
        self.total += difference


def tolerance_of(dtype: str, noise: float) -> float:
    """By how much two log-probabilities of one token may differ.

    Args:
        dtype: the model's, such as "bfloat16".
        noise: the largest difference between two runs of the reference in different batches.
    """
    floor = 0.02 if dtype == "float32" else 0.5
    return min(max(floor, 4 * noise), max(floor, MAX_TOLERANCE))


def compare(
    got: Sequence[Answer], want: Sequence[Answer], tolerance: float, found: Agreement
) -> None:
    """Add the differences between answers and their references to `found`."""
    for number, (one, other) in enumerate(zip(got, want, strict=True)):
        problem = _scores_problem(one, other, tolerance, found) or _tokens_problem(
            one, other, tolerance, found
        )
        if problem:
            found.problems.append(f"request {number}: {problem}")
    if not found.problems and found.mean > tolerance / 4:
        found.problems.append(
            f"log-probabilities differ by {found.mean:.3g} on average (at most "
            f"{tolerance / 4:.3g} is rounding)"
        )


def _tokens_problem(got: Answer, want: Answer, tolerance: float, found: Agreement) -> str | None:
    for place, (token, expected) in enumerate(zip(got.tokens, want.tokens, strict=False)):
        row = want.rows[place] if place < len(want.rows) else None
        reached = row.get(token) if row else None
        if token != expected:
            best = row.get(expected) if row else None
            if best is None or reached is None or not best - reached <= tolerance:
                return f"token {place} is {token}, not {expected}{_by(best, reached)}"
            found.num_ties += 1
        found.num_compared += 1
        if reached is not None and place < len(got.rows):
            own = got.rows[place].get(token, math.nan)
            if own == reached:
                found.measure(0.0)
            elif not abs(own - reached) <= tolerance:
                return f"token {place} has log-probability {own:.4g}, not {reached:.4g}"
            else:
                found.measure(abs(own - reached))
        if token != expected:
            return None if got.finish_reason in _ENDS else _ended(got, want)
    if len(got.tokens) != len(want.tokens):
        return f"it has {len(got.tokens)} tokens, not {len(want.tokens)}"
    return None if got.finish_reason == want.finish_reason else _ended(got, want)


def _ended(got: Answer, want: Answer) -> str:
    return f"it ended by {got.finish_reason or 'nothing'}, not {want.finish_reason}"


def _by(best: float | None, reached: float | None) -> str:
    if best is None:
        return ""
    if reached is None:
        return ", and not among the likeliest"
    return f", which is likelier by {best - reached:.3g}"


def _scores_problem(got: Answer, want: Answer, tolerance: float, found: Agreement) -> str | None:
    if len(got.scores) != len(want.scores):
        return f"it has {len(got.scores)} scores, not {len(want.scores)}"
    for place, (row, expected) in enumerate(zip(got.scores, want.scores, strict=True)):
        (token, score), (expected_token, expected_score) = _first(row), _first(expected)
        if token != expected_token:
            return f"score {place} is of token {token}, not {expected_token}"
        found.num_compared += 1
        difference = abs(score - expected_score)
        if not difference <= tolerance:
            return f"score {place} is {score:.4g}, not {expected_score:.4g}"
        found.measure(difference)
    return None


def _first(row: Row) -> tuple[int, float]:
    return next(iter(row.items()))
