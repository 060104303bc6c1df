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

from sgl_vllm.self_check.report import PartReport

Row = Mapping[int, float]
"""The log-probabilities of some tokens at one position, the token of that position first."""

MAX_TOLERANCE = 2.0


@dataclass(slots=True)
class Answer:
    """What the engine has answered to one canary.

    Attributes:
        tokens: its scored prompt tokens, if it has some, and its output.
        rows: of the first tokens, as far as their log-probabilities were asked for.
        finish_reason: vLLM's name of it, such as "length". Empty if it has not ended.
        forced: the places of tokens that were forced, in ascending order.
    """

    tokens: list[int] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    finish_reason: str = ""
    num_preemptions: int = 0
    num_cached_tokens: int = 0
    forced: list[int] = field(default_factory=list)


def tolerance_of(dtype: str, noise: float) -> float:
    """By how much two log-probabilities of one token may differ.

    Args:
        dtype: the model's, such as "bfloat16".
        noise: the largest difference between two runs of the reference in different batches.
    """
    floor = 0.02 if dtype == "float32" else 0.5
    return min(max(floor, 4 * noise), max(floor, MAX_TOLERANCE))


def compare(
    got: Sequence[Answer], want: Sequence[Answer], tolerance: float, found: PartReport
) -> None:
    """Add the differences between answers and their references to `found`."""
    for number, (one, other) in enumerate(zip(got, want, strict=True)):
        if problem := _difference(one, other, tolerance, found):
            found.problems.append(f"request {number}: {problem}")
    if not found.problems and found.mean_difference > tolerance / 4:
        found.problems.append(
            f"log-probabilities differ by {found.mean_difference:.3g} on average (at most "
            f"{tolerance / 4:.3g} is rounding)"
        )


def _difference(got: Answer, want: Answer, tolerance: float, found: PartReport) -> str | None:
    ended = f"it ended by {got.finish_reason or 'nothing'}, not {want.finish_reason}"
    for place, (token, expected) in enumerate(zip(got.tokens, want.tokens, strict=False)):
        row = want.rows[place] if place < len(want.rows) else {}
        reached, best = row.get(token, math.nan), row.get(expected, math.nan)
        if token != expected:
            if not best - reached <= tolerance:
                by = f", which is likelier by {best - reached:.3g}"
                if token not in row:
                    by = ", and not among the likeliest" if row else ""
                return f"token {place} is {token}, not {expected}{by}"
            found.num_ties += 1
        found.num_compared += 1
        if token in row and place < len(got.rows):
            own = got.rows[place].get(token, math.nan)
            if own != reached and not abs(own - reached) <= tolerance:  # equal infinities are fine
                return f"token {place} has log-probability {own:.4g}, not {reached:.4g}"
            found.measure(0.0 if own == reached else abs(own - reached))
        if token != expected:
            return None if got.finish_reason in ("stop", "length") else ended
    if len(got.tokens) != len(want.tokens):
        return f"it has {len(got.tokens)} tokens, not {len(want.tokens)}"
    return None if got.finish_reason == want.finish_reason else ended
