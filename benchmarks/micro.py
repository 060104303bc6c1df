"""The benchmarks that need no server and no model, one after the other: one table, one file.

    python -m benchmarks.micro
    python -m benchmarks.micro --quick --json micro.json
    python -m benchmarks.micro --only radix,masks

Owns which of them there are, with what sizes they run, and what is said of each. What they measure
is their own: each runs as its own command in a process of its own, so that none finds the memory or
the caches that another left.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks.child import ChildFailed, run_for_json
from benchmarks.command import check_folders, progress_bars, show_steps
from sgl_vllm.server_process import sigterm_as_interrupt

COMMENT = """\
Each runs as a command of its own, `python -m benchmarks.NAME`, which has more options and prints
more than the summary here; `--help` of it says how to read that. One after the other, as they would
disturb each other's times. Absolute times mean little on a shared machine: look at ratios.

On two quiet cores all of it takes some ten minutes, and with --quick less than two. --quick is a
look at fewer cases and rounds (and leaves outlines out, whose set-up alone takes half a minute):
do not cite it.

--json joins what each wrote with its own --json, {"radix": {...}, "masks": {...}, ...}; of one that
failed it has {"error": "..."}. Then the exit status is 1; the others still run.
"""

Finding = tuple[str, str]
"""What was measured, and what it came to."""


@dataclass(frozen=True)
class Micro:
    """One benchmark.

    Attributes:
        module: run with `python -m`; writes its numbers to the file after `--json`.
        arguments: its sizes; `quick_arguments` with `--quick`.
        findings: what the summary says, from its JSON.
    """

    module: str
    summary: str
    arguments: tuple[str, ...]
    quick_arguments: tuple[str, ...]
    findings: Callable[[Any], list[Finding]]

    def command(self, quick: bool) -> tuple[str, ...]:
        return ("-m", self.module, *(self.quick_arguments if quick else self.arguments))


@dataclass(frozen=True)
class Outcome:
    """`content` is the benchmark's JSON, or `{"error": its message}`."""

    micro: Micro
    content: Any
    seconds: float
    failed: bool


# -- which there are


def _of_radix(content: Any) -> list[Finding]:
    ratios = [row["ratio"] for row in content["rows"]]
    spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    memory = (
        (f"bytes per token, blocks of {size}, radix / vLLM", f"{one['radix'] / one['vllm']:.2f}")
        for size, one in content["bytes_per_cached_token"].items()
    )
    return [("time per request, radix / vLLM", spread), *memory]


def _of_masks(content: Any) -> list[Finding]:
    found = []
    for backend, one in content["backends"].items():
        schemas = one["schemas"]
        found.append((f"{backend}: schemas right", f"{schemas['right']} of {schemas['tried']}"))
        for what in ("compile", "mask"):
            if of := one[f"{what}_us"]:
                found.append((f"{backend}: {what}, p50", f"{of['p50']:,.0f} us"))
    return found


def _of_simulate(content: Any) -> list[Finding]:
    names = {"hit_rate": "hit rate", "ttft_p99_s": "TTFT p99", "throughput_requests_s": "calls/s"}
    ratio = content["ratio"]
    return [
        (f"{words}; above 1 the plugin is better", f"{ratio[name]:.3f}")
        for name, words in names.items()
        if name in ratio
    ]


def _of_client(content: Any) -> list[Finding]:
    medians = content["medians"]
    pairs = {"sync": "by_hand", "async": "by_hand", "compiled": "by_hand", "batch": "list"}
    return [
        (f"wall time, {way} / {other}", f"{medians[way]['wall_s'] / medians[other]['wall_s']:.2f}")
        for way, other in pairs.items()
    ]


def _of_schedule(content: Any) -> list[Finding]:
    return [
        (
            f"a step, {case}: stock, plugin",
            f"{costs['stock']['step_median_us']:,.0f} us, {costs['sgl']['step_median_us']:,.0f} us",
        )
        for case, costs in content.items()
    ]


def _of_routing(content: Any) -> list[Finding]:
    found = []
    for source, cost in content.items():
        times = f"{cost['decision_p50_us']:,.0f} us, {cost['decision_p99_us']:,.0f} us"
        found += [
            (f"{source}: a decision, p50, p99", times),
            (f"{source}: bytes per cached token", f"{cost['bytes_per_cached_token']:.2f}"),
        ]
    return found


