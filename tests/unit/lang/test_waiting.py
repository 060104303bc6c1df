"""Tools that wait: for what may end, and never for what waits for the tool."""

from __future__ import annotations

import asyncio
import itertools
import random
import threading
import time
from typing import Any

import pytest

import sgl_vllm as sgl
from tests.unit.lang.scripted import EVERY_WAY, ScriptedBackend, appending

pytestmark = pytest.mark.timeout(20)

REFUSED = "RuntimeError: a tool cannot read the prompt that called it, nor wait for"


@pytest.fixture(autouse=True)
def scripted():
    sgl.set_default_backend(ScriptedBackend(lambda prompt: "ok"))


def is_refused(program, *args):
    """However the program is run."""
    with pytest.raises(sgl.ProgramError, match=REFUSED):
        program.run(*args)
    with pytest.raises(sgl.ProgramError, match=REFUSED):
        list(program.run(*args, stream=True).text_iter())
    with pytest.raises(sgl.ProgramError, match=REFUSED):
        asyncio.run(program.run_async(*args))


# --- what waits for the tool ---------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["gather_variable", "concate_and_append"])
def test_a_tool_of_a_branch_cannot_read_what_follows_the_join_of_the_branch(mode):
    @sgl.function
    def program(s):
        s += "x"
        forks = s.fork(2)
        joined = threading.Event()
        forks[0] += sgl.tool("t", lambda: joined.wait(5) and s.text())
        forks[1] += "y"
        forks.join(mode)
        joined.set()
        s.text()

    is_refused(program)


def test_a_tool_cannot_read_a_branch_that_starts_after_it():
    @sgl.function
    def program(s):
        made: list[Any] = []
        forked = threading.Event()

        def read() -> object:
            forked.wait(5)
            return made[0].text()

        s += sgl.tool("t", read)
        made += s.fork(1)[0].fork(1)
        forked.set()
        s.text()

    is_refused(program)


@pytest.mark.parametrize("num_branches", [2, 3])
def test_async_tools_of_branches_cannot_read_each_other_in_a_circle(num_branches):
    @sgl.function
    async def program(s):
        forks = s.fork(num_branches)
        all_there = asyncio.Event()

        async def read(i):
            await all_there.wait()
            return await forks[(i + 1) % num_branches].text()

        forks += lambda i: sgl.tool("t", read, i)
        all_there.set()
        forks.join()
        return await s["t"]

    is_refused(program)


part = appending("part" + sgl.gen("p"))


@pytest.mark.parametrize(
    "read",
    [
        lambda s: s.text(),
        lambda s: list(s.text_iter()),
        lambda s: s.fork(2).first(lambda branch: True),
        lambda s: part.compile()(s),
    ],
    ids=["text", "text_iter", "first", "compiled"],
)
def test_whatever_else_waits_for_the_prompt_of_the_tool_is_refused_too(read):
    @sgl.function
    def program(s):
        s += "x" + sgl.tool("t", lambda: read(s))
        s.text()

    is_refused(program)


def test_a_tool_of_an_agent_cannot_read_a_join_that_waits_for_the_agent():
    @sgl.function
    def program(s):
        forks = s.fork(1)
        joined = threading.Event()

        def reads() -> str:
            """Reads."""
            joined.wait(5)
            return str(s.text())

        forks += sgl.agent("answer", "Go.", [reads], on_error="raise")
        forks.join()
        joined.set()
        s.text()

    calls = '{"calls": [{"tool": "reads", "arguments": {}}]}'
    sgl.set_default_backend(ScriptedBackend(lambda prompt: calls))
    with pytest.raises(sgl.ProgramError, match=REFUSED):
        program.run()


# --- programs inside of tools --------------------------------------------------------------------


@sgl.function
def reads_in_its_function(s, outer):
    s += outer.text()


@sgl.function
def reads_in_a_tool(s, outer):
    s += "x"
    branch = s.copy()
    branch += sgl.tool("t", outer.text)
    return branch["t"]


@pytest.mark.parametrize("inner", [reads_in_its_function, reads_in_a_tool])
@EVERY_WAY
def test_a_program_that_a_tool_runs_cannot_read_the_prompt_of_the_tool(inner, way):
    @sgl.function
    def program(s):
        s += "x" + sgl.tool("t", way, inner, s)
        s.text()

    is_refused(program)


def test_a_program_that_an_async_tool_runs_cannot_read_the_prompt_of_the_tool():
    @sgl.function
    def program(s):
        s += "x" + sgl.tool("t", reads_in_a_tool.run_async, s)
        s.text()

    is_refused(program)


# --- what does not wait for the tool -------------------------------------------------------------


@pytest.mark.parametrize("tool", [sgl.tool, sgl.read_only_tool])
def test_a_tool_may_read_what_does_not_wait_for_it(tool):
    @sgl.function
    def program(s):
        s += "x" + sgl.gen("a")
        before = s.copy()
        forks = s.fork(3)
        forks[2] += "z" + sgl.gen("v")
        forks[1] += "y" + sgl.tool("u", lambda: forks[2]["v"])
        forks[0] += tool("t", lambda: forks[1]["u"] + s["a"] + forks[2].text() + before.text())
        forks[1] += sgl.tool("late", lambda: forks[0]["t"])
        forks.join()
        return s["t"], s["late"]

    text = "okokxokzokxok"
    assert program.run().ret_value == ([text], [text])


def test_what_a_tool_has_left_behind_may_read_its_prompt():
    @sgl.function
    async def program(s):
        ended = asyncio.Event()
        left = []

        async def read_later():
            await ended.wait()
            return await s.text()

        async def leave():
            left.append(asyncio.create_task(read_later()))

        s += "x" + sgl.tool("t", leave)
        await s["t"]
        ended.set()
        return await left[0]

    assert program.run().ret_value == "xNone"


@pytest.mark.parametrize("seed", range(30))
def test_tools_end_whatever_they_read_and_are_refused_only_in_a_circle(seed):
    drawn = random.Random(seed)
    count = drawn.randint(2, 6)
    order = drawn.sample(range(count), count)
    pairs = list(itertools.combinations(order, 2))  # each reads only what comes after it
    reads = set(drawn.sample(pairs, drawn.randint(0, len(pairs))))
    has_circle = drawn.random() < 0.5 and bool(reads)
    if has_circle:
        reader, read = drawn.choice(sorted(reads))
        reads.add((read, reader))

    @sgl.function
    def program(s):
        forks = s.fork(count)
        all_there = threading.Event()

        def read(branch):
            all_there.wait(5)
            time.sleep(drawn.random() / 100)
            return branch.text()

        for i, j in drawn.sample(sorted(reads), len(reads)):
            forks[i] += sgl.tool("t", read, forks[j])
        all_there.set()
        forks += "end"
        forks.join("concate_and_append")

    if has_circle:
        with pytest.raises(sgl.ProgramError, match=REFUSED):
            program.run(timeout_s=10)
    else:
        assert program.run(timeout_s=10).text().endswith("end")
