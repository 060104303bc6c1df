"""Prompt tokens that are computed with recurrent layers, as the cache gets smaller.

    python -m benchmarks.states --jobs 2
    python -m benchmarks.states --quick
    python -m benchmarks.states --trace thinking_chat --model granite4 --cache-fraction 0.2

Runs traces through vLLM's scheduler and cache without a model (`simulator.py`), as stock with its
best setting for these models, `--prefix-match-unit 16`, and with the plugin. Blocks and states have
the proportions of two models. Texts, blocks, batches and the unit are an eighth as long as real
ones, so that a run takes seconds. The cache is a part of what all distinct prefixes take together
with one state for each call, but never less than the calls that run at a time hold.

Owns the command line and the table. The traces are `traces.py`'s and `session_model.py`'s.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from benchmarks import session_model, traces
from benchmarks.comparison import ARMS
from benchmarks.cost_model import CostModel
from benchmarks.simulate_grid import Run, run_all, silence_vllm
from benchmarks.traces import Reuse, Trace
from tools.engine_harness.settings import STOCK, EngineSettings

SCALE = Fraction(1, 8)
BATCH_TOKENS = 8192
MATCH_UNIT = 16


@dataclass(frozen=True, slots=True)
class Model:
    """The layout of a model: tokens per block, and how many blocks a state takes."""

    block_size: int
    num_recurrent_groups: int


@dataclass(frozen=True, slots=True)
class Workload:
    """How many calls a trace has, and how many of its programs run at a time."""

    num_calls: int
    concurrency: int


MODELS = {"qwen3_next": Model(544, 3), "granite4": Model(400, 9)}
"""As in the table of docs/layouts.md."""

WORKLOADS = {
    "chat": Workload(360, 12),
    "thinking_chat": Workload(360, 12),
    "long_chat": Workload(150, 8),
    "react": Workload(300, 12),
    "agent_sessions": Workload(360, 24),
    "tree_of_thought": Workload(234, 3),
    "fork_join": Workload(294, 4),
    "few_shot": Workload(480, 64),
    "tight_cache": Workload(360, 256),
}
FRACTIONS = (0.1, 0.2, 0.4, 0.8)
SEEDS = (0, 1, 2)
QUICK_SHARE = 0.2
"""With --quick the traces have this share of their calls."""

MAX_STATES = 3  # of a call, while it runs


@dataclass(frozen=True, slots=True)
class Row:
    """Prompt tokens of one trace, model and cache size, over all seeds.

    Attributes:
        unique: the least that any run computes.
        computed: by arm.
    """

    trace: str
    model: str
    cache_fraction: float
    unique: int
    computed: dict[str, int]


def make_trace(name: str, num_calls: int, seed: int) -> Trace:
    if name == session_model.NAME:
        return session_model.trace(num_calls, seed, SCALE)
    return traces.generate(name, num_calls, seed, SCALE)


def make_settings(
    trace: Trace, reuse: Reuse, model: Model, fraction: float, concurrency: int
) -> EngineSettings:
    """The engine with the plugin, with room for `fraction` of the trace's prefixes and states."""
    size = int(model.block_size * SCALE)
    num_groups = model.num_recurrent_groups
    all_blocks = -(-reuse.working_set_tokens // size) + num_groups * trace.num_calls
    longest = -(-trace.max_call_tokens // size) + MAX_STATES * num_groups
    mean = -(-reuse.prompt_tokens // trace.num_calls // size) + 2 * num_groups
    num_running = min(concurrency, 16)  # more than that wait
    return EngineSettings(
        num_blocks=max(int(fraction * all_blocks), 2 * longest, num_running * mean),
        block_size=size,
        max_model_len=trace.max_call_tokens + 1,
        max_num_seqs=64,
        max_num_batched_tokens=int(BATCH_TOKENS * SCALE),
        num_recurrent_groups=num_groups,
    )


def measure(
    trace_name: str,
    model_name: str,
    fractions: Sequence[float],
    seeds: Sequence[int],
    share: float = 1.0,
    jobs: int = 1,
    arms: Sequence[str] = ARMS,
) -> list[Row]:
    """One row for each cache size; `share` of the trace's calls."""
    workload = WORKLOADS[trace_name]
    num_calls = max(1, int(workload.num_calls * share))
    # A token of the scaled trace stands for several, each with a context as many times as long.
    cost = CostModel()
    cost = dataclasses.replace(cost, context_token_s=cost.context_token_s / float(SCALE))
    unique = 0
    computed: dict[tuple[float, str], int] = {}
    for seed in seeds:
        trace = make_trace(trace_name, num_calls, seed)
        reuse = traces.reuse(trace)
        unique += reuse.must_compute_tokens
        places = list(itertools.product(fractions, arms))
        runs = []
        for fraction, arm in places:
            settings = make_settings(
                trace, reuse, MODELS[model_name], fraction, workload.concurrency
            )
            if arm == STOCK:
                unit = int(MATCH_UNIT * SCALE)
                settings = dataclasses.replace(settings, prefix_match_unit=unit)
            runs.append(Run(arm, settings, cost, concurrency=workload.concurrency))
        for place, result in zip(places, run_all(trace, runs, jobs, lambda _: None), strict=True):
            computed[place] = computed.get(place, 0) + result.computed_prompt_tokens
    return [
        Row(trace_name, model_name, one, unique, {arm: computed[one, arm] for arm in arms})
        for one in fractions
    ]


def line(row: Row) -> str:
    """As a line of a Markdown table."""
    computed = " | ".join(f"{row.computed[arm]:,}" for arm in row.computed)
    return f"| {row.trace} | {row.model} | {row.cache_fraction:.0%} | {row.unique:,} | {computed} |"


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.states",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--trace", nargs="+", choices=WORKLOADS, default=list(WORKLOADS), help="default: all")
    add("--model", nargs="+", choices=MODELS, default=list(MODELS), help="default: all")
    add("--cache-fraction", nargs="+", type=float, default=FRACTIONS, metavar="F")
    add("--seed", nargs="+", type=int, default=SEEDS, metavar="N")
    add("--scheduler", choices=ARMS, help="only this one (default: both)")
    add("--quick", action="store_true", help="short traces, one seed, one cache size")
    add("--jobs", type=int, default=1, metavar="N", help="processes (default: 1)")
    add("--json", type=Path, metavar="FILE", help="write the numbers there too")
    return parser


def main(words: Sequence[str] | None = None) -> int:
    arguments = build_parser().parse_args(words)
    fractions, seeds, share = arguments.cache_fraction, arguments.seed, 1.0
    if arguments.quick:
        fractions, seeds, share = (0.2,), (0,), QUICK_SHARE
    arms = ARMS if arguments.scheduler is None else (arguments.scheduler,)
    silence_vllm()
    rows: list[Row] = []
    print(f"| trace | model | cache | unique | {' | '.join(arms)} |")
    print("|---|---|---:|---:|" + "---:|" * len(arms))
    for trace, model in itertools.product(arguments.trace, arguments.model):
        for row in measure(trace, model, fractions, seeds, share, arguments.jobs, arms):
            rows.append(row)
            print(line(row), flush=True)
    if arguments.json is not None:
        document = {"rows": [dataclasses.asdict(row) for row in rows]}
        arguments.json.write_text(json.dumps(document, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
