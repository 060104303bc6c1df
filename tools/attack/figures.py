"""What an attack has measured, and the limits that it is held to. Pure.

Owns the limits. A figure that cannot be measured fails its check.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

MAX_GROWTH_BYTES = 300 << 20
MAX_WORKERS_BYTES = 600 << 20
"""They start with the first format that needs them, so they are not compared with before."""

MAX_TTFT_RATIO = 2.0
MAX_STOP_S = 10.0
MAX_ANSWER_S = 60.0
"""Of hostile formats, four are under way, and a server compiles them one after another."""

MAX_LOG_LINES = 2.0


@dataclass(frozen=True)
class Check:
    """One line of the result: what was measured, and whether it is within its limit."""

    name: str
    measured: str
    limit: str
    passed: bool


@dataclass(frozen=True)
class Answered:
    """What became of one request.

    Attributes:
        status: of HTTP; 0 if the client left, -1 if there was no answer in `MAX_ANSWER_S`.
        error: why it counts as a failure of the server, "" if it does not.
        seconds: until the end of the answer.
    """

    phase: str
    kind: str
    status: int
    seconds: float
    error: str = ""


@dataclass(frozen=True)
class Resident:
    """Resident bytes of a server's processes: that which answers HTTP, the engines', and those in
    which formats are compiled first."""

    api: int
    engine: int
    workers: int


@dataclass(frozen=True)
class Figures:
    """All that one attack has measured.

    Attributes:
        answered: every hostile request.
        before, after: resident memory, idle, after a warm-up and after the attack.
        ttft_idle_s: times to the first token of another client's requests before the attack.
        ttft_attack_s: the same during the attack, by the phase in which a request was sent.
        blocks_in_use: KV blocks that cannot be evicted when nothing runs.
        flushed: whether the cache could be emptied, so that all blocks were free.
        same_answers, num_answers: greedy answers as before the attack, of how many.
        log_lines: lines in the server's log per request that cannot be read or was cut off.
        stops_s: seconds from SIGTERM to the end of the server under load, per run. Infinite if it
            did not end.
    """

    answered: Sequence[Answered]
    before: Resident
    after: Resident
    ttft_idle_s: Sequence[float]
    ttft_attack_s: Mapping[str, Sequence[float]]
    blocks_in_use: int
    flushed: bool
    same_answers: int
    num_answers: int
    log_lines: float
    stops_s: Sequence[float]

    @property
    def attacked_s(self) -> list[float]:
        """Times to the first token in all phases."""
        return [seconds for phase in self.ttft_attack_s.values() for seconds in phase]

    def checks(self) -> list[Check]:
        """Every limit, in the order of the table."""
        failed = [one for one in self.answered if one.error]
        slowest = max((one.seconds for one in self.answered), default=math.inf)
        idle, under_attack = percentile(self.ttft_idle_s, 99), percentile(self.attacked_s, 99)
        in_time = sum(seconds <= MAX_STOP_S for seconds in self.stops_s)
        return [
            Check(
                "requests answered as they should be",
                f"{len(self.answered) - len(failed):,} of {len(self.answered):,}",
                "all",
                bool(self.answered) and not failed,
            ),
            Check(
                "slowest answer",
                f"{slowest:.1f} s",
                f"{MAX_ANSWER_S:.0f} s",
                slowest <= MAX_ANSWER_S,
            ),
            _growth("RSS of the API server", self.before.api, self.after.api),
            _growth("RSS of the engine", self.before.engine, self.after.engine),
            Check(
                "RSS of the compile workers",
                f"{self.after.workers / 2**20:,.0f} MB",
                f"{MAX_WORKERS_BYTES >> 20} MB",
                self.after.workers <= MAX_WORKERS_BYTES,
            ),
            Check(
                "TTFT p99 of another client, attacked / idle",
                f"{1000 * under_attack:.0f} / {1000 * idle:.0f} ms = {under_attack / idle:.2f}",
                f"{MAX_TTFT_RATIO:.0f}x",
                under_attack <= MAX_TTFT_RATIO * idle < math.inf,
            ),
            Check(
                "KV blocks in use afterwards",
                f"{self.blocks_in_use}" + ("" if self.flushed else ", cache not emptied"),
                "0",
                self.blocks_in_use == 0 and self.flushed,
            ),
            Check(
                "greedy answers as before",
                f"{self.same_answers} of {self.num_answers}",
                "all",
                0 < self.num_answers == self.same_answers,
            ),
            Check(
                "log lines per unreadable or cut request",
                f"{self.log_lines:.2f}",
                f"{MAX_LOG_LINES:.0f}",
                self.log_lines <= MAX_LOG_LINES,
            ),
            Check(
                f"ended within {MAX_STOP_S:.0f} s of SIGTERM",
                f"{in_time} of {len(self.stops_s)}, slowest {max(self.stops_s, default=0):.1f} s",
                "all",
                0 < len(self.stops_s) == in_time,
            ),
        ]

    def to_json(self) -> dict[str, Any]:
        """Everything but the single requests, of which only the failed and slowest are listed."""
        by_time = sorted(self.answered, key=lambda one: -one.seconds)
        return {
            "checks": [asdict(check) for check in self.checks()],
            "requests": self.by_phase(),
            "failed": [asdict(one) for one in self.answered if one.error],
            "slowest": [asdict(one) for one in by_time[:20]],
            "rss_before": asdict(self.before),
            "rss_after": asdict(self.after),
            "ttft_idle_s": spread(self.ttft_idle_s),
            "ttft_attack_s": {
                phase: spread(seconds) for phase, seconds in self.ttft_attack_s.items()
            },
            "stops_s": list(self.stops_s),
        }

    def by_phase(self) -> dict[str, dict[str, int]]:
        """How many requests of each phase had each status."""
        counts: dict[str, dict[str, int]] = {}
        for one in self.answered:
            statuses = counts.setdefault(one.phase, {})
            name = {0: "left", -1: "no answer"}.get(one.status, str(one.status))
            statuses[name] = statuses.get(name, 0) + 1
        return counts


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least `percent` of `values` do not exceed; infinite for none."""
    if not values:
        return math.inf
    return sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)]


def _growth(name: str, before: int, after: int) -> Check:
    return Check(
        name,
        f"{before / 2**20:,.0f} -> {after / 2**20:,.0f} MB",
        f"+{MAX_GROWTH_BYTES >> 20} MB",
        0 < after <= before + MAX_GROWTH_BYTES,
    )


def spread(values: Sequence[float]) -> dict[str, float]:
    """How many values there are, and their percentiles."""
    names = {"p50": 50, "p90": 90, "p99": 99, "max": 100}
    return {"count": len(values)} | {name: percentile(values, p) for name, p in names.items()}
