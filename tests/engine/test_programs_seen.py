"""What a real scheduler knows of programs: their states, and what may be shown of their tools."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

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


def test_branches_of_a_program_are_one_program(machine: Machine) -> None:
    hints = {"sgl_program": "p"}
    serve(machine, words(64), extra_args=hints)
    serve(machine, words(64), extra_args={**hints, "sgl_ends": 1})
    assert states(machine) == {"unknown": 1}
    serve(machine, words(64), extra_args={**hints, "sgl_next_tool": "bash"})
    assert states(machine) == {"in_tool": 1}
    serve(machine, words(64), extra_args=hints, cache_salt="another tenant")
    assert states(machine) == {"in_tool": 1, "unknown": 1}
    machine.add(words(64), 3, extra_args=hints)
    machine.step()
    assert states(machine) == {"running": 1, "unknown": 1}
    machine.run()


def test_a_program_is_still_in_its_tool_when_its_context_was_evicted_or_flushed(
    machine: Machine,
) -> None:
    serve(machine, words(64), extra_args={"sgl_next_tool": "bash"})
    assert machine.scheduler.reset_prefix_cache()
    assert states(machine) == {"in_tool": 1}


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


def test_hints_survive_a_preemption() -> None:
    machine = Machine(num_blocks=20)  # 640 tokens
    for _ in range(2):
        machine.add(words(250), 200, extra_args={"sgl_next_tool": "bash"})
    machine.run()
    assert machine.num_preemptions > 0
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


@pytest.mark.parametrize("off", ["radix", "schedule"])
def test_without_the_parts_that_know_nothing_is_said(off: str) -> None:
    machine = Machine({off: False})
    serve(machine, words(64), extra_args={"sgl_next_tool": "bash"})
    assert machine.scheduler.sgl_vllm.stats().programs is None
    assert "programs" not in machine.scheduler.sgl_vllm.tree()
