"""Attacks a server of the demo model, and prints what it and other clients noticed.

Owns the order of the attack and the table. The server is started here, on a loopback address, and
ends with the command. The requests are made from a seed, so an attack can be repeated.

    python -m tools.attack [--quick] [--seed N] [--json FILE]

The exit status is 1 if a figure is outside its limit. `make attack` runs all of it (half an hour on
two cores); `--quick` takes some minutes.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from sgl_vllm.server_process import VllmServer
from tools.attack import hostile, target
from tools.attack.client import FORMATS, Attacker, Sent, cut_bodies
from tools.attack.figures import Figures, spread

BYSTANDER_START_S = 3.0

Step = Callable[[str, int], Callable[[], None]]
"""Begins a step of the progress bar, by its name and length. Returns what advances it by one."""


@dataclass(frozen=True)
class Size:
    """How much of each kind an attack has. `idle_s`: how long TTFT is measured before it."""

    formats: int
    mixed: int
    pins: int
    batches: int
    batch_size: int
    scrapes: int
    cut_bodies: int
    stops: int
    idle_s: int


FULL = Size(500, 1000, 300, 8, 1000, 1000, 200, 20, 30)
QUICK = Size(60, 120, 60, 2, 200, 200, 40, 2, 8)
WARM_UP = Size(20, 40, 5, 1, 50, 5, 0, 0, 0)


@dataclass(frozen=True)
class Phase:
    """Requests of one kind, `at_once` of which are under way."""

    name: str
    requests: list[Sent]
    at_once: int


def phases(size: Size, seed: int) -> Iterator[Phase]:
    """All requests of an attack, in order."""
    rng = random.Random(seed)
    yield Phase(FORMATS, [Sent(one) for one in hostile.formats(rng, size.formats)], 4)
    mixed = [Sent(one.attack, one.leaves_after_s) for one in hostile.mixed(rng, size.mixed)]
    yield Phase("mixed, half cut off", mixed, 8)
    yield Phase("hints and fields", [Sent(one) for one in hostile.hints()], 4)
    yield Phase("unreadable bodies", [Sent(one) for one in hostile.unreadable()], 4)
    yield Phase("pins", [Sent(one) for one in hostile.pins(rng, size.pins)], 8)
    batches = hostile.batches(rng, size.batches, size.batch_size)
    yield Phase("batches", [Sent(one) for one in batches], 1)
    yield Phase("scrapes", [Sent(one) for one in hostile.scrapes(size.scrapes)], 16)


def attack(size: Size, seed: int, step: Step) -> Figures:
    """The whole attack, on servers of its own."""
    advance = step("start", 1)
    with target.demo_server() as server:
        advance()
        figures = _attack_one(server, size, seed, step)
        advance = step("SIGTERM", size.stops)
        stops_s = [target.seconds_to_stop(server)]
        advance()
    for _ in range(size.stops - 1):
        with target.demo_server() as another:
            stops_s.append(target.seconds_to_stop(another))
        advance()
    return replace(figures, stops_s=stops_s)


def _attack_one(server: VllmServer, size: Size, seed: int, step: Step) -> Figures:
    url = server.url
    _send(url, phases(WARM_UP, seed + 1), lambda name, total: step(f"warm-up: {name}", total))
    target.unpin_all(url)
    target.fill_cache(url)
    answers = target.greedy_answers(url)
    target.wait_until_idle(url)
    before = target.resident(server)
    with target.bystander(url) as other:
        time.sleep(BYSTANDER_START_S)
        idle_from = time.monotonic()
        advance = step("idle", size.idle_s)
        for _ in range(size.idle_s):
            time.sleep(1)
            advance()
        attacked_from = time.monotonic()
        attacker, ends = _send(url, phases(size, seed), step)
    starts = [attacked_from, *ends.values()]
    num_lines = target.num_log_lines(server)
    advance = step("cut bodies", 1)
    cut_bodies(url, size.cut_bodies, seed)
    advance()
    target.unpin_all(url)
    target.wait_until_idle(url)
    log_lines = (target.num_log_lines(server) - num_lines) / size.cut_bodies
    after = target.resident(server)
    same = [one == other for one, other in zip(answers, target.greedy_answers(url), strict=True)]
    target.wait_until_idle(url)
    return Figures(
        answered=attacker.answered,
        before=before,
        after=after,
        ttft_idle_s=other.between(idle_from, attacked_from),
        ttft_attack_s={
            phase: other.between(start, end)
            for start, (phase, end) in zip(starts, ends.items(), strict=False)
        },
        blocks_in_use=target.blocks_in_use(url),
        flushed=target.flush(url),
        same_answers=sum(same),
        num_answers=len(same),
        log_lines=log_lines,
        stops_s=(),
    )


def _send(url: str, all_phases: Iterator[Phase], step: Step) -> tuple[Attacker, dict[str, float]]:
    """One phase after another. Returns when each ended, on the monotonic clock."""
    attacker, ends = Attacker(url), {}
    for phase in all_phases:
        advance = step(phase.name, len(phase.requests))
        attacker.run(phase.name, phase.requests, phase.at_once, advance)
        ends[phase.name] = time.monotonic()
    return attacker, ends


def print_result(figures: Figures, console: Console) -> None:
    """The checks as a table, then the requests that were not answered as they should be."""
    table = Table("figure", "measured", "limit", "")
    for check in figures.checks():
        mark = "[green]ok" if check.passed else "[red]FAILED"
        table.add_row(check.name, check.measured, check.limit, mark)
    console.print(table)
    for phase, statuses in figures.by_phase().items():
        answers = ", ".join(f"{n} x {status}" for status, n in statuses.items())
        ttft = spread(figures.ttft_attack_s.get(phase, ()))
        waits = f"p50 {1000 * ttft['p50']:.0f}, p99 {1000 * ttft['p99']:.0f} ms"
        console.print(f"{phase}: {answers}; TTFT of {ttft['count']} requests: {waits}")
    for one in [one for one in figures.answered if one.error][:20]:
        console.print(f"{one.phase}, {one.kind}: {one.error}", markup=False)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.attack", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--quick", action="store_true", help="a tenth of everything")
    parser.add_argument("--seed", type=int, default=0, help="of the requests (default: 0)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    args = parser.parse_args()
    console = Console()
    columns = (TextColumn("{task.description:<28}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True)) as progress:

        def step(name: str, total: int) -> Callable[[], None]:
            task = progress.add_task(name, total=total)
            return lambda: progress.advance(task)

        figures = attack(QUICK if args.quick else FULL, args.seed, step)
    print_result(figures, console)
    if args.json:
        args.json.write_text(json.dumps(figures.to_json(), indent=1) + "\n")
    return 0 if all(check.passed for check in figures.checks()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
