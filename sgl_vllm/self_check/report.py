"""What a self-check has found, as JSON and as text. Pure."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field


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

    @property
    def outcome(self) -> str:
        return "agrees" if self.agrees else "disagrees"

    @property
    def mean_difference(self) -> float:
        return self.total_difference / max(self.num_measured, 1)

    def measure(self, difference: float) -> None:
        self.num_measured += 1
        self.largest_difference = max(self.largest_difference, difference)
        self.total_difference += difference

    @property
    def line(self) -> str:
        """The part in one line."""
        found = [*self.problems[:1], f"{self.num_compared} tokens compared"]
        if self.num_ties:
            found.append(f"{self.num_ties} ties")
        found.append(f"largest difference {self.largest_difference:.2g}")
        found += [f"{count} {what.replace('_', ' ')}" for what, count in self.notes.items()]
        outcome = self.outcome if self.agrees else self.outcome.upper()
        return f"{self.name}: {outcome} ({'; '.join(found)})"

    def to_json(self) -> dict[str, object]:
        return {**dataclasses.asdict(self), "outcome": self.outcome}


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

    @property
    def verdict(self) -> str:
        if self.error:
            return "did not finish"
        if not self.parts:
            return "no part was checked, because all are off"
        return "all parts agree" if self.agrees else "DISAGREES"

    def to_json(self) -> str:
        parts = [part.to_json() for part in self.parts]
        content = {"agrees": self.agrees, **dataclasses.asdict(self), "parts": parts}
        return json.dumps(content, indent=2, default=str)

    def to_text(self) -> str:
        """For people. Ends with a newline."""
        lines = [
            f"sgl-vllm self-check: {self.verdict} "
            f"({self.seconds:.1f} s, {self.forward_passes} forward passes)",
            "",
            *(f"  {name}: {value}" for name, value in self.facts.items()),
            "",
            f"  tolerance {self.tolerance:.3g}, vLLM's own noise {self.noise:.2g}",
            *(f"  {part.line}" for part in self.parts),
            *([f"  the check failed: {self.error}"] if self.error else []),
            "",
            *(f"  {name} {state}" for name, state in self.states.items()),
        ]
        return "\n".join(lines) + "\n"
