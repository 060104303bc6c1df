"""Attacks a server of the demo model, and prints what it and other clients noticed.

Owns the order of the attack, and the limits. The server is started here, on a loopback address, and
ends with the command. The requests are made from a seed, so an attack can be repeated.

    python -m tools.attack [--quick] [--seed N] [--json FILE]

The exit status is 1 if a figure is outside its limit. `make attack` runs all of it (half an hour on
two cores); `--quick` takes some minutes.
"""

from __future__ import annotations

import argparse
import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.arms import percentile
from benchmarks.command import new_file, write_json
from sgl_vllm.server_process import VllmServer
from tools.attack import target
from tools.attack.client import MAX_ANSWER_S, cut_bodies, problem, send_all
from tools.attack.hostile import Attack, Phase
from tools.attack.odd import phases
from tools.attack.target import Resident

QUICK = 0.12
WARM_UP = 0.04
"""Shares of all requests."""

MAX_GROWTH_BYTES = 300 << 20
MAX_WORKERS_BYTES = 600 << 20
"""They start with the first format that needs them, so they are not compared with before."""

MAX_TTFT_RATIO = 2.0
MAX_STOP_S = 10.0
MAX_LOG_LINES = 2.0
MAX_REPLAYED = 400
"""Requests that are put to stock vLLM, at most."""
REPORT = "Please report this"
"""In the log, a line about an error that nobody expected."""

Step = Callable[[str, int], Callable[[], None]]
"""Begins a step of the progress bar, by its name and length. Returns what advances it by one."""


@dataclass(frozen=True)
class Check:
    """One line of the result: what was measured, and whether it is within its limit."""

    name: str
    measured: str
    limit: str
    passed: bool


@dataclass(frozen=True)
class Answered:
    """What became of one request. `error`: why it is a failure of the server, "" if it is not."""

    phase: str
    kind: str
    status: int
    seconds: float
    error: str = ""


