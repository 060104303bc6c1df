"""Times the parts of an engine core's step, and counts its passes by their CUDA graph.

Owns which calls of vLLM's loop are a part. Does not own the counters (`stats.py`).

    schedule | execute | bitmask | sample | wait for the step before | update

What is in none of them is spent on requests and answers, or idle; bitmasks have a timer of their
own. Costs two microseconds a step.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any  # Any: arguments of vLLM's methods

from sgl_vllm.scheduler.stats import GraphPasses, StepTimes
from sgl_vllm.vllm_api.patching import wrap

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.executor.abstract import Executor
    from vllm.v1.outputs import ModelRunnerOutput

_PASSES = {"FULL": "full_graph_passes", "PIECEWISE": "piecewise_graph_passes"}


class StepTimer:
    """Times the steps of an engine from its construction on.

    Args:
        counts_graphs: whether vLLM tells the CUDA graph of each pass, by `--cudagraph-metrics`.
    """

    def __init__(self, engine: EngineCore, *, counts_graphs: bool) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._passes: Counter[str] = Counter()
        self._counts_graphs = counts_graphs
        self._ended_s = time.monotonic()
        self._time_scheduler(engine.scheduler)
        self._time_executor(engine.model_executor)

    @property
    def times(self) -> StepTimes:
        return StepTimes(**self._seconds)

    @property
    def graphs(self) -> GraphPasses | None:
        return GraphPasses(**self._passes) if self._counts_graphs else None

    def _time_scheduler(self, scheduler: Scheduler) -> None:
        @wrap(scheduler, "schedule")
        def schedule(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            return self._timed("schedule_s", original, *args, **kwargs)

        @wrap(scheduler, "get_grammar_bitmask")
        def get_grammar_bitmask(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            try:
                return original(*args, **kwargs)
            finally:
                self._ended_s = time.monotonic()  # not waited for

        @wrap(scheduler, "update_from_output")
        def update_from_output(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            self._waited()
            return self._timed("update_s", original, *args, **kwargs)

        if self._counts_graphs:
            wrap(scheduler, "update_from_output")(self._count)

    def _time_executor(self, executor: Executor) -> None:
        @wrap(executor, "execute_model")
        def execute_model(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            return self._timed("execute_s", original, *args, **kwargs)

        @wrap(executor, "sample_tokens")
        def sample_tokens(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            self._waited()
            return self._timed("sample_s", original, *args, **kwargs)

    def _waited(self) -> None:
        """The engine has waited for a pass since the last part ended."""
        self._seconds["wait_s"] += time.monotonic() - self._ended_s

    def _timed(self, part: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        begun_s = time.monotonic()
        try:
            return original(*args, **kwargs)
        finally:
            self._ended_s = time.monotonic()
            self._seconds[part] += self._ended_s - begun_s

    def _count(
        self,
        original: Callable[..., Any],
        scheduler_output: SchedulerOutput,
        model_runner_output: ModelRunnerOutput,
    ) -> Any:
        graph = getattr(model_runner_output, "cudagraph_stats", None)
        if graph is not None:
            self._passes[_PASSES.get(graph.runtime_mode, "no_graph_passes")] += 1
        return original(scheduler_output, model_runner_output)
