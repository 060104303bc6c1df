"""Results of simulated runs as text and as JSON.

Owns the table of one comparison, the table of a grid, and the JSON document. Runs nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from benchmarks.comparison import PERCENTILES, Comparison
from benchmarks.cost_model import CostModel
from benchmarks.traces import Reuse, Trace
from tools.engine_harness.settings import SGL, STOCK

# What the table shows: the name in the JSON, the words, the format, and which way is better:
# 1 if more is, -1 if less is, 0 if neither.
ROWS: tuple[tuple[str, str, str, int], ...] = (
    ("hit_rate", "hit rate", ".4f", 1),
    ("cached_prompt_tokens", "prompt tokens from the cache", ",d", 1),
    ("computed_prompt_tokens", "prompt tokens computed", ",d", -1),
    ("recomputed_prompt_tokens", "of these, not for the first time", ",d", -1),
    ("throughput_requests_s", "requests/s", ".3f", 1),
    ("ttft_mean_s", "time to first token, mean, s", ".3f", -1),
    ("ttft_p50_s", "p50, s", ".3f", -1),
    ("ttft_p99_s", "p99, s", ".3f", -1),
    ("ttft_p999_s", "p99.9, s", ".3f", -1),
    ("program_time_p50_s", "program time, p50, s", ".3f", -1),
    ("program_time_p90_s", "p90, s", ".3f", -1),
    ("program_time_p99_s", "p99, s", ".3f", -1),
    ("slowdown_p50", "slowdown, p50", ".2f", -1),
    ("slowdown_p90", "p90", ".2f", -1),
    ("slowdown_p99", "p99", ".2f", -1),
    ("starved_programs", "programs starved", "d", 0),
    ("max_wait_s", "longest wait for admission, s", ".3f", -1),
    ("max_extra_wait_s", "most extra wait of one call, s", ".3f", 0),
    ("max_passes", "most times passed over", "d", 0),
    ("steps", "forward passes", ",d", -1),
    ("preemptions", "preemptions", ",d", 0),
    ("copied_blocks", "blocks copied", ",d", 0),
    ("step_cpu_us_mean", "scheduler CPU per pass, us", ".0f", -1),
)


def table(trace: Trace, comparison: Comparison) -> str:
    """One comparison as text, a row for each of `ROWS`."""
    settings, arms = comparison.settings, comparison.results
    lines = [
        asked(trace, comparison.reuse),
        f"cache: {settings.cache_tokens:,} tokens in blocks of {settings.block_size} "
        f"({comparison.cache_share:.2f} of the working set); "
        f"best possible hit rate {comparison.reuse.best_hit_rate:.4f}",
        *_parts_off(comparison),
        "",
        f"{'':32}" + "".join(f"{arm:>14}" for arm in arms) + f"{'ratio' * (len(arms) > 1):>9}",
    ]
    numbers = {arm: comparison.numbers(arm) for arm in arms}
    for name, text, form, better in ROWS:
        if not any(name in one for one in numbers.values()):
            continue
        times = comparison.ratio(name, better)
        cells = "".join(
            f"{format(one[name], form) if name in one else '':>14}" for one in numbers.values()
        )
        lines.append((f"{text:32}{cells}" + _format(times, "9.3f")).rstrip())
    if len(arms) > 1:
        lines += ["", "ratio: above 1 is better for the plugin"]
    return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class _Column:
    """A column of the grid's table: two lines of heading, its width, and a row's cell."""

    group: str
    heading: str
    width: int
    cell: Callable[[Comparison], str]


def grid_table(trace: Trace, comparisons: Sequence[Comparison]) -> str:
    """All comparisons as text, a row for each; those of another load or cache size stand apart."""
    first = comparisons[0]
    lines = [
        asked(trace, first.reuse),
        f"cache: in blocks of {first.settings.block_size}, as a share of the working set; "
        f"best possible hit rate {first.reuse.best_hit_rate:.4f}",
        *_parts_off(first),
        "",
        *_rows(comparisons, _call_columns(comparisons)),
    ]
    if first.alone is not None:
        lines += ["", *_rows(comparisons, _program_columns(comparisons))]
    if len(first.results) > 1:
        lines += ["", "ratios: above 1 is better for the plugin; waits and passes: the plugin's"]
    return "\n".join(lines)


def _rows(comparisons: Sequence[Comparison], of_results: Sequence[_Column]) -> list[str]:
    """Two lines of headings, and the rows."""
    columns = [*_combination_columns(comparisons), *of_results]
    groups = headings = ""
    for index, column in enumerate(columns):
        headings += f"{column.heading:>{column.width}}"
        if column.group and (not index or columns[index - 1].group != column.group):
            # Over the first of its columns, and to the left edge of that column's heading.
            groups = groups.ljust(len(headings) - len(column.heading)) + column.group
    lines = [groups, headings]
    before = comparisons[0].combination
    for comparison in comparisons:
        here = comparison.combination
        if dataclasses.replace(here, policy=before.policy) != before:
            lines.append("")
        before = here
        lines.append("".join(f"{column.cell(comparison):>{column.width}}" for column in columns))
    return lines


def _number(arm: str, name: str, form: str) -> Callable[[Comparison], str]:
    return lambda comparison: _format(comparison.numbers(arm)[name], form)


def _ratio(name: str, better: int) -> Callable[[Comparison], str]:
    return lambda comparison: _format(comparison.ratio(name, better), ".3f")


def _combination_columns(comparisons: Sequence[Comparison]) -> list[_Column]:
    columns = [_Column("", "cache", 7, lambda one: f"{one.cache_share:.3g}")]
    if comparisons[0].combination.load is not None:
        columns.append(_Column("", "load", 6, lambda one: f"{one.combination.load:g}"))
    if SGL in comparisons[0].results:
        columns.append(_Column("", "policy", 12, lambda one: one.combination.policy))
    return columns


def _call_columns(comparisons: Sequence[Comparison]) -> list[_Column]:
    """Ratios if there are two arms, else that arm's numbers."""
    arms = tuple(comparisons[0].results)
    arm = SGL if SGL in arms else STOCK
    columns = [_Column("hit rate", one, 8, _number(one, "hit_rate", ".4f")) for one in arms]
    if len(arms) > 1:
        columns += [
            _Column("ratio", "computed", 11, _ratio("computed_prompt_tokens", -1)),
            _Column("ratio", "requests/s", 12, _ratio("throughput_requests_s", 1)),
            _Column("ratio of TTFT", "p50", 9, _ratio("ttft_p50_s", -1)),
            _Column("ratio of TTFT", "p99", 8, _ratio("ttft_p99_s", -1)),
            _Column("ratio of TTFT", "p99.9", 8, _ratio("ttft_p999_s", -1)),
        ]
    else:
        columns += [
            _Column("", "computed", 13, _number(arm, "computed_prompt_tokens", ",d")),
            _Column("", "requests/s", 12, _number(arm, "throughput_requests_s", ".3f")),
            _Column("TTFT, s", "p50", 9, _number(arm, "ttft_p50_s", ".3f")),
            _Column("TTFT, s", "p99", 8, _number(arm, "ttft_p99_s", ".3f")),
            _Column("TTFT, s", "p99.9", 8, _number(arm, "ttft_p999_s", ".3f")),
        ]
    columns.append(_Column("wait, s", "longest", 10, _number(arm, "max_wait_s", ".2f")))
    if len(arms) > 1:
        columns.append(_Column("wait, s", "extra", 8, _number(arm, "max_extra_wait_s", ".2f")))
    columns.append(_Column("", "passes", 8, _number(arm, "max_passes", "d")))
    return columns