@dataclass(frozen=True)
class Figures:
    """All that one attack has measured.

    Attributes:
        answered: every hostile request.
        before, after: resident memory, idle, after a warm-up and after the attack.
        ttft_s: times to the first token of another client's requests, by the phase in which they
            were sent; of "idle", before the attack.
        blocks_in_use: KV blocks that cannot be evicted when nothing runs.
        flushed: whether the cache could be emptied, so that all blocks were free.
        same_answers: for each greedy answer, whether it is as before the attack.
        parts: the state of each part after the attack.
        reports: lines of the log about unexpected errors.
        log_lines: lines in the server's log per request that was cut off.
        stops_s: seconds from SIGTERM to the end of the server under load, per run. Infinite if it
            did not end.
    """

    answered: Sequence[Answered]
    before: Resident
    after: Resident
    ttft_s: dict[str, list[float]]
    blocks_in_use: int
    flushed: bool
    same_answers: Sequence[bool]
    parts: dict[str, str]
    reports: Sequence[str]
    log_lines: float
    stops_s: Sequence[float]

    def attacked_s(self) -> list[float]:
        """Times to the first token in all phases of the attack."""
        return [one for phase, times in self.ttft_s.items() if phase != "idle" for one in times]

    def checks(self) -> list[Check]:
        """Every limit, in the order of the table. What cannot be measured fails."""
        answered, stops_s, same = self.answered, self.stops_s, self.same_answers
        num_right = sum(not one.error for one in answered)
        slowest = max((one.seconds for one in answered), default=math.inf)
        idle, attacked = _percentile(self.ttft_s["idle"], 99), _percentile(self.attacked_s(), 99)
        in_time = sum(seconds <= MAX_STOP_S for seconds in stops_s)
        before, after, parts = self.before, self.after, [*self.parts.values()]
        full = "" if self.flushed else ", cache not emptied"
        ttft = f"{1000 * attacked:.0f} / {1000 * idle:.0f} ms = {attacked / idle:.2f}"
        stops = f"{in_time} of {len(stops_s)}, slowest {max(stops_s, default=0):.1f} s"
        rows = (
            ("requests answered as they should be", f"{num_right:,} of {len(answered):,}", "all",
             0 < len(answered) == num_right),
            ("slowest answer", f"{slowest:.1f} s", f"{MAX_ANSWER_S:.0f} s",
             slowest <= MAX_ANSWER_S),
            ("RSS of the API server", *_growth(before.api, after.api)),
            ("RSS of the engine", *_growth(before.engine, after.engine)),
            ("RSS of the compile workers", f"{after.workers >> 20} MB",
             f"{MAX_WORKERS_BYTES >> 20} MB", after.workers <= MAX_WORKERS_BYTES),
            ("TTFT p99 of another client, attacked / idle", ttft, f"{MAX_TTFT_RATIO:.0f}x",
             attacked <= MAX_TTFT_RATIO * idle < math.inf),
            ("KV blocks in use afterwards", f"{self.blocks_in_use}{full}", "0",
             self.blocks_in_use == 0 and self.flushed),
            ("greedy answers as before", f"{sum(same)} of {len(same)}", "all",
             bool(same) and all(same)),
            ("parts that are on", f"{parts.count('on')} of {len(parts)}", "all",
             {*parts} == {"on"}),
            ("unexpected errors in the log", f"{len(self.reports)}", "0", not self.reports),
            ("log lines per request that was cut off", f"{self.log_lines:.2f}",
             f"{MAX_LOG_LINES:.0f}", self.log_lines <= MAX_LOG_LINES),
            (f"ended within {MAX_STOP_S:.0f} s of SIGTERM", stops, "all",
             0 < len(stops_s) == in_time),
        )  # fmt: skip
        return [Check(*row) for row in rows]

    def by_phase(self) -> dict[str, Counter[int]]:
        """How many requests of each phase had each status."""
        counts: dict[str, Counter[int]] = {}
        for one in self.answered:
            counts.setdefault(one.phase, Counter())[one.status] += 1
        return counts


def _growth(before: int, after: int) -> tuple[str, str, bool]:
    measured, limit = f"{before >> 20:,} -> {after >> 20:,} MB", f"+{MAX_GROWTH_BYTES >> 20} MB"
    return measured, limit, 0 < after <= before + MAX_GROWTH_BYTES


def _percentile(values: Sequence[float], percent: float) -> float:
    """As `percentile`; infinite for no values, which is within no limit."""
    return percentile(values, percent) if values else math.inf


# -- the attack


def attack(
    share: float, seed: int, step: Step, *, num_stops: int = 20, idle_s: int = 30
) -> Figures:
    """The whole attack, on servers of its own. `idle_s`: how long TTFT is measured before it."""
    stops_s: list[float] = []
    failed: dict[int, Attack] = {}
    with target.demo_server() as server:
        figures = _attack_one(server, share, seed, step, idle_s, stops_s, failed)
        advance = step("SIGTERM", num_stops)
        stops_s.append(target.seconds_to_stop(server))
    for _ in range(num_stops - 1):
        advance()
        with target.demo_server() as another:
            stops_s.append(target.seconds_to_stop(another))
    answered = [*figures.answered]
    for index in stock_fails_too(failed):
        answered[index] = replace(answered[index], error="")
    return replace(figures, answered=answered)


def stock_fails_too(failed: Mapping[int, Attack]) -> list[int]:
    """Of requests that got 5xx or no answer, the keys of those that stock vLLM fails, too."""
    same: list[int] = []
    if failed:
        keys = {id(one): key for key, one in failed.items()}

        def on_answer(one: Attack, status: int, text: str, seconds: float) -> None:
            if status < 0 or status >= 500:
                same.append(keys[id(one)])

        with target.demo_server(plugin=False) as stock:
            send_all(stock.url, [*failed.values()][:MAX_REPLAYED], 1, on_answer)
    return same


