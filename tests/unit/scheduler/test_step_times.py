"""The times of a step's parts, on a clock that the parts themselves move."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.v1.core.sched.scheduler import Scheduler

from sgl_vllm.scheduler import step_times
from sgl_vllm.scheduler.stats import GraphPasses


class Engine:
    """Calls the parts of a step in the order of vLLM's loop. Each advances the clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        monkeypatch.setattr(step_times, "time", SimpleNamespace(monotonic=lambda: self.now_s))
        for name, seconds in (("schedule", 1), ("get_grammar_bitmask", 2)):
            monkeypatch.setattr(Scheduler, name, self._taking(seconds))
        monkeypatch.setattr(Scheduler, "update_from_output", self._taking(4))
        self.scheduler: Any = object.__new__(step_times.TimedScheduler)
        self.model_executor: Any = SimpleNamespace(
            execute_model=self._taking(8), sample_tokens=self._taking(16)
        )
        self.timer = self.scheduler.step_timer = step_times.StepTimer(counts_graphs=True)
        self.timer.time_executor(self.model_executor)

    def _taking(self, seconds: float) -> Any:
        def part(*args: object) -> object:
            self.now_s += seconds
            return args

        return part

    def update(self, graph: str | None) -> object:
        stats = SimpleNamespace(runtime_mode=graph) if graph else None
        output = SimpleNamespace(cudagraph_stats=stats)
        return self.scheduler.update_from_output("scheduled", output)

    @property
    def seconds(self) -> dict[str, float]:
        names = ("schedule_s", "execute_s", "sample_s", "wait_s", "update_s")
        return {name: getattr(self.timer.times, name) for name in names}


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    return Engine(monkeypatch)


def test_asynchronous_steps_wait_before_the_update(engine: Engine) -> None:
    for _ in range(2):
        engine.scheduler.schedule()
        engine.model_executor.execute_model()
        engine.scheduler.get_grammar_bitmask("scheduled")
        engine.model_executor.sample_tokens()
        engine.now_s += 32
        engine.update(None)
        engine.now_s += 1000  # answers, and no requests
    expected = {"schedule_s": 2, "execute_s": 16, "sample_s": 32, "wait_s": 64, "update_s": 8}
    assert engine.seconds == expected


def test_synchronous_steps_wait_before_they_sample(engine: Engine) -> None:
    engine.scheduler.schedule()
    engine.model_executor.execute_model()
    engine.scheduler.get_grammar_bitmask("scheduled")
    engine.now_s += 32
    engine.model_executor.sample_tokens()
    engine.update(None)
    expected = {"schedule_s": 1, "execute_s": 8, "sample_s": 16, "wait_s": 32, "update_s": 4}
    assert engine.seconds == expected


def test_passes_are_counted_by_their_graph(engine: Engine) -> None:
    for graph in ("FULL", "PIECEWISE", "FULL", "NONE", None):
        engine.update(graph)
    assert engine.timer.graphs == GraphPasses(2, piecewise_graph_passes=1, no_graph_passes=1)


def test_what_a_part_returns_and_raises_is_passed_on(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert engine.scheduler.schedule("throttled") == (engine.scheduler, "throttled")

    def fails(scheduler: object) -> None:
        raise ValueError("no")

    monkeypatch.setattr(Scheduler, "schedule", fails)
    with pytest.raises(ValueError, match="no"):
        engine.scheduler.schedule()
