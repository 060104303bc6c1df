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
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar  # Any: arguments of vLLM's methods

from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput

from sgl_vllm.scheduler.stats import GraphPasses, StepTimes
from sgl_vllm.vllm_api.patching import wrap

if TYPE_CHECKING:
    from vllm.v1.executor.abstract import Executor

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

_PASSES = {"FULL": "full_graph_passes", "PIECEWISE": "piecewise_graph_passes"}


class StepTimer:
    """Times the steps of an engine.

    Args:
        counts_graphs: whether vLLM tells the CUDA graph of each pass, by `--cudagraph-metrics`.
    """

    def __init__(self, *, counts_graphs: bool = False) -> None:
        self._counts_graphs = counts_graphs
        self.begin()

    def begin(self) -> None:
        """Forget what was timed and counted."""
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._passes: Counter[str] = Counter()
        self._ended_s = time.monotonic()

    @property
    def times(self) -> StepTimes:
        return StepTimes(**self._seconds)

    @property
    def graphs(self) -> GraphPasses | None:
        return GraphPasses(**self._passes) if self._counts_graphs else None

    def time_executor(self, executor: Executor) -> None:
        @wrap(executor, "execute_model")
        def execute_model(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            return self.timed("execute_s", original, *args, **kwargs)

        @wrap(executor, "sample_tokens")
        def sample_tokens(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            self.waited()
            return self.timed("sample_s", original, *args, **kwargs)

    def waited(self) -> None:
        """The engine has waited for a pass since the last part ended."""
        self._seconds["wait_s"] += time.monotonic() - self._ended_s

    def did_not_wait(self) -> None:
        """Exclude the time since the last part ended from `wait_s`."""
        self._ended_s = time.monotonic()

    def timed(
        self,
        part: str,
        function: Callable[Arguments, Result],
        *args: Arguments.args,
        **kwargs: Arguments.kwargs,
    ) -> Result:
        begun_s = time.monotonic()
        try:
            return function(*args, **kwargs)
        finally:
            self._ended_s = time.monotonic()
            self._seconds[part] += self._ended_s - begun_s

    def count(self, output: ModelRunnerOutput) -> None:
        """Count a pass by its graph."""
        graph = getattr(output, "cudagraph_stats", None) if self._counts_graphs else None
        if graph is not None:
            self._passes[_PASSES.get(graph.runtime_mode, "no_graph_passes")] += 1


class TimedScheduler(Scheduler):
    """A scheduler whose part of each step is timed."""

    step_timer: StepTimer

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        return self.step_timer.timed("schedule_s", super().schedule, *args, **kwargs)

    def get_grammar_bitmask(self, scheduler_output: SchedulerOutput) -> GrammarOutput | None:
        bitmasks = super().get_grammar_bitmask(scheduler_output)
        self.step_timer.did_not_wait()
        return bitmasks

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        self.step_timer.count(model_runner_output)
        self.step_timer.waited()
        update = super().update_from_output
        return self.step_timer.timed("update_s", update, scheduler_output, model_runner_output)
