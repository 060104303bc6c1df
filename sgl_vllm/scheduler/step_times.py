"""Times the parts of an engine core's step, and counts its passes by their CUDA graph.

Owns which calls of vLLM's loop are a part. Does not own the counters (`stats.py`).

    schedule | execute | bitmask | sample | wait for the step before | update

What is in none of them is spent on requests and answers, or idle; bitmasks have a timer of their
own. Costs two microseconds a step.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any  # Any: methods of vLLM's

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.outputs import ModelRunnerOutput

    from sgl_vllm.scheduler.stats import GraphPasses, StepTimes

_GRAPHS = {"FULL": "full_graph_passes", "PIECEWISE": "piecewise_graph_passes"}


def time_steps(engine: EngineCore, times: StepTimes, graphs: GraphPasses | None) -> None:
    """From now on, the steps of `engine` add to `times` and `graphs`."""
    scheduler: Any = engine.scheduler
    executor: Any = engine.model_executor
    ended = time.monotonic()

    def timed(method: Callable[..., Any], part: str, *, waits: bool = False) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal ended
            begun = time.monotonic()
            if waits:
                times.wait_s += begun - ended
            try:
                return method(*args, **kwargs)
            finally:
                ended = time.monotonic()
                if part:
                    setattr(times, part, getattr(times, part) + ended - begun)

        return call

    update = timed(scheduler.update_from_output, "update_s", waits=True)

    def counted_update(
        scheduled: SchedulerOutput, output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        graph = getattr(output, "cudagraph_stats", None)
        if graph is not None:
            name = _GRAPHS.get(graph.runtime_mode, "no_graph_passes")
            setattr(graphs, name, getattr(graphs, name) + 1)
        results: dict[int, EngineCoreOutputs] = update(scheduled, output)
        return results

    scheduler.schedule = timed(scheduler.schedule, "schedule_s")
    scheduler.get_grammar_bitmask = timed(scheduler.get_grammar_bitmask, "")
    scheduler.update_from_output = update if graphs is None else counted_update
    executor.execute_model = timed(executor.execute_model, "execute_s")
    executor.sample_tokens = timed(executor.sample_tokens, "sample_s", waits=True)
