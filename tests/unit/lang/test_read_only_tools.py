"""Tools that only read are called before their turn, and a tool's time is used to compute the
prompt up to it."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

import sgl_vllm as sgl
from sgl_vllm.lang import execution, prefill_ahead
from sgl_vllm.lang.errors import BackendError
from sgl_vllm.lang.operations import EarlyTool
from sgl_vllm.lang.prefill_ahead import AGAIN_MIN_CHARS, ToolTimes
from sgl_vllm.lang.prompts import TextPrompt
from sgl_vllm.lang.stream import Stream
from tests.unit.lang.scripted import Meeting, ScriptedBackend, appending

pytestmark = pytest.mark.timeout(20)

INSTRUCTIONS = "How to read the results that follow, in more than a few words for each of them. "


def prefixes(backend: ScriptedBackend) -> list[str]:
    """What was only to be computed."""
    return [asked.text for asked in backend.asked if isinstance(asked, TextPrompt)]


def test_it_is_called_while_what_is_before_it_still_generates():
    meeting = Meeting()
    backend = ScriptedBackend(before=meeting.wait_async)
    program = appending("a" + sgl.gen("x") + sgl.read_only_tool("t", meeting.wait))
    state = program.run(backend=backend)
    assert (state.text(), state["t"]) == ("a(1)met", "met")


def test_in_branches_several_are_called_before_a_branch_begins_and_appended_in_order():
    meeting = Meeting(5)
    backend = ScriptedBackend(before=meeting.wait_async)

    @sgl.function
    def program(s):
        s += "a" + sgl.gen("x")
        branches = s.fork(2)
        for word in ("b", "c"):
            branches += word + sgl.read_only_tool(word, meeting.wait)
        return [branch.text() for branch in branches]

    assert program.run(backend=backend).ret_value == ["a(1)bmetcmet"] * 2


@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize("where", ["here", "parent", "branches", "texts of branches"])
def test_it_waits_for_tools_before_it_that_may_change_what_it_reads(where, compiles):
    files: list[str] = []

    def write(name: str) -> str:
        time.sleep(0.05)
        files.append(name)
        return ""

    def count(_: str) -> int:
        return len(files)

    @sgl.function
    def program(s, mode, name):
        s += "a" + sgl.gen("x")
        if mode == "branches" or mode == "texts of branches":
            branches = s.fork(2)
            branches += sgl.tool("w", write, name)
            branches.join("gather_variable" if mode == "branches" else "concate_and_append")
        else:
            s += sgl.tool("w", write, s["x"])
        if mode == "parent":
            (branch,) = s.fork(1)
            branch += sgl.read_only_tool("n", count, name)
            s.set_var("n", branch["n"])
        else:
            s += sgl.read_only_tool("n", count, name)

    run = program.compile(mode=where) if compiles else program.bind(mode=where)
    state = run.run(name="f", backend=ScriptedBackend())
    assert state["n"] == (1 if where in ("here", "parent") else 2)


def test_it_is_canceled_when_something_before_it_fails():
    ended = threading.Event()

    async def wait() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    async def fail(_: object) -> None:
        await asyncio.sleep(0.05)
        raise BackendError("the server is gone")

    program = appending("a" + sgl.gen("x") + sgl.read_only_tool("t", wait))
    with pytest.raises(sgl.ProgramError, match=r"gen 'x' failed: the server is gone"):
        program.run(backend=ScriptedBackend(before=fail))
    assert ended.wait(5)


@pytest.mark.parametrize("is_queued_late", [False, True])
def test_reading_the_prompt_that_waits_for_it_is_refused_instead_of_hanging(
    monkeypatch, is_queued_late
):
    submit = Stream.submit

    def submit_late(stream, operation, *args, **kwargs):
        time.sleep(0.05 if isinstance(operation, EarlyTool) else 0)
        return submit(stream, operation, *args, **kwargs)

    if is_queued_late:
        monkeypatch.setattr(Stream, "submit", submit_late)

    @sgl.function
    def program(s):
        s += "a" + sgl.gen("x") + sgl.read_only_tool("t", lambda: s.text())

    with pytest.raises(sgl.ProgramError, match="cannot read the prompt that called it"):
        program.run(backend=ScriptedBackend())


# -- the prompt up to a tool, computed while it runs -----------------------------------------------


def slow() -> str:
    time.sleep(0.2)
    return "found"


@pytest.mark.parametrize("tool", [sgl.tool, sgl.read_only_tool])
def test_the_prompt_up_to_a_slow_tool_is_computed_meanwhile(tool):
    backend = ScriptedBackend()
    program = appending("a" + sgl.gen("x") + INSTRUCTIONS + tool("t", slow) + sgl.gen("y"))
    state = program.run(backend=backend)
    assert prefixes(backend) == ["a(1)" + INSTRUCTIONS]
    assert backend.prompts == ["a", "a(1)" + INSTRUCTIONS + "found"]
    assert state.usage.calls == 3


@pytest.mark.parametrize(
    "tail",
    [
        pytest.param(INSTRUCTIONS + sgl.tool("t", lambda: "found") + sgl.gen("y"), id="fast tool"),
        pytest.param("Found: " + sgl.tool("t", slow) + sgl.gen("y"), id="short text"),
        pytest.param(INSTRUCTIONS + sgl.tool("t", slow) + " is all.", id="nothing generated"),
    ],
)
def test_nothing_is_computed_ahead_that_would_not_pay(tail):
    backend = ScriptedBackend()
    appending("a" + sgl.gen("x") + tail).run(backend=backend)
    assert prefixes(backend) == []


class Stuck(ScriptedBackend):
    """Never computes what it is sent ahead of time."""

    def __init__(self) -> None:
        super().__init__()
        self.was_canceled = threading.Event()

    async def warm_ahead(self, prompt):
        try:
            await asyncio.sleep(60)
        finally:
            self.was_canceled.set()


def test_a_prefix_that_still_waits_when_the_tool_returns_is_canceled():
    backend = Stuck()
    program = appending(INSTRUCTIONS + sgl.tool("t", slow) + sgl.gen("y"))
    state = program.run(backend=backend)
    assert state["t"] == "found" and state["y"]
    assert backend.was_canceled.wait(5)
    assert state.usage.calls == 1
    backend.was_canceled.clear()
    with pytest.raises(sgl.ProgramError, match="timeout_s"):
        program.run(backend=backend, timeout_s=0.1)
    assert backend.was_canceled.wait(5)


@pytest.fixture
def quick_clock(monkeypatch):
    """A tool of a tenth of a second counts as a long one."""
    monkeypatch.setattr(prefill_ahead, "LONG_TOOL_S", 0.1)
    monkeypatch.setattr(execution, "tool_times", ToolTimes())


@pytest.mark.usefixtures("quick_clock")
def test_a_long_prompt_is_sent_again_shortly_before_a_long_tool_returns():
    backend = ScriptedBackend()
    guide = INSTRUCTIONS * (AGAIN_MIN_CHARS // len(INSTRUCTIONS) + 1)
    program = appending(guide + sgl.tool("t", slow) + sgl.gen("y"))
    counts = []
    for _ in range(6):
        before = len(prefixes(backend))
        program.run(backend=backend)
        counts.append(len(prefixes(backend)) - before)
    assert counts == [1, 1, 1, 1, 2, 2]  # four calls show how long it takes
    assert set(prefixes(backend)) == {guide}