MICROS: Mapping[str, Micro] = {
    "radix": Micro(
        "benchmarks.radix",
        "the prefix cache's own time and memory, against vLLM's",
        (),
        ("--block-size", "16", "--rounds", "15"),
        _of_radix,
    ),
    "masks": Micro(
        "benchmarks.masks",
        "structured-output backends: what they get right and what they cost",
        (),
        ("--backends", "xgrammar,guidance,sgl", "--limit", "4"),
        _of_masks,
    ),
    "simulate": Micro(
        "benchmarks.simulate",
        "the scheduler and the cache on a trace, against vLLM's own",
        ("--trace", "chat", "--cache-fraction", "0.3"),
        ("--trace", "chat", "--cache-fraction", "0.3", "--requests", "200"),
        _of_simulate,
    ),
    "client": Micro(
        "benchmarks.client",
        "what the language costs, against the same calls written by hand",
        (),
        ("--programs", "100", "--rounds", "1"),
        _of_client,
    ),
    "schedule": Micro(
        "benchmarks.schedule",
        "what the order of the waiting queue costs in a step",
        (),
        ("--waiting", "200", "--tokens", "1000", "--steps", "30", "--programs", "500"),
        _of_schedule,
    ),
    "routing": Micro(
        "benchmarks.routing",
        "what a router's choice of a worker costs",
        (),
        ("--workers", "8", "--cached-tokens", "100000", "--decisions", "200"),
        _of_routing,
    ),
}


# -- the command


def main(argv: Sequence[str] | None = None, micros: Mapping[str, Micro] = MICROS) -> int:
    """The command. 0 if all of them ran, 1 if one failed, 130 if interrupted."""
    parser = _parser(micros)
    arguments = parser.parse_args(argv)
    try:
        check_folders(json=arguments.json, data=None)
    except ValueError as error:
        parser.error(str(error))
    console = Console(stderr=True, highlight=False)
    with sigterm_as_interrupt():
        try:
            outcomes = run_all(
                {name: micros[name] for name in arguments.only}, arguments.quick, console
            )
        except KeyboardInterrupt:
            console.print("interrupted; everything is stopped")
            return 130
    Console(highlight=False).print(summary(outcomes))
    for name, one in outcomes.items():
        if one.failed:
            console.print(f"[red]{name} failed:[/red]\n{escape(one.content['error'])}")
    if arguments.json:
        contents = {name: one.content for name, one in outcomes.items()}
        arguments.json.write_text(json.dumps(contents, indent=2) + "\n")
    return 1 if any(one.failed for one in outcomes.values()) else 0


def _parser(micros: Mapping[str, Micro]) -> argparse.ArgumentParser:
    listed = "\n".join(
        f"  {name:<10}{one.summary}\n{'':12}python {shlex.join(one.command(quick=False))}"
        for name, one in micros.items()
    )

    def names(text: str) -> list[str]:
        asked = text.split(",")
        if unknown := [name for name in asked if name not in micros]:
            known = ", ".join(micros)
            raise argparse.ArgumentTypeError(f"there is no {unknown[0]!r}; choose from {known}")
        return asked

    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.micro",
        description=f"Run the benchmarks that need no server and no model:\n\n{listed}",
        epilog=COMMENT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--only", type=names, default=list(micros), metavar="NAME[,NAME...]", help="these alone"
    )
    parser.add_argument("--quick", action="store_true", help="smaller sizes: a look, not a result")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers there too")
    return parser


def run_all(micros: Mapping[str, Micro], quick: bool, console: Console) -> dict[str, Outcome]:
    """One after the other; one that fails does not keep the next from running."""
    outcomes = {}
    with (
        progress_bars(console) as progress,
        tempfile.TemporaryDirectory(prefix="micro-") as folder,
    ):
        for name, micro in micros.items():
            task = progress.add_task(f"{name:<10}", total=None)
            file = Path(folder) / f"{name}.json"
            begun = time.monotonic()
            try:
                content = run_for_json(
                    (*micro.command(quick), "--json", str(file)),
                    file,
                    partial(show_steps, progress, task),
                ).content
                failed = False
            except ChildFailed as failure:
                content, failed = {"error": str(failure)}, True
            outcomes[name] = Outcome(micro, content, time.monotonic() - begun, failed)
            progress.update(task, total=1, completed=0 if failed else 1)
            progress.stop_task(task)
    return outcomes


def summary(outcomes: Mapping[str, Outcome]) -> Table:
    """A few lines of each."""
    table = Table(header_style="dim", box=None, pad_edge=False)
    table.add_column("benchmark", no_wrap=True)
    table.add_column("what", no_wrap=True)
    table.add_column("came to")
    table.add_column("s", justify="right")
    for name, one in outcomes.items():
        rows = [("failed", "")] if one.failed else one.micro.findings(one.content)
        for number, (what, value) in enumerate(rows):
            first = (name, f"{one.seconds:.0f}") if number == 0 else ("", "")
            table.add_row(first[0], what, value, first[1])
    return table


if __name__ == "__main__":
    sys.exit(main())
