"""What one simulated run is asked and comes to, and what two runs come to beside each other: the
values, the tables and the JSON. Pure: no vLLM, and nothing is run here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.command import versions
from benchmarks.cost_model import CostModel
from benchmarks.medians import ARMS, Row, percentile, ratio
from benchmarks.traces import Reuse, Trace
from tools.engine_harness.settings import SGL, EngineSettings

PERCENTILES = {"p50": 50, "p90": 90, "p99": 99}
OF_CALLS_OR_PROGRAMS = ("waits_s", "program_times_s")

# What the table shows: the name in the JSON, the words, the format, and which way is better:
# 1 if more is, -1 if less is, 0 if neither.
ROWS: tuple[Row, ...] = (
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


@dataclass(frozen=True, slots=True)
class Result:
    """What a run came to. Tokens are counts, times are simulated, except for `step_cpu_us_mean`.

    Attributes:
        hit_rate: cached / all prompt tokens, at each call's first admission.
        ttft_mean_s, ttft_p50_s, ttft_p99_s, ttft_p999_s: from a call's arrival to its first reply
            token.
        max_wait_s: the longest time from an arrival to its admission.
        max_passes: the most calls that came later than one call and were admitted in a step
            before the one that admitted it.
        computed_prompt_tokens: also counts again what was computed again after a preemption.
        throughput_requests_s: calls ended per second, from the first arrival to the last end.
        steps: forward passes.
        copied_blocks: blocks copied because a hit ended inside them. The cost model takes them
            as free.
        step_cpu_us_mean: real CPU time of the scheduler for one pass, in microseconds. The only
            value that differs from run to run.
        parts: for the plugin, each part "on" or why it is off.
        waits_s: of each call, by its request id, from its arrival to its admission. The id names
            program and call: it is the same in every run of a trace.
        program_times_s: of each program, by its index, for how long any of its calls waited or ran:
            the time from its first call to its last answer, less that of tools and people.
    """

    hit_rate: float
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    ttft_p999_s: float
    max_wait_s: float
    max_passes: int
    computed_prompt_tokens: int
    cached_prompt_tokens: int
    prompt_tokens: int
    throughput_requests_s: float
    requests: int
    steps: int
    preemptions: int
    copied_blocks: int
    step_cpu_us_mean: float
    parts: Mapping[str, str]
    waits_s: Mapping[str, float] = field(repr=False)
    program_times_s: Mapping[int, float] = field(repr=False)


@dataclass(frozen=True, slots=True)
class Combination:
    """One point of the grid: a policy of the plugin, a cache size and a load, each as it was given.

    Of `cache_tokens` and `cache_fraction` one is None. `load` is None where the trace's own arrival
    times count, or a number of programs at a time.
    """

    policy: str
    cache_tokens: int | None
    cache_fraction: float | None
    load: float | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """What one combination came to: a result for "stock", for "sgl", or for both.

    `settings` are the plugin's; stock's differ only in having no plugin. `concurrency` is the
    number of programs at a time, None for an open loop. `alone` is stock's with one program at a
    time and a cache for everything, None if that was not asked for. A program is starved if one of
    its calls waited for more than `starved_s` for its admission.
    """

    combination: Combination
    settings: EngineSettings
    reuse: Reuse
    concurrency: int | None
    results: Mapping[str, Result]
    starved_s: float
    alone: Result | None = None

    @property
    def cache_share(self) -> float:
        """The cache's size as a share of the working set."""
        return self.settings.cache_tokens / self.reuse.working_set_tokens

    @property
    def max_extra_wait_s(self) -> float | None:
        """The most that any one call waited longer for its admission with the plugin than the same
        call with stock; 0 if none did, None without both.

        With programs a call's arrival depends on the run, so waits are compared, not admissions.
        """
        if len(self.results) < 2:
            return None
        stock, sgl = (self.results[arm].waits_s for arm in ARMS)
        return max([0.0, *(wait_s - stock[call] for call, wait_s in sgl.items() if call in stock)])

    def numbers(self, arm: str) -> dict[str, Any]:
        """All of an arm that goes into the JSON, and by the same names into the tables."""
        result = self.results[arm]
        numbers = {
            one.name: getattr(result, one.name)
            for one in dataclasses.fields(Result)
            if one.name not in OF_CALLS_OR_PROGRAMS
        }
        numbers["best_hit_rate"] = self.reuse.best_hit_rate
        numbers["recomputed_prompt_tokens"] = (
            result.computed_prompt_tokens - self.reuse.must_compute_tokens
        )
        times = [*result.program_times_s.values()]
        for name, percent in PERCENTILES.items():
            numbers[f"program_time_{name}_s"] = percentile(times, percent)
        if self.alone is not None:
            slowdowns = [
                time_s / self.alone.program_times_s[program]
                for program, time_s in result.program_times_s.items()
            ]
            for name, percent in PERCENTILES.items():
                numbers[f"slowdown_{name}"] = percentile(slowdowns, percent)
        starved = {
            call.split(".")[0] for call, wait_s in result.waits_s.items() if wait_s > self.starved_s
        }
        numbers["starved_programs"] = len(starved)
        if arm == SGL and self.max_extra_wait_s is not None:
            numbers["max_extra_wait_s"] = self.max_extra_wait_s
        return numbers

    def ratio(self, name: str, better: int) -> float | None:
        """Above 1 is better for the plugin, always; None where there is nothing to divide.

        Args:
            better: 1 if more is better, -1 if less is, 0 if neither.
        """
        if len(self.results) < 2 or not better:  # not all that has no ratio is a number of both
            return None
        stock, sgl = (self.numbers(arm).get(name) for arm in ARMS)
        return None if stock is None or sgl is None else ratio(float(stock), float(sgl), better)


