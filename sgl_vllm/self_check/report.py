"""What a self-check has found: the comparison of two answers, and the report as JSON and as text.

Owns when two answers to one canary are the same, within floating-point rounding. Does not own which
answers are compared (`check.py`). Pure.

Tokens are compared along the same path: up to the first that differs. There the reference must have
both tokens within the tolerance, so that rounding decides; any other difference is a fault. What
follows is a different text, of which only the end is checked.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

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


@dataclass(slots=True)
class PartReport:
    """What was found of one part. A part with problems is switched off.

    Attributes:
        problems: what differed, one sentence each.
        num_compared: positions at which the reference had the same token, or a tie.
        num_ties: answers that leave the reference where two tokens are equally likely.
        num_measured, largest_difference, total_difference: of log-probabilities.
        notes: what the requests have reached, such as hits or preemptions.
    """

    name: str
    problems: list[str] = field(default_factory=list)
    num_compared: int = 0
    num_ties: int = 0
    num_measured: int = 0
    largest_difference: float = 0.0
    total_difference: float = 0.0
    notes: dict[str, int] = field(default_factory=dict)

    @property
    def agrees(self) -> bool:
        return not self.problems

    def compare(self, got: Sequence[Answer], want: Sequence[Answer], tolerance: float) -> None:
        """Add the differences between answers and their references."""
        for number, (one, other) in enumerate(zip(got, want, strict=True)):
            if problem := self._difference(one, other, tolerance):
                self.problems.append(f"request {number}: {problem}")
        mean = self.total_difference / max(self.num_measured, 1)
        if self.agrees and mean > tolerance / 4:
            self.problems.append(
                f"log-probabilities differ by {mean:.3g} on average (at most "
                f"{tolerance / 4:.3g} is rounding)"
            )

    def _difference(self, got: Answer, want: Answer, tolerance: float) -> str | None:
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
                self.num_ties += 1
            self.num_compared += 1
            if token in row and place < len(got.rows):
                own = got.rows[place].get(token, math.nan)
                difference = 0.0 if own == reached else abs(own - reached)  # infinities are fine
                if not difference <= tolerance:
                    return f"token {place} has log-probability {own:.4g}, not {reached:.4g}"
                self.num_measured += 1
                self.largest_difference = max(self.largest_difference, difference)
                self.total_difference += difference
            if token != expected:
                return None if got.finish_reason in ("stop", "length") else ended
        if len(got.tokens) != len(want.tokens):
            return f"it has {len(got.tokens)} tokens, not {len(want.tokens)}"
        return None if got.finish_reason == want.finish_reason else ended

    def __str__(self) -> str:
        """The part in one line."""
        found = [*self.problems[:1], f"{self.num_compared} tokens compared"]
        if self.num_ties:
            found.append(f"{self.num_ties} ties")
        found.append(f"largest difference {self.largest_difference:.2g}")
        found += [f"{count} {what.replace('_', ' ')}" for what, count in self.notes.items()]
        return f"{self.name}: {'agrees' if self.agrees else 'DISAGREES'} ({'; '.join(found)})"


@dataclass(slots=True)
class CheckReport:
    """A whole check.

    Attributes:
        facts: what was checked (`plan.facts_of`).
        tolerance: by how much log-probabilities may differ; `noise` is how much vLLM's own do.
        error: why the check itself has failed; empty if it has not.
        states: each part's state afterwards, "on" or why it is off.
    """

    facts: Mapping[str, object] = field(default_factory=dict)
    parts: list[PartReport] = field(default_factory=list)
    noise: float = 0.0
    tolerance: float = 0.0
    seconds: float = 0.0
    forward_passes: int = 0
    error: str = ""
    states: dict[str, str] = field(default_factory=dict)

    @property
    def agrees(self) -> bool:
        """Whether parts were compared, and all of them agree."""
        return not self.error and bool(self.parts) and all(part.agrees for part in self.parts)

    def to_json(self) -> str:
        content = {"agrees": self.agrees, **dataclasses.asdict(self)}
        return json.dumps(content, indent=2, default=str)

    def to_text(self) -> str:
        """For people. Ends with a newline."""
        verdict = "all parts agree" if self.agrees else "DISAGREES"
        if self.error:
            verdict = "did not finish"
        elif not self.parts:
            verdict = "no part was checked, because all are off"
        lines = [
            f"sgl-vllm self-check: {verdict} "
            f"({self.seconds:.1f} s, {self.forward_passes} forward passes)",
            "",
            *(f"  {name}: {value}" for name, value in self.facts.items()),
            "",
            f"  tolerance {self.tolerance:.3g}, vLLM's own noise {self.noise:.2g}",
            *(f"  {part}" for part in self.parts),
            *([f"  the check failed: {self.error}"] if self.error else []),
            "",
            *(f"  {name} {state}" for name, state in self.states.items()),
        ]
        return "\n".join(lines) + "\n"
