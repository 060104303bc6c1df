"""What one simulated run is asked and comes to, and what two runs come to beside each other.

Owns the values that pass between the simulator, its command, the tables and the picture. Pure: no
vLLM, and nothing is run here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.traces import Reuse
from tools.engine_harness.settings import SGL, STOCK, EngineSettings

ARMS = (STOCK, SGL)
PERCENTILES = (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))
OF_CALLS_OR_PROGRAMS = ("waits_s", "ttfts_s", "program_times_s")


def ratio(stock: float, sgl: float, better: int) -> float | None:
    """How much better the plugin is, above 1; None where there is nothing to divide.

    Args:
        better: 1 if more is better, -1 if less is, 0 if neither.
    """
    over, under = (sgl, stock) if better > 0 else (stock, sgl)
    return over / under if better and under else None


def percentile(values: Sequence[float], fraction: float) -> float:
    """The smallest of sorted `values` that at least this fraction of them does not exceed."""
    rank = -(-len(values) * fraction // 1)
    return values[max(0, int(rank) - 1)]


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
        ttfts_s: of each call, by its request id, from its arrival to its first reply token.
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
    ttfts_s: Mapping[str, float] = field(repr=False)
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
        times = sorted(result.program_times_s.values())
        numbers |= {
            f"program_time_{name}_s": percentile(times, share) for name, share in PERCENTILES
        }
        if self.alone is not None:
            slowdowns = sorted(
                time_s / self.alone.program_times_s[program]
                for program, time_s in result.program_times_s.items()
            )
            numbers |= {
                f"slowdown_{name}": percentile(slowdowns, share) for name, share in PERCENTILES
            }
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