def _attack_one(
    server: VllmServer,
    share: float,
    seed: int,
    step: Step,
    idle_s: int,
    stops_s: list[float],
    failed: dict[int, Attack],
) -> Figures:
    url = server.url
    for phase in phases(WARM_UP, seed + 1):
        _send(url, phase, [], {}, step)
    target.unpin_all(url)
    target.fill_cache(url)
    answers = target.greedy_answers(url)
    target.wait_until_idle(url)
    before = target.resident(server)
    answered: list[Answered] = []
    with target.bystander(url) as times_between:
        time.sleep(3)  # it starts
        marks = {"": time.monotonic()}
        step("idle", 1)
        time.sleep(idle_s)
        marks["idle"] = time.monotonic()
        for phase in phases(share, seed):
            _send(url, phase, answered, failed, step)
            marks[phase.name] = time.monotonic()
        spans = itertools.pairwise(marks.items())
        ttft_s = {name: times_between(begun, ended) for (_, begun), (name, ended) in spans}
    num_lines, num_cut = len(target.log_lines(server)), max(1, round(200 * share))
    cut_bodies(url, num_cut, seed)
    target.unpin_all(url)
    target.wait_until_idle(url)
    log_lines = (len(target.log_lines(server)) - num_lines) / num_cut
    after = target.resident(server)
    same = [one == other for one, other in zip(answers, target.greedy_answers(url), strict=True)]
    target.wait_until_idle(url)
    in_use, flushed = target.blocks_in_use(url), target.flush(url)
    parts, reports = target.parts(url), target.log_lines(server, REPORT)
    return Figures(
        answered, before, after, ttft_s, in_use, flushed, same, parts, reports, log_lines, stops_s
    )


def _send(
    url: str, phase: Phase, answered: list[Answered], failed: dict[int, Attack], step: Step
) -> None:
    advance = step(phase.name, len(phase.requests))

    def on_answer(one: Attack, status: int, text: str, seconds: float) -> None:
        error = problem(status, text, may_fail=phase.may_fail)
        if error and (status < 0 or status >= 500):
            failed[len(answered)] = one
        answered.append(Answered(phase.name, one.kind, status, seconds, error))
        advance()

    send_all(url, phase.requests, phase.at_once, on_answer)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.attack", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--quick", action="store_true", help="a tenth of everything")
    parser.add_argument("--seed", type=int, default=0, help="of the requests (default: 0)")
    parser.add_argument("--json", type=new_file, metavar="FILE", help="write all figures there")
    args = parser.parse_args()
    console = Console()
    with Progress(console=Console(stderr=True)) as progress:

        def step(name: str, total: int) -> Callable[[], None]:
            task = progress.add_task(name, total=total)
            return lambda: progress.advance(task)

        if args.quick:
            figures = attack(QUICK, args.seed, step, num_stops=2, idle_s=8)
        else:
            figures = attack(1, args.seed, step)
    checks = figures.checks()
    table = Table("figure", "measured", "limit", "")
    for check in checks:
        mark = "[green]ok" if check.passed else "[red]FAILED"
        table.add_row(check.name, check.measured, check.limit, mark)
    console.print(table)
    for phase, statuses in figures.by_phase().items():
        p50, p99 = (1000 * _percentile(figures.ttft_s[phase], percent) for percent in (50, 99))
        console.print(f"{phase}: {dict(statuses)}; TTFT p50 {p50:.0f}, p99 {p99:.0f} ms")
    for one in [one for one in figures.answered if one.error][:20]:
        console.print(f"{one.phase}, {one.kind}: {one.error}", markup=False)
    write_json(args.json, {"checks": [asdict(check) for check in checks], **asdict(figures)})
    return 0 if all(check.passed for check in checks) else 1


if __name__ == "__main__":
    raise SystemExit(main())
