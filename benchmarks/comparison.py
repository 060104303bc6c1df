"""What one simulated run is asked and comes to, and what two runs come to beside each other.

Owns the values that pass between the simulator, its command, the tables and the picture. Pure: no
vLLM, and nothing is run here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.traces import Reuse
from tools.engine_harness.settings import SGL, STOCK, EngineSettings

ARMS = (STOCK, SGL)


def ratio(stock: float, sgl: float, better: int) -> float | None:
    """How much better the plugin is, above 1; None where there is nothing to divide.

    Args:
        better: 1 if more is better, -1 if less is, 0 if neither.
    """
    over, under = (sgl, stock) if better > 0 else (stock, sgl)
    return over / under if better and under else None


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
    number of programs at a time, None for an open loop.
    """

    combination: Combination
    settings: EngineSettings
    reuse: Reuse
    concurrency: int | None
    results: Mapping[str, Result]

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
        numbers = {
            one.name: getattr(self.results[arm], one.name)
            for one in dataclasses.fields(Result)
            if one.name != "waits_s"
        }
        numbers["best_hit_rate"] = self.reuse.best_hit_rate
        if arm == SGL and self.max_extra_wait_s is not None:
            numbers["max_extra_wait_s"] = self.max_extra_wait_s
        return numbers

    def ratio(self, name: str, better: int) -> float | None:
        """Above 1 is better for the plugin, always; None where there is nothing to divide.

        Args:
            better: 1 if more is better, -1 if less is, 0 if neither.
        """
        if len(self.results) < 2 or not better:  # not all that has no ratio is a result of an arm
            return None
        stock, sgl = (float(getattr(self.results[arm], name)) for arm in ARMS)
        return ratio(stock, sgl, better)
