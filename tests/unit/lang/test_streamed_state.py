"""The state that run(stream=True) returns: who waits for its function, and how it is stopped."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

import sgl_vllm as sgl
from tests.unit.lang.conftest import seen_to_go

pytestmark = [pytest.mark.usefixtures("backend"), pytest.mark.timeout(20)]


# --- other threads ------------------------------------------------------------------------------


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_a_reader_of_a_branch_in_another_thread_does_not_wait_for_ever(is_async):
    handed: queue.Queue = queue.Queue()

    @sgl.function
    def program(s):
        s += "x"
        forks = s.fork(2)
        forks += sgl.gen("a")
        handed.put(forks[0])
        time.sleep(0.3)

    async def pieces(branch):
        return [piece async for piece in branch.text_async_iter()]

    state = program.run(stream=True)
    branch = handed.get()
    read = asyncio.run(pieces(branch)) if is_async else list(branch.text_iter())
    assert "".join(read) == "x[1]"
    assert state.text() == "x"


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_a_reader_of_its_own_branch_sees_the_end_of_the_function(is_async):
    go_on = threading.Event()

    @sgl.function
    def program(s):
        s += "x"
        go_on.wait(5)

    async def pieces(branch):
        return [piece async for piece in branch.text_async_iter()]

    state = program.run(stream=True)
    branch = state.copy()
    branch += "y"
    threading.Timer(0.3, go_on.set).start()
    read = asyncio.run(pieces(branch)) if is_async else list(branch.text_iter())
    assert "".join(read) == "xy"


@pytest.mark.parametrize("stream", [False, True])
def test_a_function_may_read_in_threads_of_its_own(stream):
    @sgl.function
    def program(s):
        s += "x" + sgl.gen("a")
        forks = s.fork(2)
        forks += lambda i: f"{i}" + sgl.gen("b")
        with ThreadPoolExecutor(4) as pool:
            text = pool.submit(s.text)
            value = pool.submit(lambda: s["a"])
            pieces = pool.map(lambda branch: "".join(branch.text_iter()), forks)
            return text.result(), value.result(), list(pieces)

    state = program.run(stream=stream)
    assert state.text() == "x[1]"
    assert state.ret_value == ("x[1]", "[1]", ["x[1]0[5]", "x[1]1[5]"])


def test_a_tool_and_a_function_may_read_the_returned_state():
    states: queue.Queue = queue.Queue()

    @sgl.function
    def program(s):
        state = states.get()
        s += "x" + sgl.gen("a")
        seen = state["a"], "".join(state.text_iter())
        forks = s.fork(1)
        forks += sgl.tool("t", lambda: state.text())
        return seen, forks[0]["t"]

    state = program.run(stream=True)
    states.put(state)
    state.text()
    assert state.ret_value == (("[1]", "x[1]"), "x[1]")


# --- stopping -----------------------------------------------------------------------------------


@sgl.function
def eight_gens(s):
    for i in range(8):
        s += f"{i}:" + sgl.gen("a")
        s.sync()


@sgl.function
async def eight_gens_async(s):
    for i in range(8):
        s += f"{i}:" + sgl.gen("a")
        await s.sync()


BOTH = pytest.mark.parametrize("program", [eight_gens, eight_gens_async], ids=["sync", "async"])


@BOTH
def test_cancel_ends_the_requests_in_flight_and_starts_no_more(server, program):
    server.reply, server.chunk_s = lambda prompt: "x" * 1000, 0.02
    state = program.run(stream=True)
    pieces = state.text_iter()
    assert any("x" in piece for piece in pieces)
    state.cancel()
    with pytest.raises(
        sgl.ProgramError, match="gen 'a' failed: the program was canceled"
    ) as caught:
        list(pieces)
    assert isinstance(caught.value.__cause__, sgl.ProgramCancelled)
    for read in (state.text, lambda: state["a"], lambda: list(state.text_iter("a"))):
        with pytest.raises(sgl.ProgramError, match="gen 'a' failed: the program was canceled"):
            read()
    assert seen_to_go(server) == 1
    assert len(server.calls) == 1


@BOTH
def test_leaving_the_with_block_cancels_what_is_left(server, program):
    server.reply, server.chunk_s = lambda prompt: "x" * 1000, 0.02
    with program.run(stream=True) as state:
        assert any("x" in piece for piece in state.text_iter())
    assert seen_to_go(server) == 1

    async def main():
        with await program.run_async(stream=True) as state:
            async for piece in state.text_async_iter():
                if "x" in piece:
                    raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        asyncio.run(main())
    assert seen_to_go(server, 2) == 2
    assert len(server.calls) == 2


@BOTH
def test_a_run_that_is_over_stays_readable_after_it(program):
    with program.run(stream=True) as state:
        whole = "".join(state.text_iter())
    state.cancel()
    assert state.text() == whole
    assert state["a"] in whole
    state += "!"
    assert state.text() == whole + "!"


def test_cancel_does_not_wait_for_a_function_that_is_busy(server):
    is_busy, go_on, ended = threading.Event(), threading.Event(), threading.Event()

    @sgl.function
    def program(s):
        s += "x"
        is_busy.set()
        go_on.wait(10)
        s += "y" + sgl.gen("a")
        ended.set()

    state = program.run(stream=True)
    is_busy.wait(5)
    waiting = ThreadPoolExecutor(3)
    reads: list[Future[Any]] = [
        waiting.submit(lambda: list(state.text_iter())),
        waiting.submit(lambda: list(state.text_iter("a"))),
        waiting.submit(state.text),
    ]
    time.sleep(0.1)
    state.cancel()
    for read in reads:
        with pytest.raises(sgl.ProgramError, match=r"the program's function failed: .*canceled"):
            read.result(5)
    go_on.set()
    assert ended.wait(5)
    assert server.calls == []
    with pytest.raises(sgl.ProgramError, match=r"the program's function failed: .*canceled"):
        state.text()


def test_a_time_limit_does_not_wait_for_a_function_that_is_busy():
    go_on = threading.Event()

    @sgl.function
    def program(s):
        go_on.wait(10)

    state = program.run(stream=True, timeout_s=0.1)
    with pytest.raises(sgl.ProgramError, match=r"the program's function failed: .*timeout_s=0\.1"):
        list(state.text_iter())
    go_on.set()


def test_the_with_block_of_a_copy_still_joins_it(server):
    state = eight_gens.run(stream=True)
    whole = state.text()
    with state.copy() as copied:
        copied += sgl.gen("c")
    assert state["c"] == [f"[{len(whole)}]"]
    assert server.gone == []
