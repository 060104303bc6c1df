"""Agents take turns while they evict each other's contexts, in vLLM's scheduler without a model."""

from __future__ import annotations

from typing import Any

import pytest

from sgl_vllm.programs.admission import MAX_HELD_PER_STEP, AdmissionGauges
from sgl_vllm.programs.pauses import MIN_OUTCOMES
from sgl_vllm.programs.programs import OPENING_TOKENS
from tests.engine.machine import Machine
from tests.engine.test_queue import words

PAUSE_S = 0.5


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
    for module in ("programs.programs", "programs.admission", "radix.retention", "scheduler.queue"):
        monkeypatch.setattr(f"sgl_vllm.{module}.time", clock)
    return clock


class Server:
    """A cache of 1,920 tokens, in which three agents evict each other's contexts of 1,000 tokens.
    Each sends its next step half a second after an answer."""

    def __init__(self, clock: StoppedTime, **options: Any) -> None:
        self.clock = clock
        self.machine = Machine(options, num_blocks=60)
        self._agents = [words(800) for _ in range(3)]
        for agent in self._agents:
            self.serve(agent)
        for _ in range(MIN_OUTCOMES + 10):
            clock.now_s += PAUSE_S / 3
            self.serve(self.next_step())

    def next_step(self) -> list[int]:
        """Of the agent that has paused for the longest, and whose context is evicted."""
        agent = [*self._agents.pop(0), *words(10)]
        self._agents.append(agent)
        return agent

    def serve(self, prompt: list[int], **params: Any) -> list[int]:
        self.send(prompt, **params)
        self.machine.run()
        return prompt

    def send(self, prompt: list[int], name: str | None = None, **params: Any) -> None:
        self.machine.add(prompt, name=name, arrival_time=self.clock.now_s, **params)

    def start_long_answer(self) -> None:
        self.send(words(64), max_tokens=300)
        self.machine.step()

    def waits(self, prompt: list[int], name: str, **params: Any) -> bool:
        """Whether a request has to wait."""
        self.send(prompt, name, **params)
        for _ in range(2):
            self.machine.step()
        return name not in self.machine.admitted

    @property
    def admission(self) -> AdmissionGauges:
        return self.machine.scheduler.sgl_vllm.stats().admission


def test_an_evicted_agent_waits_until_the_cached_one_has_been_continued(clock: StoppedTime) -> None:
    server = Server(clock)
    machine = server.machine
    assert server.admission.again_per_new > 1
    server.start_long_answer()
    assert server.waits(server.next_step(), "evicted")
    assert (server.admission.held, machine.counters.held_for_contexts) == (1, 1)
    shown = machine.scheduler.sgl_vllm.tree()["admission"]
    assert shown["held"] == 1 and shown["hold_s"] > 0 and shown["again_per_new"] > 1
    assert not server.waits(words(100), "single call")
    server.next_step()
    assert not server.waits(server.next_step(), "cached")
    assert machine.computed["cached"] < 64
    assert "evicted" not in machine.admitted
    clock.now_s += 2 * PAUSE_S
    machine.step()
    assert "evicted" in machine.admitted
    machine.run()
    assert server.admission.kept_tokens > 900 and server.admission.held == 0


@pytest.mark.parametrize(
    ("options", "priority"), [({"schedule_admission": "off"}, 0), ({}, -1)], ids=["off", "priority"]
)
def test_nothing_waits_if_it_is_switched_off_or_has_a_priority(
    clock: StoppedTime, options: dict[str, Any], priority: int
) -> None:
    server = Server(clock, **options)
    server.start_long_answer()
    assert not server.waits(server.next_step(), "evicted", priority=priority)
    assert ("admission" in server.machine.scheduler.sgl_vllm.tree()) == (not options)


def test_a_request_ahead_of_time_waits_while_another_is_held_back(clock: StoppedTime) -> None:
    server = Server(clock)
    server.start_long_answer()
    assert server.waits(server.next_step(), "evicted")
    assert server.waits(words(64), "ahead", extra_args={"sgl_ahead": 1})
    assert not server.waits(words(64), "single call")


def test_nothing_waits_while_the_engine_is_idle(clock: StoppedTime) -> None:
    server = Server(clock)
    assert not server.waits(server.next_step(), "evicted")


@pytest.mark.parametrize(("salt", "waits"), [(None, True), ("another tenant", False)])
def test_a_first_request_that_begins_as_an_agents_waits_too(
    clock: StoppedTime, salt: str | None, waits: bool
) -> None:
    server = Server(clock)
    agent = server.next_step()
    server.start_long_answer()
    prompt = [*agent[:OPENING_TOKENS], *words(1000)]
    assert server.waits(prompt, "subagent", cache_salt=salt) == waits


def test_a_context_that_ends_is_not_waited_for(clock: StoppedTime) -> None:
    server = Server(clock)
    for _ in range(3):
        server.serve(server.next_step(), extra_args={"sgl_ends": 1})
    server.start_long_answer()
    assert not server.waits(server.next_step(), "evicted")


def test_many_agents_that_wait_cost_no_more_than_a_few(clock: StoppedTime) -> None:
    server = Server(clock)
    agents = [server.serve(words(100)) for _ in range(3 * MAX_HELD_PER_STEP)]
    agents = [server.serve([*agent, *words(10)]) for agent in agents]
    server.serve(server.next_step())
    server.serve(server.next_step())
    server.start_long_answer()
    for agent in agents:
        server.send([*agent, *words(900)])
    server.send(words(300), "single call")
    server.machine.step()
    assert "single call" in server.machine.admitted
    assert server.admission.held == len(agents)
    assert server.machine.counters.held_for_contexts == MAX_HELD_PER_STEP
    clock.now_s += 2 * PAUSE_S
    server.machine.run()
