"""What a step of the scheduler costs the processor, and what that means at a GPU's pace.

    python -m benchmarks.pace                                  # ten minutes
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
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar  # Any: JSON

from rich.console import Console
from rich.progress import Progress

from benchmarks.command import check_folders, positive, progress_bars, versions
from benchmarks.pace.vocabulary import DEMO, SIZES, TEKKEN, vocabulary
from benchmarks.simulate import silence_vllm

if TYPE_CHECKING:
    from benchmarks.pace.measure import PaceOn, StepCost

WORKLOADS = ("decoding", "chats", "json_schema", "json_regex", "tool_calls")
DEVICES = ("H100", "H200", "A10G", "T4", "spike")
PARTS = ("schedule", "bitmask", "update", "jump")
COST_HEADING = (
    "processor time, us: stock / plugin\n"
    f"{'workload':12}{'at':>4}{'a step':>15}{'ratio':>7}{'middle half':>13}{'a program':>18}"
    f"{'ratio':>7}" + "".join(f"{part:>15}" for part in PARTS)
)
PACE_HEADING = (
    "MODELLED: programs per second\n"
    f"{'workload':12}{'at':>4} {'device':8}{'':6}{'programs/s':>11}{'ratio':>7}{'ms a pass':>10}"
    f"{'waits':>7}{'passes':>8}{'full':>7}{'piecewise':>10}{'none':>6}{'added':>7}{'tokens':>9}"
    f"{'stale':>7}{'held':>6}"
)
_T = TypeVar("_T")


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        prog="python -m benchmarks.pace",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    found.add_argument(
        "--batches",
        type=_list_of(positive),
        default=[16, 64, 256],
        metavar="N,N",
        help="programs at a time (16,64,256)",
    )
    found.add_argument(
        "--workloads",
        type=_list_of(_one_of(WORKLOADS)),
        default=[*WORKLOADS],
        metavar="NAME,NAME",
        help="of " + ", ".join(WORKLOADS),
    )
    found.add_argument(
        "--rounds", type=int, default=20, metavar="N", help="of each arm; 0: no first table (20)"
    )
    found.add_argument(
        "--device", action="append", choices=DEVICES, help="modelled; repeat (spike)"
    )
    found.add_argument(
        "--programs", type=int, default=64, metavar="N", help="in a modelled run; 0: none (64)"
    )
    found.add_argument(
        "--longest-query",
        type=positive,
        default=1,
        metavar="TOKENS",
        help="longest row of a full graph for rows of any length (1: no such graphs)",
    )
    found.add_argument(
        "--noise", action="store_true", help="write any legal tokens instead of given texts"
    )
    found.add_argument(
        "--vocabulary",
        choices=SIZES,
        default=TEKKEN,
        help="Mistral's tekken of 131,072 tokens, or the shipped model's: demo, of 4,096, or "
        "padded to 152,064",
    )
    found.add_argument(
        "--plugin-config", type=json.loads, default={}, metavar="JSON", help="options of the plugin"
    )
    found.add_argument(
        "--quick", action="store_true", help="the smallest size: demo, batch 4, 2 rounds"
    )
    found.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there too")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    command = parser()
    arguments = command.parse_args(argv)
    try:
        check_folders(json=arguments.json, data=None)
    except ValueError as error:
        command.error(str(error))
    if arguments.quick:
        arguments.vocabulary, arguments.batches = DEMO, [4]
        arguments.rounds, arguments.programs = min(2, arguments.rounds), min(4, arguments.programs)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    silence_vllm()
    with progress_bars(Console(stderr=True, highlight=False)) as progress:
        costs, paces = _measure(arguments, progress)
    if arguments.json:
        arguments.json.write_text(json.dumps(_document(arguments, costs, paces), indent=2) + "\n")
    return 0


def _measure(
    arguments: argparse.Namespace, progress: Progress
) -> tuple[list[StepCost], list[PaceOn]]:
    from benchmarks.pace.measure import Setup, pace_on, step_cost

    setup = Setup(
        vocabulary(arguments.vocabulary),
        arguments.plugin_config,
        writes_text=not arguments.noise,
        longest_query=arguments.longest_query,
    )
    devices = arguments.device or ["spike"]
    costs: list[StepCost] = []
    paces: list[PaceOn] = []
    cases = [(name, batch) for name in arguments.workloads for batch in arguments.batches]
    if arguments.rounds > 0:
        print(COST_HEADING, flush=True)
        for name, batch in cases:
            task = progress.add_task(f"{name} at {batch}", total=arguments.rounds)
            advance = partial(progress.advance, task)
            costs.append(step_cost(setup, name, batch, arguments.rounds, advance))
            print(_cost_line(costs[-1]), flush=True)
    if arguments.programs > 0:
        print(PACE_HEADING, flush=True)
        for name, batch in cases:
            task = progress.add_task(f"{name} at {batch}, modelled", total=2 * len(devices))
            advance = partial(progress.advance, task)
            for pace in pace_on(setup, name, batch, devices, arguments.programs, advance):
                paces.append(pace)
                print(_pace_lines(pace), flush=True)
    return costs, paces


def _cost_line(cost: StepCost) -> str:
    stock, sgl = cost.arms["stock"], cost.arms["sgl"]
    low, high = cost.step.middle_half
    line = f"{cost.workload:12}{cost.batch:4}{_pair(stock.step_us, sgl.step_us):>15}"
    line += f"{cost.step.median:7.2f}{f'{low:.2f}-{high:.2f}':>13}"
    if stock.program_us and sgl.program_us and cost.program is not None:
        line += f"{_pair(stock.program_us, sgl.program_us):>18}{cost.program.median:7.2f}"
    else:
        line += " " * 25
    parts = (_pair(*(one.parts_us.get(part, 0.0) for one in (stock, sgl))) for part in PARTS)
    return line + "".join(f"{part:>15}" for part in parts)


def _pair(stock: float, sgl: float) -> str:
    return f"{stock:.0f} / {sgl:.0f}"


def _pace_lines(pace: PaceOn) -> str:
    return "\n".join(
        f"{pace.workload:12}{pace.batch:4} {pace.device:8}{arm:6}{run.programs_s:11.1f}"
        f"{'' if arm == 'stock' else f'{pace.ratio:.2f}':>7}{run.pass_ms:10.2f}{run.waited_ms:7.2f}"
        f"{run.passes:8}{run.full:7}{run.piecewise:10}{run.no_graph:6}{run.added:7}"
        f"{run.computed_tokens:9}{run.stale_tokens:7}{run.held_passes:6}"
        for arm, run in pace.arms.items()
    )


def _document(
    arguments: argparse.Namespace, costs: Sequence[StepCost], paces: Sequence[PaceOn]
) -> dict[str, Any]:
    from benchmarks.pace.devices import DEVICES as MODELLED

    return {
        "versions": versions(),
        "vocabulary": arguments.vocabulary,
        "writes": "noise" if arguments.noise else "text",
        "longest_query": arguments.longest_query,
        "plugin_config": arguments.plugin_config,
        "processor_time": [asdict(cost) for cost in costs],
        "modelled": [{**asdict(pace), "ratio": pace.ratio} for pace in paces],
        "modelled_devices": {
            name: asdict(MODELLED[name]) for name in dict.fromkeys(pace.device for pace in paces)
        },
    }


def _list_of(item: Callable[[str], _T]) -> Callable[[str], list[_T]]:
    def read(text: str) -> list[_T]:
        return [item(one) for one in text.split(",")]

    return read


def _one_of(names: Sequence[str]) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in names:
            raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(names)}")
        return text

    return read


if __name__ == "__main__":
    sys.exit(main())
