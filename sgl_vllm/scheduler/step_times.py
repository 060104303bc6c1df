"""Times the parts of an engine core's step, and counts its passes by their CUDA graph.

Owns which calls of vLLM's loop are a part. Does not own the counters (`stats.py`).

    schedule | execute | bitmask | sample | wait for the step before | update

What is in none of them is spent on requests and answers, or idle; bitmasks have a timer of their
own. Costs two microseconds a step.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any  # Any: arguments of vLLM's methods

from sgl_vllm.scheduler.stats import GraphPasses, StepTimes
from sgl_vllm.vllm_api.patching import wrap

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.outputs import ModelRunnerOutput

_PASSES = {"FULL": "full_graph_passes", "PIECEWISE": "piecewise_graph_passes"}


class StepTimer:
    """Times the steps of an engine from its construction on.

    Args:
        counts_graphs: whether vLLM tells the CUDA graph of each pass, by `--cudagraph-metrics`.
    """

    def __init__(self, engine: EngineCore, *, counts_graphs: bool) -> None:
        self._seconds: dict[str, float] = {}
        self._passes: dict[str, int] = {}
        self._counts_graphs = counts_graphs
        self._ended_s = time.monotonic()
        scheduler, executor = engine.scheduler, engine.model_executor
        self._time(scheduler, "schedule", "schedule_s")
        self._time(scheduler, "get_grammar_bitmask", "bitmask_s")
        self._time(executor, "execute_model", "execute_s")
        self._time(executor, "sample_tokens", "sample_s", waits=True)
        self._time(scheduler, "update_from_output", "update_s", waits=True)
        if counts_graphs:
            wrap(scheduler, "update_from_output")(self._count)

    @property
    def times(self) -> StepTimes:
        return StepTimes(**{name: s for name, s in self._seconds.items() if name != "bitmask_s"})

    @property
    def graphs(self) -> GraphPasses | None:
        return GraphPasses(**self._passes) if self._counts_graphs else None

    def _time(self, owner: object, method: str, part: str, *, waits: bool = False) -> None:
        """Whatever is left before a part that `waits` is time in which it waits."""
        seconds = self._seconds

        def timed(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            begun_s = time.monotonic()
            if waits:
                seconds["wait_s"] = seconds.get("wait_s", 0.0) + begun_s - self._ended_s
            try:
                return original(*args, **kwargs)
            finally:
                self._ended_s = time.monotonic()
                seconds[part] = seconds.get(part, 0.0) + self._ended_s - begun_s

        wrap(owner, method)(timed)

    def _count(
        self, original: Callable[..., Any], scheduled: SchedulerOutput, output: ModelRunnerOutput
    ) -> Any:
        graph = getattr(output, "cudagraph_stats", None)
        if graph is not None:
            name = _PASSES.get(graph.runtime_mode, "no_graph_passes")
            self._passes[name] = self._passes.get(name, 0) + 1
        return original(scheduled, output)