def _program_columns(comparisons: Sequence[Comparison]) -> list[_Column]:
    """Tokens computed again as a share of those that are new; times and slowdowns of programs."""

    def recomputed(arm: str) -> Callable[[Comparison], str]:
        return lambda one: _format(
            one.numbers(arm)["recomputed_prompt_tokens"] / one.reuse.must_compute_tokens, ".3f"
        )

    arms = tuple(comparisons[0].results)
    columns = [_Column("again / new", one, 9, recomputed(one)) for one in arms]
    if len(arms) > 1:
        columns += [
            _Column("ratio of time", name, 8, _ratio(f"program_time_{name}_s", -1))
            for name, _ in PERCENTILES
        ]
    columns += [
        _Column(f"slowdown {name}", one, 9, _number(one, f"slowdown_{name}", ".2f"))
        for name, _ in PERCENTILES
        for one in arms
    ]
    columns += [_Column("starved", one, 7, _number(one, "starved_programs", "d")) for one in arms]
    return columns


def as_document(
    arguments: Mapping[str, Any], trace: Trace, cost: CostModel, comparison: Comparison
) -> dict[str, Any]:
    """All numbers of one comparison, and what it takes to get them again: `arguments` as given, but
    those that can have several values with the one of this comparison."""
    combination = dataclasses.asdict(comparison.combination)
    if arguments["policy"] is None:
        del combination["policy"]
    ratios = {name: comparison.ratio(name, better) for name, _, _, better in ROWS}
    return {
        "versions": versions(),
        "arguments": given({**arguments, **combination}),
        "engine": dataclasses.asdict(comparison.settings),
        "cost_model": dataclasses.asdict(cost),
        "trace": {
            "name": trace.name,
            "programs": len(trace.programs),
            "requests": trace.num_calls,
            "prompt_tokens": comparison.reuse.prompt_tokens,
            "new_prompt_tokens": comparison.reuse.must_compute_tokens,
            "working_set_tokens": comparison.reuse.working_set_tokens,
        },
        "arms": {arm: comparison.numbers(arm) for arm in comparison.results},
        "ratio": {name: value for name, value in ratios.items() if value is not None},
    }


def given(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments as JSON has them."""
    return {
        name: value if isinstance(value, str | int | float | list | None) else str(value)
        for name, value in arguments.items()
    }


def versions() -> dict[str, str | None]:
    return {name: _version(name) for name in ("sgl-vllm", "vllm")}


def asked(trace: Trace, reuse: Reuse) -> str:
    return (
        f"{trace.name}: {trace.num_calls:,} calls of {len(trace.programs):,} programs, "
        f"{reuse.prompt_tokens:,} prompt tokens, working set {reuse.working_set_tokens:,}"
    )


def _parts_off(comparison: Comparison) -> list[str]:
    parts = comparison.results[SGL].parts if SGL in comparison.results else {}
    return [
        f"off in the plugin: {part} ({reason})"
        for part, reason in parts.items()
        if reason != "on" and part in ("radix", "schedule")
    ]


def _format(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
