"""A comparison as a table, for people."""

from __future__ import annotations

from dataclasses import asdict
from itertools import islice

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from benchmarks.ab.result import MAX_DIFFERENCES_SHOWN, PASSES_PER_REQUEST, Comparison
from benchmarks.arms import ARMS, Row
from benchmarks.command import figures_table, table_of_arms

ROWS: tuple[Row, ...] = (
    ("throughput_programs_s", "programs/s", ".2f", 1),
    ("output_tokens_s", "output tokens/s", ".1f", 1),
    ("latency_p50_s", "latency of a program, p50, s", ".3f", -1),
    ("latency_p99_s", "p99, s", ".3f", -1),
    ("ttft_p50_s", "time to first token, p50, s", ".3f", -1),
    ("ttft_p99_s", "p99, s", ".3f", -1),
    ("forward_passes", "forward passes", ",d", -1),
    ("prompt_tokens", "prompt tokens", ",d", -1),
    ("computed_prompt_tokens", "prompt tokens computed", ",d", -1),
    ("cached_prompt_tokens", "prompt tokens from the cache", ",d", 1),
    ("forced_tokens", "output tokens forced", ",d", 0),
    ("undecided_tokens", "output tokens undecided", ",d", 0),
    ("preemptions", "preemptions", ",d", 0),
    ("score", "score", ".3f", 0),
    ("server_cpu_s", "processor time of the server, s", ".2f", -1),
    ("client_cpu_s", "processor time of the client, s", ".2f", 0),
    ("schedule_s", "steps: scheduling, s", ".2f", 0),
    ("execute_s", "starting passes, s", ".2f", 0),
    ("sample_s", "starting sampling, s", ".2f", 0),
    ("wait_s", "waiting for tokens, s", ".2f", 0),
    ("update_s", "updating requests, s", ".2f", 0),
    ("full_graph_passes", "passes in a full CUDA graph", ",d", 0),
    ("piecewise_graph_passes", "passes in piecewise graphs", ",d", 0),
    ("no_graph_passes", "passes in no graph", ",d", 0),
)


def show(comparison: Comparison, console: Console) -> None:
    console.print(Group(_heading(comparison), _table(comparison), _verdict(comparison)))
    if comparison.ablations:
        console.print("", _table_of_ablations(comparison), sep="\n")


def _table(comparison: Comparison) -> Table:
    return table_of_arms(ROWS, {arm: asdict(comparison.median(arm)) for arm in ARMS})


def _heading(comparison: Comparison) -> Text:
    limits, plan = comparison.limits, comparison.plan
    bound = {None: "", True: ": compute-bound", False: ": not compute-bound"}[limits.compute_bound]
    flags = "server flags" if comparison.started_here else "server flags they should have"
    lines = (
        f"{plan.workload.name} on {plan.model}: {len(plan.items)} programs, "
        f"{'1 round' if plan.rounds == 1 else f'{plan.rounds} rounds, medians'}",
        f"limits: {limits.unique_prompt_tokens:,} of {limits.prompt_tokens:,} prompt tokens must "
        f"be computed (best hit rate {limits.best_hit_rate:.3f}), {limits.output_tokens:,} output "
        f"tokens, {limits.undecided_tokens:,} of them undecided; up to "
        f"{limits.sequences_at_once} requests at once{bound}",
        f"{flags}: {' '.join(plan.settings.args) or 'none'}",
        "plugin: " + "; ".join(f"{part} {state}" for part, state in comparison.parts.items()),
    )
    return Text("\n".join(lines) + "\n")


def _table_of_ablations(comparison: Comparison) -> Table:
    headings = ("programs/s", "of full", "passes", "tokens computed", "hit rate")
    table = figures_table("the plugin with", *headings)
    full = comparison.median("sgl")
    others = ((one.title, comparison.median(one.name)) for one in comparison.ablations)
    rows = [("everything", full), *others]
    for title, one in rows:
        table.add_row(
            title,
            f"{one.throughput_programs_s:.2f}",
            f"{one.throughput_programs_s / full.throughput_programs_s:.3f}",
            f"{one.forward_passes:,}",
            f"{one.computed_prompt_tokens:,}",
            f"{one.hit_rate:.3f}",
        )
    best = f"{comparison.limits.best_hit_rate:.3f}"
    unique = f"{comparison.limits.unique_prompt_tokens:,}"
    table.add_row("the best that is possible", "", "", "", unique, best, style="dim")
    return table


def _verdict(comparison: Comparison) -> Text:
    shown = Text()
    rounds = [one["throughput"] for one in comparison.ratios_of_rounds]
    known = [one for one in rounds if one is not None]
    if len(known) > 1:
        spread = f"{min(known):.3f} to {max(known):.3f}"
        shown.append(f"\nratio of programs/s, round by round: {spread}")
    shown.append("\nA ratio above 1 is better for the plugin.\n", "dim")
    for arm, passes in comparison.passes().items():
        shown.append(
            f"{arm}: {passes['forward_passes']:,} forward passes, at most {passes['most']:,} "
            f"(undecided tokens + {PASSES_PER_REQUEST} per request)\n",
            "green" if passes["within"] else "red",
        )
    compared, equal = comparison.same_output.values()
    style = "green" if equal == compared else "red"
    shown.append(f"same output: {equal} of {compared}", style)
    for one in islice(comparison.differences(), MAX_DIFFERENCES_SHOWN):
        shown.append(f"\nround {one.round_number}, program {one.item}:", "red")
        shown.append(f"\n  stock  …{one.stock!r}\n  sgl    …{one.sgl!r}")
    return shown
