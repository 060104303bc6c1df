"""Carries out a plan: whose turn it is, and what is done in a turn.

Owns the order of turns, A B A B ..., and that each begins with a warm server and an empty cache.
"""

from __future__ import annotations

import datetime
import platform
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.progress import Progress

import sgl_vllm as sgl
from benchmarks.ab import result, servers
from benchmarks.ab.client import (
    ByNextTokens,
    Run,
    TimedVLLM,
    run_programs,
    unique_prompt_tokens,
)
from benchmarks.ab.plan import Plan
from benchmarks.ab.result import Comparison, Limits, Round
from benchmarks.ab.servers import Arm, Pool
from benchmarks.ab.variants import STOCK, Variant
from benchmarks.command import show_wait, versions
from sgl_vllm.server_process import read_counters, usable_cores


def compare(
    plan: Plan, pool: Pool, urls: Mapping[Arm, str] | None, progress: Progress
) -> Comparison:
    """Runs all rounds of all variants. ArmFailed or ServerFailed say which one could not."""
    rounds: dict[str, list[Round]] = {variant.name: [] for variant in plan.variants}
    parts: dict[str, str] = {}
    first_run: Run | None = None
    unique = 0
    warm: set[str] = set()
    for number in range(1, plan.rounds + 1):
        for variant in plan.variants:
            label = f"{plan.workload.name}, round {number} of {plan.rounds}, {variant.title}"
            task = progress.add_task(label, total=len(plan.items))
            on_wait = partial(show_wait, progress, task, label)
            settings = plan.settings_of(variant)
            with servers.serving(variant.arm, settings, urls, pool, on_wait) as (url, is_new):
                if is_new or variant.name not in warm:
                    progress.update(task, description=f"{label}: warm-up")
                    run_programs(
                        _program(plan, variant),
                        plan.warm_up_items,
                        url,
                        plan.concurrency,
                        options=variant.client,
                        fields=plan.workload.request_fields,
                    )
                    warm.add(variant.name)
                progress.update(task, description=label)
                done, run = take_turn(plan, variant, url, partial(progress.advance, task))
                rounds[variant.name].append(done)
                if variant.name == "sgl":
                    parts = servers.plugin_parts(url)
                if first_run is None:
                    first_run, unique = run, unique_prompt_tokens(run, url)
                    sequences = min(run.most_at_once, plan.max_num_seqs or run.most_at_once)
            progress.update(task, description=f"{label}: {done.figures.wall_s:.1f} s")
    assert first_run is not None
    stock = rounds[STOCK.name][0].figures
    compute_bound = result.is_compute_bound(sequences, on_cpu=servers.on_cpu())
    started_here = urls is None
    return Comparison(
        plan,
        rounds,
        limits=Limits(
            unique_prompt_tokens=unique,
            prompt_tokens=stock.prompt_tokens,
            output_tokens=stock.output_tokens,
            undecided_tokens=min(stock.output_tokens, _undecided_tokens(rounds["sgl"])),
            sequences_at_once=sequences,
            compute_bound=compute_bound if started_here else None,
        ),
        parts=parts,
        started_here=started_here,
        versions=versions("torch", "openai"),
        machine=_machine(),
        date=datetime.date.today().isoformat(),
    )


def take_turn(
    plan: Plan, variant: Variant, url: str, on_done: Callable[[], object]
) -> tuple[Round, Run]:
    """One round of one variant: from an empty cache, everything once."""
    before, steps_before = servers.begin_turn(url), servers.steps(url)
    cpu_before_s = servers.cpu_s(url)
    run = run_programs(
        _program(plan, variant),
        plan.items,
        url,
        plan.concurrency,
        on_done,
        options=variant.client,
        fields=plan.workload.request_fields,
        score=plan.workload.score,
        pauses=plan.workload.pauses,
        backend_class=_backend_class(plan, variant),
    )
    cpu_after_s = servers.cpu_s(url)
    server_cpu_s = None
    if cpu_before_s is not None and cpu_after_s is not None:
        server_cpu_s = cpu_after_s - cpu_before_s
    counted = read_counters(url) - before
    steps = {name: now - steps_before[name] for name, now in servers.steps(url).items()}
    figures = result.figures(run, counted, steps, server_cpu_s)
    return Round(figures, run.texts), run


def _undecided_tokens(rounds: Sequence[Round]) -> int:
    return result.median_figures([one.figures for one in rounds]).undecided_tokens


def _program(plan: Plan, variant: Variant) -> sgl.Program:
    on_stock = plan.workload.stock_program if variant.arm == "stock" else None
    return on_stock or plan.workload.program


def _backend_class(plan: Plan, variant: Variant) -> type[TimedVLLM]:
    on_stock = variant.arm == "stock"
    return ByNextTokens if on_stock and plan.workload.stock_by_next_tokens else TimedVLLM


def _machine() -> dict[str, Any]:
    """The one that the client runs on, which is the servers' too if they were started here."""
    accelerator = None
    if not servers.on_cpu():
        import torch

        accelerator = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {"processor": _processor(), "cores": usable_cores(), "accelerator": accelerator}


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
