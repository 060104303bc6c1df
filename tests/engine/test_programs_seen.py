"""What a real scheduler knows of programs: their states, what may be shown of their tools, and the
steps of their graphs, by which they are ordered."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import pytest

from sgl_vllm.programs.admission import Admission
from sgl_vllm.protocol.hints import read_hints
from sgl_vllm.protocol.step_graph import Step, StepGraph
from tests.engine.machine import Machine
from tests.engine.test_queue import words


@pytest.fixture
def machine() -> Machine:
    return Machine()


def states(machine: Machine) -> dict[str, int]:
    """How many programs are in each state, without those that no program is in."""
    programs = machine.scheduler.sgl_vllm.stats().programs
    assert programs is not None
    return {state: number for state, number in asdict(programs).items() if number}


def serve(machine: Machine, prompt: list[int], **params: Any) -> list[int]:
    machine.add(prompt, **params)
    machine.run()
    return prompt


def test_a_conversation_with_a_tool_is_seen_by_default(machine: Machine) -> None:
    prompt = words(64)
    machine.add(prompt, name="chatcmpl-7-0a1b2c3d")
    assert states(machine) == {"running": 1}  # it waits
    machine.run()
    assert states(machine) == {"unknown": 1}
    machine.scheduler.sgl_vllm.called_tool("chatcmpl-7", "search")
    assert states(machine) == {"in_tool": 1}
    prompt += words(8)
    machine.add(prompt)
    assert states(machine) == {"running": 1}
    machine.run()
    assert states(machine) == {"waiting_for_person": 1}
    serve(machine, [*prompt, *words(8)], extra_args={"sgl_ends": 1})
    assert states(machine) == {"ended": 1}


def test_a_request_ahead_of_time_leaves_its_program_in_the_tool(machine: Machine) -> None:
    """Nor is the time until it arrives taken for the time that the tool takes."""
    prompt = serve(machine, words(64), extra_args={"sgl_program": "p", "sgl_next_tool": "bash"})
    ahead = {"sgl_program": "p", "sgl_ahead": 1}
    machine.add([*prompt, *words(64)], extra_args=ahead)
    assert states(machine) == {"running": 1}
    machine.run()
    assert states(machine) == {"in_tool": 1}
    tree = machine.scheduler.sgl_vllm.tree()
    assert tree["programs"]["in_tool"] == 1
    serve(machine, [*prompt, *words(70)], extra_args={"sgl_program": "p"})
    assert states(machine) == {"waiting_for_person": 1}


def test_hints_survive_a_preemption_and_a_flush() -> None:
    machine = Machine(num_blocks=20)  # 640 tokens
    for _ in range(2):
        machine.add(words(250), 200, extra_args={"sgl_next_tool": "bash"})
    machine.run()
    assert machine.num_preemptions > 0
    assert machine.scheduler.reset_prefix_cache()
    assert states(machine) == {"in_tool": 2}


@pytest.mark.parametrize("shows_text", [False, True])
def test_names_of_tools_are_shown_with_the_texts_of_prompts_only(shows_text: bool) -> None:
    machine = Machine({"tree_text": shows_text})
    serve(machine, words(64), extra_args={"sgl_next_tool": "bash"})
    serve(machine, words(64), extra_args={"sgl_next_tool": "secret"}, cache_salt="a tenant")
    tree = machine.scheduler.sgl_vllm.tree()
    assert tree["programs"]["in_tool"] == 2
    assert tree["programs"]["longest_in_tool_s"] >= 0
    assert [tool["name"] for tool in tree["programs"]["tools"]] == ["bash"] * shows_text
    (context,) = [node["context"] for node in tree["nodes"] if "context" in node]
    assert context["state"] == "in_tool" and context["tool"] == ("bash" if shows_text else None)
    assert "secret" not in repr(tree)


# -- steps of graphs -------------------------------------------------------------------------------


def step(graph: StepGraph, index: int, *, sends_graph: bool = False) -> dict:
    hints = {"sgl_step": f"{graph.digest}/{index}"}
    return {"extra_args": {**hints, **({"sgl_graph": graph.text} if sends_graph else {})}}


LINE = StepGraph((Step(), Step(0, "search"), Step(1, "read")))
PAIR = StepGraph((Step(), Step(0, "build")))


@pytest.fixture
def agents_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Admission, "step_starts", lambda self: setattr(self, "hold_s", math.inf))


@pytest.mark.usefixtures("agents_take_turns")
def test_the_program_with_the_least_to_compute_goes_first():
    machine = Machine(max_num_seqs=1)
    for graph, sizes in ((LINE, [600, 200, 20]), (PAIR, [100, 100])):
        for index, size in enumerate(sizes):  # of the new prompts of a run
            serve(machine, words(size), **step(graph, index, sends_graph=index == 0))
    machine.admitted.clear()
    for name, graph, index in (("820", LINE, 0), ("200", PAIR, 0), ("20", LINE, 2)):
        machine.add(words(64), name=name, **step(graph, index))
    machine.run()
    assert machine.admitted == ["20", "200", "820"]


@pytest.mark.usefixtures("agents_take_turns")
def test_without_a_graph_the_program_that_has_computed_the_least_goes_first():
    machine = Machine(max_num_seqs=1)
    served = {size: serve(machine, words(size)) for size in (2000, 400, 100)}
    machine.admitted.clear()
    for size, prompt in served.items():
        machine.add([*prompt, *words(8)], name=str(size))
    machine.add(words(500), name="new")
    machine.run()
    assert machine.admitted == ["100", "400", "2000", "new"], "the new one is not cached"


def test_the_branches_of_a_fork_in_a_graph_are_admitted_together():
    fork = StepGraph((Step(), Step(0), Step(0), Step(0)))
    machine = Machine({"schedule_policy": "fcfs", "schedule_max_delay": 100.0}, max_num_seqs=1)
    machine.add(words(30), **step(fork, 0, sends_graph=True))
    machine.run()
    machine.admitted.clear()
    for index in (1, 2, 3):
        for program in ("p", "q"):
            hints = {"sgl_program": program, **step(fork, index)["extra_args"]}
            machine.add(words(30), name=f"{program}{index}", extra_args=hints)
        machine.add(words(30), name=f"alone {index}", **step(fork, index))
    machine.run()
    alone = ["alone 1", "alone 2", "alone 3"]
    assert machine.admitted == ["p1", "p2", "p3", "q1", "q2", "q3", *alone]


TWO = StepGraph((Step(), Step()))


def measured_tokens(machine: Machine, prompt: Sequence[int]) -> int:
    """The mean tokens of the first step of `TWO`, by which programs that take turns are ordered."""
    hints = read_hints(step(TWO, 0)["extra_args"], "")
    request = machine.add(prompt, **step(TWO, 0))
    num_remaining = machine.scheduler.parts.programs.arrived(request, hints).num_remaining
    machine.abort(request)
    return num_remaining // 2  # the other step counts as much


def test_a_step_takes_what_was_computed_for_it_once():
    """The tokens that are not cached, and those of its answer; none of them again after a
    preemption, and none at all if it is aborted without an answer."""
    machine, prompt = Machine(), words(320)
    serve(machine, prompt)
    machine.add([*prompt, *words(80)], 20, **step(TWO, 0, sends_graph=True))
    machine.run()
    assert 80 + 19 <= measured_tokens(machine, prompt) <= 81 + 20

    machine = Machine(num_blocks=30)
    machine.add(words(200), 200)
    request = machine.add(words(640), 100, **step(TWO, 0, sends_graph=True))
    machine.run()
    assert request.num_preemptions
    assert 730 <= measured_tokens(machine, words(64)) <= 740

    for num_steps, num_tokens in ((1, 0), (3, 2001)):
        machine = Machine()
        request = machine.add(words(2000), 100, **step(TWO, 0, sends_graph=True))
        for _ in range(num_steps):
            machine.step()
        machine.abort(request)
        assert num_tokens - 1 <= measured_tokens(machine, words(64)) <= num_tokens + 1
