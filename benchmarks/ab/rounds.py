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
from benchmarks.ab.workloads.base import Item
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
                    _run(plan, variant, url, plan.warm_up_items)
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
    sgl = result.median_figures([one.figures for one in rounds["sgl"]])
    compute_bound = result.is_compute_bound(sequences, on_cpu=servers.on_cpu())
    started_here = urls is None
    return Comparison(
        plan,
        rounds,
        limits=Limits(
            unique_prompt_tokens=unique,
            prompt_tokens=stock.prompt_tokens,
            output_tokens=stock.output_tokens,
            undecided_tokens=min(stock.output_tokens, sgl.undecided_tokens),
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
    run = _run(plan, variant, url, plan.items, on_done)
    cpu_after_s = servers.cpu_s(url)
    server_cpu_s = None
    if cpu_before_s is not None and cpu_after_s is not None:
        server_cpu_s = cpu_after_s - cpu_before_s
    counted = read_counters(url) - before
    steps = {name: now - steps_before[name] for name, now in servers.steps(url).items()}
    figures = result.figures(run, counted, steps, server_cpu_s)
    return Round(figures, run.texts), run


def _run(
    plan: Plan,
    variant: Variant,
    url: str,
    items: Sequence[Item],
    on_done: Callable[[], object] = lambda: None,
) -> Run:
    workload = plan.workload
    is_stock = variant.arm == "stock"
    on_stock = workload.stock_program if is_stock else None
    return run_programs(
        on_stock or workload.program,
        items,
        url,
        plan.concurrency,
        on_done,
        options=variant.client,
        fields=workload.request_fields,
        score=workload.score,
        pauses=workload.pauses,
        backend_class=ByNextTokens if is_stock and workload.stock_by_next_tokens else TimedVLLM,
    )


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
