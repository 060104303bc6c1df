"""What a real scheduler knows of programs: their states, what may be shown of their tools, and the
steps of their graphs, by which they are ordered."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

import pytest

from sgl_vllm.programs.admission import Admission
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


# -- the order in which programs take turns ------------------------------------------------------


@pytest.fixture
def agents_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Admission, "step_starts", lambda self: setattr(self, "hold_s", math.inf))


@pytest.mark.usefixtures("agents_take_turns")
def test_the_program_that_has_computed_the_least_goes_first():
    machine = Machine(max_num_seqs=1)
    served = {size: serve(machine, words(size)) for size in (2000, 400, 100)}
    machine.admitted.clear()
    for size, prompt in served.items():
        machine.add([*prompt, *words(8)], name=str(size))
    machine.add(words(500), name="new")
    machine.run()
    assert machine.admitted == ["100", "400", "2000", "new"], "the new one is not cached"
