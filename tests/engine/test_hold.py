"""New contexts wait for those that will be continued soon, in vLLM's scheduler without a model."""

from __future__ import annotations

from typing import Any

import pytest

from sgl_vllm.programs.continuations import MIN_OUTCOMES
from sgl_vllm.protocol.step_graph import Step, StepGraph
from tests.engine.machine import Machine
from tests.engine.test_queue import words

HOLD_S = 10.0


class StoppedTime:
    """Stands in for the module `time`."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def time(self) -> float:
        return self.now_s

    monotonic = time


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> StoppedTime:
    clock = StoppedTime()
    monkeypatch.setattr("sgl_vllm.programs.programs.time", clock)
    monkeypatch.setattr("sgl_vllm.radix.retention.time", clock)
    monkeypatch.setattr("sgl_vllm.programs.hold.time", clock)
    return clock


class Server:
    """A cache of 1,920 tokens, whose sessions have paused for a second each, and which is busy."""

    def __init__(self, clock: StoppedTime, hold_s: float = HOLD_S) -> None:
        self.clock = clock
        self.machine = Machine({"schedule_hold_s": hold_s}, num_blocks=60)
        for _ in range(MIN_OUTCOMES):
            prompt = words(64)
            self.serve(prompt)
            clock.now_s += 1
            self.serve([*prompt, *words(8)])
        clock.now_s = 100.0

    def serve(self, prompt: list[int], **params: Any) -> list[int]:
        self.machine.add(prompt, **params)
        self.machine.run()
        return prompt

    def start_long_answer(self) -> None:
        self.machine.add(words(64), 300)
        self.machine.step()

    def send(self, name: str, prompt: list[int], waited_s: float = 0.0) -> None:
        self.machine.add(prompt, name=name).arrival_time = self.clock.now_s - waited_s
        self.machine.step()

    def must_wait(self) -> bool:
        """Whether a new context has to wait, while a long answer is written."""
        self.start_long_answer()
        self.send("new", words(1000))
        return self.is_waiting

    @property
    def is_waiting(self) -> bool:
        self.machine.step()
        return "new" not in self.machine.admitted

    def num_cached(self, prompt: list[int]) -> int:
        radix = self.machine.scheduler.parts.radix
        return radix.match(self.machine.add(prompt)).num_tokens


def test_a_new_context_waits_until_the_expected_one_has_been_continued(clock: StoppedTime) -> None:
    server = Server(clock)
    session = server.serve(words(1200))
    server.start_long_answer()
    server.send("new", words(1000))
    server.send("back", [*session, *words(20)])
    machine = server.machine
    assert 0 < machine.computed["back"] < 64
    assert "new" not in machine.admitted and machine.counters.held_for_contexts == 1
    clock.now_s += 2
    machine.step()
    assert "new" in machine.admitted
    machine.run()


def test_a_request_that_waits_alone_is_not_held_back_if_it_is_cached(clock: StoppedTime) -> None:
    server = Server(clock)
    session = server.serve(words(900))
    server.serve(words(800))
    server.start_long_answer()
    server.send("back", [*session, *words(20)])
    assert 0 < server.machine.computed["back"] < 64


def test_a_context_that_ends_is_not_waited_for_and_goes_first(clock: StoppedTime) -> None:
    server = Server(clock)
    older = server.serve(words(384))
    ended = server.serve(words(1200), extra_args={"sgl_ends": 1})
    assert not server.must_wait()
    assert server.num_cached(older) == 384
    assert server.num_cached(ended) < 600


TWICE = StepGraph((Step(), Step(0, "run"), Step(1, "run")))
"""A program whose tool takes a second at first, and a minute the next time."""


def step_of(graph: StepGraph, index: int) -> dict[str, Any]:
    hints = {"sgl_step": f"{graph.digest}/{index}", **({} if index else {"sgl_graph": graph.text})}
    return {"extra_args": hints}


@pytest.mark.parametrize(("index", "waits"), [(0, True), (1, False)])
def test_one_tool_may_take_long_at_one_step_of_a_program_and_not_at_another(
    clock: StoppedTime, index: int, waits: bool
) -> None:
    server = Server(clock)
    for _ in range(MIN_OUTCOMES):
        prompt = words(64)
        for number, tool_s in enumerate((1.0, 60.0, 0.0)):
            server.serve(prompt, **step_of(TWICE, number))
            prompt = [*prompt, *words(8)]
            clock.now_s += tool_s
    server.serve(words(1200), **step_of(TWICE, index))
    assert server.must_wait() == waits
