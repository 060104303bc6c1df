"""What a generation's request says: the tool that follows, and the graph of a compiled program."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

import sgl_vllm as sgl
from sgl_vllm.lang.backends.requests import GenAnswer, GenRequest
from sgl_vllm.lang.settings import global_config
from sgl_vllm.lang.steps import generations_of
from sgl_vllm.protocol.hints import NO_HINTS, Hints
from sgl_vllm.protocol.step_graph import MAX_STEPS, Step, StepGraph
from tests.unit.lang.scripted import ScriptedBackend, appending

pytestmark = pytest.mark.timeout(120)


@dataclass
class Listener(ScriptedBackend):
    """Reads the hints as a backend does that sends them."""

    hints: list[Hints] = field(default_factory=list)

    async def generate(self, request: GenRequest) -> GenAnswer:
        self.hints.append(request.hints())
        return await super().generate(request)


@pytest.fixture
def listener() -> Listener:
    return Listener(lambda prompt: "")


def look() -> str:
    return "seen"


# -- a tool that follows --------------------------------------------------------------------------


@sgl.function
async def turns(s: Any) -> None:
    for _ in range(2):
        s += "a" + sgl.gen("x") + "b" + sgl.gen("y") + "c" + sgl.var("x") + sgl.tool("t", look)
    s += sgl.gen("z") + sgl.select("choice", ["b", "c"]) + sgl.tool("u", look)


@sgl.function
async def reads(s: Any) -> None:
    s += "a" + sgl.gen("x") + "b" + sgl.tool("t", look)
    s["first"] = (await s["x"])[:1]
    s += sgl.gen("y", stop=await s["first"]) + sgl.tool("u", look) + sgl.gen("z")


@pytest.mark.parametrize(
    ("program", "tools"),
    [
        (turns, [None, "look", None, "look", None]),
        (turns.compile(), [None, "look", None, "look", None]),
        (reads, ["look", "look", None]),
        (reads.compile(), ["look", None, None]),  # inside of the computed `gen`, nothing is known
    ],
)
def test_a_tool_that_is_queued_behind_a_generation_is_named(
    program: Any, tools: list[str | None], listener: Listener
) -> None:
    program.run(backend=listener)
    assert [one.next_tool for one in listener.hints] == tools


def test_a_server_receives_it_beside_the_program(server: Any, backend: Any) -> None:
    @sgl.function
    async def program(s: Any) -> None:
        s += "a" + sgl.gen("x", regex="[0-9]+") + sgl.tool("t", look) + sgl.gen("y")

    program.run(backend=backend)
    first, second = (body["vllm_xargs"] for body in server.calls)
    assert first == {**second, "sgl_next_tool": "look", "sgl_report": 1}
    assert set(second) == {"sgl_program"}


# -- the graph ------------------------------------------------------------------------------------


def one_after_the_other(s: Any) -> None:
    s += "a" + sgl.gen("x") + "b"
    s += sgl.gen("y") + "c" + sgl.gen("z")


def tools_between(s: Any) -> None:
    """The first of them counts."""
    s += sgl.tool("before", look) + sgl.gen("x")
    s += sgl.tool("t", look) + sgl.tool("u", print, sgl.var("x"))
    s += sgl.gen("y") + "text" + sgl.gen("z") + sgl.read_only_tool("v", look) + sgl.gen("w")


def joined_branches(s: Any) -> None:
    s += "a" + sgl.gen("x")
    forks = s.fork(2)
    for fork in forks:
        fork += "b" + sgl.gen("y")
    forks.join()
    s += "c" + sgl.gen("z")


def answers_in_other_prompts(s: Any) -> None:
    forks = s.fork(2)
    forks[0] += "a" + sgl.gen("x")
    forks[1] += "b" + forks[0]["x"] + sgl.gen("y")
    s += forks[1]["y"] + sgl.gen("z")


def a_variable_that_is_only_named(s: Any) -> None:
    forks = s.fork(2)
    forks[0] += "a" + sgl.gen("x")
    s.set_var("kept", forks[0]["x"])
    s += "b" + sgl.gen("y")
    s += s["kept"] + sgl.gen("z")


def a_join_of_what_was_read(s: Any) -> None:
    forks, others = s.fork(1), s.fork(1)
    forks[0] += "a" + sgl.gen("x")
    others[0] += "b" + forks[0]["x"]
    others.join("concate_and_append")
    s += "c" + sgl.gen("y")


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (one_after_the_other, [Step(), Step(0), Step(1)]),
        (tools_between, [Step(None, "look"), Step(0, "look"), Step(1), Step(2, "look")]),
        (joined_branches, [Step(), Step(0), Step(0), Step(0, None, (1, 2))]),
        (answers_in_other_prompts, [Step(), Step(None, None, (0,)), Step(None, None, (1,))]),
        (a_variable_that_is_only_named, [Step(), Step(), Step(1, None, (0,))]),
        (a_join_of_what_was_read, [Step(), Step(None, None, (0,))]),
    ],
)
def test_a_step_is_known_by_what_it_continues_and_waits_for(
    function: Any, expected: list[Step]
) -> None:
    found = generations_of(sgl.function(function).compile().graph)
    assert found is not None
    assert sorted(sum(found.of_node.values(), ())) == list(range(len(found.steps.steps)))
    assert [*found.steps.steps] == expected


@pytest.mark.parametrize("num", [0, 1, MAX_STEPS + 1])
def test_a_program_of_too_few_or_too_many_steps_has_none(num: int) -> None:
    @sgl.function
    def program(s: Any) -> None:
        for _ in range(num):
            s += "a" + sgl.gen()

    assert generations_of(program.compile().graph) is None


# -- what is sent ---------------------------------------------------------------------------------


@sgl.function
def agent(s: Any, question: str) -> None:
    s += question + sgl.gen("query") + sgl.tool("found", look)
    s += sgl.gen("answer", stop=s["query"]) + sgl.gen("check")


AGENT = StepGraph((Step(), Step(0, "look"), Step(1)))


def test_a_run_sends_its_graph_once_and_then_the_digest(listener: Listener) -> None:
    agent.compile().run("?", backend=listener)
    assert [str(one.step) for one in listener.hints] == [f"{AGENT.digest}/{i}" for i in range(3)]
    assert [one.graph for one in listener.hints] == [AGENT.text, None, None]


def test_a_program_inside_another_names_the_steps_of_its_own_graph(listener: Listener) -> None:
    compiled = agent.compile()

    @sgl.function
    def outer(s: Any) -> None:
        s += "a" + sgl.gen("before")
        compiled(s, "?")
        s += "b" + sgl.gen("after")

    outer.run(backend=listener)
    indices = [None if one.step is None else one.step.index for one in listener.hints]
    assert indices == [None, 0, 1, 2, None]


def test_a_program_that_is_not_compiled_has_no_graph(listener: Listener) -> None:
    agent.run("?", backend=listener)
    assert all(one.step is None and one.graph is None for one in listener.hints)


def test_each_attempt_names_its_step_and_the_last_says_what_follows(listener: Listener) -> None:
    answers = iter(["no number", "7", "text"])
    listener.reply = lambda prompt: next(answers)
    program = appending(
        "a" + sgl.gen("x", dtype=int, retries=1) + sgl.tool("t", look) + sgl.gen("y")
    )
    program.compile().run(backend=listener)
    assert [one.step.index for one in listener.hints if one.step is not None] == [0, 0, 1]
    assert [one.next_tool for one in listener.hints] == [None, "look", None]
    assert [one.graph is not None for one in listener.hints] == [True, False, False]


def test_nothing_is_sent_if_hints_are_off(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(global_config, "enable_hints_of_what_follows", False)
    agent.compile().run("?", backend=listener)
    turns.run(backend=listener)
    assert listener.hints == [NO_HINTS] * 8
