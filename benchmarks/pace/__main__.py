"""What a step of the scheduler costs the processor, and what that means at a GPU's pace.

    python -m benchmarks.pace                                  # half an hour
    python -m benchmarks.pace --workloads decoding --batches 16 --rounds 20
    python -m benchmarks.pace --device H100 --device T4 --json pace.json
    python -m benchmarks.pace --quick                          # the smallest size, half a minute

Needs no GPU. vLLM's own engine-core loop runs its real schedulers, stock and with the plugin, over
a runner without a model; grammars and a vocabulary of 131,072 tokens are real. Both arms write the
same text of each program.

The first table has the processor time of a step in microseconds, measured, stock and plugin
alternating in one process: medians over rounds. A ratio is the plugin's time over stock's, with the
middle half of the rounds. Of structured output the arms take different steps, so the ratio for a
program counts there. "jump" is part of the others.

The second table shows programs per second on a virtual clock, which adds the measured time of the
scheduler to a MODELLED device. Passes are counted by the CUDA graph that vLLM's rule gives them:
"full" if every row decodes one token, else "piecewise", or "none" above 512 tokens. "added" are
rows added to the batch. The signs of these figures are worth more than their size: see
docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any  # Any: JSON

from rich.console import Console
from rich.progress import Progress

from benchmarks.command import parser_of, positive, progress_bars, versions, write_json
from benchmarks.simulate import silence_vllm

if TYPE_CHECKING:
    from benchmarks.pace.measure import Case

WORKLOADS = ("decoding", "chats", "json_schema", "json_regex", "tool_calls")
DEVICES = ("H100", "H200", "A10G", "T4", "spike")

Column = tuple[str, str, str]
"""Of a table: its heading, the figure, and the format, with the width."""

TIMES: tuple[Column, ...] = (
    ("a step", "step_us", "8.0f"),
    ("ratio", "step_ratio", "7.2f"),
    ("from", "step_ratio_low", "6.2f"),
    ("to", "step_ratio_high", "6.2f"),
    ("a program", "program_us", "11.0f"),
    ("ratio", "program_ratio", "7.2f"),
    ("schedule", "schedule_us", "10.0f"),
    ("bitmask", "bitmask_us", "9.0f"),
    ("update", "update_us", "8.0f"),
    ("jump", "jump_us", "6.0f"),
    ("arrival", "arrival_us", "9.0f"),
)
PACES: tuple[Column, ...] = (
    ("programs/s", "programs_s", "12.1f"),
    ("ratio", "ratio", "7.2f"),
    ("ms a pass", "pass_ms", "11.2f"),
    ("waits", "waited_ms", "7.2f"),
    ("passes", "passes", "8d"),
    ("full", "full", "7d"),
    ("piecewise", "piecewise", "11d"),
    ("none", "none", "6d"),
    ("added", "added", "7d"),
    ("tokens", "computed_tokens", "9d"),
    ("copies", "copies", "7d"),
    ("stale", "stale_tokens", "7d"),
    ("held", "held_passes", "6d"),
)


def parser() -> argparse.ArgumentParser:
    found = parser_of("pace", __doc__)
    add, batches = found.add_argument, [16, 64, 256]
    add("--batches", type=positive, nargs="+", default=batches, help="programs at a time")
    add("--workloads", nargs="+", choices=WORKLOADS, default=[*WORKLOADS], help="only these")
    add("--rounds", type=int, default=20, metavar="N", help="of each arm; 0: no first table (20)")
    add("--device", action="append", choices=DEVICES, help="modelled; repeat (spike)")
    add("--programs", type=int, default=64, metavar="N", help="in a modelled run; 0: none (64)")
    add(
        "--longest-query",
        type=positive,
        default=1,
        metavar="TOKENS",
        help="longest row of a full graph for rows of any length (1: no such graphs)",
    )
    add("--noise", action="store_true", help="write what models of random weights do, not texts")
    add("--plugin-config", type=json.loads, default={}, metavar="JSON", help="the plugin's options")
    add("--quick", action="store_true", help="the smallest size: the demo's vocabulary, batch 4")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    if arguments.quick:
        arguments.batches = [4]
        arguments.rounds, arguments.programs = min(2, arguments.rounds), min(4, arguments.programs)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    silence_vllm()
    with (
        progress_bars(Console(stderr=True, highlight=False)) as progress,
        TemporaryDirectory() as folder,
    ):
        costs, paces = _measure(arguments, Path(folder), progress)
    write_json(arguments.json, _document(arguments, costs, paces))
    return 0


def _measure(
    arguments: argparse.Namespace, folder: Path, progress: Progress
) -> tuple[list[Case], list[Case]]:
    """Shows each case once it is measured."""
    from benchmarks.pace.measure import Setup, pace_on, step_cost
    from benchmarks.pace.workloads import DEMO, mistral

    vocabulary = DEMO if arguments.quick else mistral(folder)
    setup = Setup(vocabulary, arguments.plugin_config, arguments.longest_query, arguments.noise)
    devices, rounds = arguments.device or ["spike"], arguments.rounds

    def bars(total: int) -> Iterator[tuple[str, int, Callable[[], None]]]:
        for name in arguments.workloads if total else ():
            for batch in arguments.batches:
                task = progress.add_task(f"{name} at {batch}", total=total)
                yield name, batch, partial(progress.advance, task)

    costs = (step_cost(setup, name, at, rounds, step) for name, at, step in bars(rounds))
    paces = (
        case
        for name, at, step in bars(2 * len(devices) if arguments.programs else 0)
        for case in pace_on(setup, name, at, devices, arguments.programs, step)
    )
    return (
        _shown("processor time, us", TIMES, costs),
        _shown("MODELLED: programs per second", PACES, paces),
    )


def _shown(title: str, columns: Sequence[Column], cases: Iterable[Case]) -> list[Case]:
    """Prints a line for each arm of each case, under a heading."""
    shown: list[Case] = []
    for case in cases:
        if not shown:
            headings = (f"{text:>{_width(form)}}" for text, _, form in columns)
            print(f"{title}\n{'workload':12}{'at':>4} {'device':8}{'':6}" + "".join(headings))
        shown.append(case)
        for arm, figures in case.arms.items():
            cells = (
                format(figures[name], form) if name in figures else " " * _width(form)
                for _, name, form in columns
            )
            line = f"{case.workload:12}{case.batch:4} {case.device or '':8}{arm:6}{''.join(cells)}"
            print(line.rstrip(), flush=True)
    return shown


def _width(form: str) -> int:
    return int(form.partition(".")[0].rstrip("d"))


def _document(
    arguments: argparse.Namespace, costs: Sequence[Case], paces: Sequence[Case]
) -> dict[str, Any]:
    from benchmarks.pace.devices import DEVICES as MODELLED

    used = dict.fromkeys(case.device for case in paces if case.device)
    return {
        "versions": versions(),
        "vocabulary": "demo" if arguments.quick else "tekken",
        "writes": "noise" if arguments.noise else "text",
        "longest_query": arguments.longest_query,
        "plugin_config": arguments.plugin_config,
        "processor_time": [asdict(case) for case in costs],
        "modelled": [asdict(case) for case in paces],
        "modelled_devices": {device: asdict(MODELLED[device]) for device in used},
    }


if __name__ == "__main__":
    sys.exit(main())