def table(trace: Trace, comparison: Comparison) -> str:
    """One comparison as text, a row for each of `ROWS`."""
    arms = comparison.results
    lines = [
        *_heading(trace, comparison),
        f"{'':32}" + "".join(f"{arm:>14}" for arm in arms) + f"{'ratio' * (len(arms) > 1):>9}",
    ]
    numbers = {arm: comparison.numbers(arm) for arm in arms}
    for name, text, form, better in ROWS:
        if any(name in one for one in numbers.values()):
            cells = "".join(f"{_format(one.get(name), form):>14}" for one in numbers.values())
            lines.append(f"{text:32}{cells}{_format(comparison.ratio(name, better), '9.3f')}")
    if len(arms) > 1:
        lines += ["", "ratio: above 1 is better for the plugin"]
    return "\n".join(line.rstrip() for line in lines)


def grid_table(trace: Trace, comparisons: Sequence[Comparison]) -> str:
    """All comparisons as text, a row for each."""
    first = comparisons[0]
    lines = [*_heading(trace, first), *_aligned(comparisons, _of_calls(first))]
    if first.alone is not None:
        lines += ["", *_aligned(comparisons, _of_programs(first))]
    if len(first.results) > 1:
        lines += ["", "x: a ratio, above 1 is better for the plugin; waits and passes: its own"]
    return "\n".join(lines)


def _heading(trace: Trace, comparison: Comparison) -> list[str]:
    reuse, settings = comparison.reuse, comparison.settings
    parts = comparison.results[SGL].parts if SGL in comparison.results else {}
    return [
        f"{trace.name}: {trace.num_calls:,} calls of {len(trace.programs):,} programs, "
        f"{reuse.prompt_tokens:,} prompt tokens, working set {reuse.working_set_tokens:,}",
        f"cache: {settings.cache_tokens:,} tokens in blocks of {settings.block_size} "
        f"({comparison.cache_share:.2f} of the working set); "
        f"best possible hit rate {reuse.best_hit_rate:.4f}",
        *(
            f"off in the plugin: {part} ({parts[part]})"
            for part in ("radix", "schedule")
            if parts.get(part, "on") != "on"
        ),
        "",
    ]


_Columns = dict[str, Callable[[Comparison], str]]
"""Cells by heading."""


def _aligned(comparisons: Sequence[Comparison], columns: _Columns) -> list[str]:
    first = comparisons[0]
    named: _Columns = {"cache": lambda one: f"{one.cache_share:.3g}"}
    if first.combination.load is not None:
        named["load"] = lambda one: f"{one.combination.load:g}"
    if SGL in first.results:
        named["policy"] = lambda one: one.combination.policy
    named |= columns
    rows = [[*named], *([cell(one) for cell in named.values()] for one in comparisons)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True))
        for row in rows
    ]


def _number(arm: str, name: str, form: str) -> Callable[[Comparison], str]:
    return lambda comparison: _format(comparison.numbers(arm)[name], form)


def _times(name: str, better: int = -1) -> Callable[[Comparison], str]:
    return lambda comparison: f"{_format(comparison.ratio(name, better), '.3f')}x"


def _of_calls(first: Comparison) -> _Columns:
    """Ratios if there are two arms, else that arm's numbers."""
    arms = [*first.results]
    columns = {f"hits, {arm}": _number(arm, "hit_rate", ".4f") for arm in arms}
    if len(arms) > 1:
        columns["computed"] = _times("computed_prompt_tokens")
        columns["requests/s"] = _times("throughput_requests_s", 1)
        for name in ("p50", "p99", "p999"):
            columns[f"TTFT {name}"] = _times(f"ttft_{name}_s")
    else:
        columns["computed"] = _number(arms[0], "computed_prompt_tokens", ",d")
        columns["requests/s"] = _number(arms[0], "throughput_requests_s", ".3f")
        for name in ("p50", "p99", "p999"):
            columns[f"TTFT {name}, s"] = _number(arms[0], f"ttft_{name}_s", ".3f")
    columns["longest wait, s"] = _number(arms[-1], "max_wait_s", ".2f")
    if len(arms) > 1:
        columns["extra, s"] = _number(SGL, "max_extra_wait_s", ".2f")
    columns["passes"] = _number(arms[-1], "max_passes", "d")
    return columns


def _of_programs(first: Comparison) -> _Columns:
    """Tokens computed again as a share of those that are new; times and slowdowns of programs."""

    def again(arm: str) -> Callable[[Comparison], str]:
        return lambda one: _format(
            one.numbers(arm)["recomputed_prompt_tokens"] / one.reuse.must_compute_tokens, ".3f"
        )

    arms = [*first.results]
    columns = {f"again / new, {arm}": again(arm) for arm in arms}
    if len(arms) > 1:
        columns |= {f"time {name}": _times(f"program_time_{name}_s") for name in PERCENTILES}
    for name in PERCENTILES:
        for arm in arms:
            columns[f"slowdown {name}, {arm}"] = _number(arm, f"slowdown_{name}", ".2f")
    return columns | {f"starved, {arm}": _number(arm, "starved_programs", "d") for arm in arms}


def _format(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


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
        "arguments": {
            name: value if isinstance(value, str | int | float | list | None) else str(value)
            for name, value in {**arguments, **combination}.items()
        },
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
