"""What a simulated run comes to, and what two runs come to beside each other: the values, the table
and the JSON. Pure: no vLLM, and nothing is run here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console

from benchmarks.arms import ARMS, Row, percentile, ratio
from benchmarks.command import table_of_arms, versions
from benchmarks.cost_model import CostModel
from benchmarks.engine_settings import SGL, STOCK, EngineSettings
from benchmarks.traces import Reuse, Trace

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
class Comparison:
    """A result for "stock", for "sgl", or for both.

    `settings` are the plugin's; stock's differ only in having no plugin.
    """

    trace: Trace
    reuse: Reuse
    settings: EngineSettings
    results: Mapping[str, Result]

    def max_extra_wait_s(self) -> float:
        """The most that any one call waited longer for its admission with the plugin than the same
        call with stock; 0 if none did.

        With programs a call's arrival depends on the run, so waits are compared, not admissions.
        """
        stock, sgl = (self.results[arm].waits_s for arm in ARMS)
        return max([0.0, *(wait_s - stock[call] for call, wait_s in sgl.items() if call in stock)])

    def numbers(self, arm: str) -> dict[str, Any]:
        """All of an arm that goes into the JSON, and by the same names into the table."""
        result = self.results[arm]
        numbers = {
            one.name: getattr(result, one.name)
            for one in dataclasses.fields(Result)
            if one.name not in ("waits_s", "program_times_s")
        }
        numbers["best_hit_rate"] = self.reuse.best_hit_rate
        numbers["recomputed_prompt_tokens"] = (
            result.computed_prompt_tokens - self.reuse.must_compute_tokens
        )
        times = [*result.program_times_s.values()]
        for percent in (50, 90, 99):
            numbers[f"program_time_p{percent}_s"] = percentile(times, percent)
        if arm == SGL and STOCK in self.results:
            numbers["max_extra_wait_s"] = self.max_extra_wait_s()
        return numbers

    def ratios(self) -> dict[str, float]:
        """By name, above 1 if the plugin is better; nothing of one arm alone."""
        if len(self.results) < 2:
            return {}
        stock, sgl = (self.numbers(arm) for arm in ARMS)
        pairs = {
            name: ratio(stock[name], sgl[name], better)
            for name, _, _, better in ROWS
            if name in stock
        }
        return {name: times for name, times in pairs.items() if times is not None}

    def show(self, console: Console) -> None:
        """A heading, and a table with a row for each of `ROWS`."""
        trace, reuse, settings = self.trace, self.reuse, self.settings
        parts = self.results[SGL].parts if SGL in self.results else {}
        share = settings.cache_tokens / reuse.working_set_tokens
        lines = (
            f"{trace.name}: {trace.num_calls:,} calls of {len(trace.programs):,} programs, "
            f"{reuse.prompt_tokens:,} prompt tokens, working set {reuse.working_set_tokens:,}",
            f"cache: {settings.cache_tokens:,} tokens in blocks of {settings.block_size} "
            f"({share:.2f} of the working set); best possible hit rate {reuse.best_hit_rate:.4f}",
            *(
                f"off in the plugin: {part} ({parts[part]})"
                for part in ("radix", "schedule")
                if parts.get(part, "on") != "on"
            ),
        )
        console.print(*lines, "", sep="\n")
        console.print(table_of_arms(ROWS, {arm: self.numbers(arm) for arm in self.results}))
        if len(self.results) > 1:
            console.print("\nratio: above 1 is better for the plugin")

    def as_document(self, arguments: Mapping[str, Any], cost: CostModel) -> dict[str, Any]:
        """All numbers, and what it takes to get them again."""
        return {
            "versions": versions(),
            "arguments": dict(arguments),
            "engine": dataclasses.asdict(self.settings),
            "cost_model": dataclasses.asdict(cost),
            "trace": {
                "name": self.trace.name,
                "programs": len(self.trace.programs),
                "requests": self.trace.num_calls,
                "prompt_tokens": self.reuse.prompt_tokens,
                "new_prompt_tokens": self.reuse.must_compute_tokens,
                "working_set_tokens": self.reuse.working_set_tokens,
            },
            "arms": {arm: self.numbers(arm) for arm in self.results},
            "ratio": self.ratios(),
        }
