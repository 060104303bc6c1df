"""Tools: the program's own functions, called between its other operations."""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

import sgl_vllm as sgl
from sgl_vllm.lang.loop import background_loop
from sgl_vllm.lang.prefill_ahead import ToolTimes
from tests.unit.lang.scripted import appending

pytestmark = [pytest.mark.usefixtures("backend"), pytest.mark.timeout(20)]


def add(a, b=0):
    return a + b


async def add_slowly(a, b=0):
    await asyncio.sleep(0.01)
    return a + b


class Adder:
    async def __call__(self, a, b=0):
        return await add_slowly(a, b)


@pytest.mark.parametrize(
    "function",
    [add, add_slowly, Adder(), functools.partial(add_slowly), lambda a, b: a + b],
    ids=["plain", "async", "object", "partial", "lambda"],
)
def test_the_result_is_appended_and_is_a_variable_with_its_type(function):
    program = appending("1+2=" + sgl.tool("sum", function, 1, b=2) + " and " + sgl.gen("a"))
    state = program.run()
    assert state.text() == "1+2=3 and [10]"
    assert state["sum"] == 3


def test_a_variable_as_an_argument_is_its_value(server):
    server.reply = lambda prompt: "20"

    @sgl.function
    def program(s):
        s.set_var("list", [1, 2])
        s += "x" + sgl.gen_int("n") + "+22=" + sgl.tool("sum", add, sgl.var("n"), b=22)
        s += "," + sgl.tool("more", add, sgl.var("list"), [3])

    state = program.run()
    assert state.text() == "x20+22=42,[1, 2, 3]"
    assert (state["sum"], state["more"]) == (42, [1, 2, 3])


def test_it_is_called_once_when_everything_before_it_is_there(server):
    server.latency_s = 0.05
    called = []

    def look(text):
        called.append((text, len(server.calls)))
        return "seen"

    @sgl.function
    def program(s):
        s += "x" + sgl.gen("a")
        s += sgl.tool("t", look, sgl.var("a"))
        assert not called
        s += sgl.gen("b")

    assert program.run().text() == "x[1]seen[8]"
    assert called == [("[1]", 1)]


@pytest.mark.parametrize(
    "raised",
    [SystemExit(2), KeyboardInterrupt(), StopIteration(), asyncio.CancelledError(), TimeoutError()],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("is_async", [False, True], ids=["plain", "async"])
def test_whatever_it_raises_ends_the_program_and_nothing_else(raised, is_async):
    def plain():
        raise raised

    async def native():
        raise raised

    @sgl.function
    def program(s, function):
        s += "x" + sgl.tool("t", function) if function else sgl.gen("a")

    with pytest.raises(sgl.ProgramError, match=f"tool .* failed.*{type(raised).__name__}"):
        program.run(native if is_async else plain)
    assert program.run(None).text() == "[0]"  # the language still works


def test_tools_of_branches_run_at_the_same_time():
    together = threading.Barrier(4, timeout=5)

    @sgl.function
    def program(s):
        s += "x"
        forks = s.fork(4)
        forks += lambda i: sgl.tool("t", together.wait)
        forks.join()

    assert sorted(program.run()["t"]) == [0, 1, 2, 3]


def test_an_async_tool_is_cancelled_with_the_program():
    ended = []

    async def wait():
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(True)

    started = time.monotonic()
    with pytest.raises(sgl.ProgramError, match=r"tool wait for 't' failed: .*timeout_s=0\.1"):
        appending(sgl.tool("t", wait)).run(timeout_s=0.1)
    while not ended and time.monotonic() - started < 5:
        time.sleep(0.01)  # the program does not wait for requests that it has cancelled
    assert ended == [True]


def test_a_tool_without_a_name_only_appends():
    @sgl.function
    def program(s):
        with s.var_scope("all"):
            s += "a" + sgl.tool(None, lambda: None) + "b"

    state = program.run()
    assert state["all"] == "aNoneb"


# --- programs inside of tools --------------------------------------------------------------------


with_tool = appending("in" + sgl.tool("t", lambda: "side"))


@pytest.mark.parametrize(
    "nested",
    [
        lambda: with_tool.run(timeout_s=5).text(),
        lambda: with_tool.run_batch([{}], timeout_s=5)[0].text(),
        lambda: asyncio.run(with_tool.run_async(timeout_s=5)).text(),
    ],
    ids=["run", "run_batch", "run_async"],
)
def test_tools_that_take_all_threads_can_run_programs_with_tools(monkeypatch, nested):
    for name in ("_tool_threads", "_body_threads"):
        monkeypatch.setattr(background_loop(), name, ThreadPoolExecutor(2))

    @sgl.function
    def program(s):
        forks = s.fork(5)
        forks += sgl.tool("t", nested)
        forks.join()

    assert program.run(timeout_s=10)["t"] == ["inside"] * 5


@pytest.mark.parametrize("where", ["function", "tool"])
def test_functions_that_take_all_threads_can_run_programs_with_functions_in_threads(
    monkeypatch, where
):
    monkeypatch.setattr(background_loop(), "_body_threads", ThreadPoolExecutor(2))

    async def nested():
        async with asyncio.timeout(5):
            return (await with_tool.run_async())["t"]

    @sgl.function
    def program(s):
        if where == "function":
            return asyncio.run(nested())
        s += sgl.tool("t", nested)
        return s["t"]

    async def main():
        return await asyncio.gather(*(program.run_async() for _ in range(5)))

    assert [state.ret_value for state in asyncio.run(main())] == ["side"] * 5


# --- how long they take --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "soonest_s"),
    [
        ([1, 1, 1], None),  # three calls tell nothing
        ([4, 1, 3, 2], 2),  # three in four take at least as long
        (range(1, 17), 5),
        ([100] * 50 + [1] * 16, 1),  # the last 16 count
    ],
)
def test_how_soon_a_tool_returns_is_known_from_its_last_calls(seconds, soonest_s):
    times = ToolTimes()
    for one in seconds:
        times.took("search", one)
    assert times.soonest_s("search") == soonest_s
    assert times.soonest_s("another") is None
    for number in range(512):  # the tools used last are remembered
        times.took(f"tool {number}", 1)
    assert times.soonest_s("search") is None
