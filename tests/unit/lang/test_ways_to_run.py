"""However a program is run: its results, its errors, its time limit, its contextvars."""

from __future__ import annotations

import asyncio
import contextvars
from concurrent.futures import ThreadPoolExecutor

import pytest

import sgl_vllm as sgl
from tests.unit.lang.conftest import seen_to_go
from tests.unit.lang.scripted import EVERY_WAY, ScriptedBackend

pytestmark = [pytest.mark.usefixtures("backend"), pytest.mark.timeout(30)]

user: contextvars.ContextVar[str] = contextvars.ContextVar("user", default="nobody")


@sgl.function
async def native(s, q):
    seen = user.get()
    s += q + sgl.gen("a", max_tokens=5)
    s += await s["a"] + sgl.gen("b", max_tokens=5) + sgl.tool("t", user.get)
    if q == "fails":
        s += "goes on" + sgl.gen("c")
        raise ZeroDivisionError
    return seen, await s["t"]


@sgl.function
def plain(s, q):
    seen = user.get()
    user.set("the function's own")
    s += q + sgl.gen("a", max_tokens=5)
    s += s["a"] + sgl.gen("b", max_tokens=5) + sgl.tool("t", user.get)
    if q == "fails":
        s += "goes on" + sgl.gen("c")
        raise ZeroDivisionError
    return seen, s["t"]


BOTH = pytest.mark.parametrize("program", [native, plain], ids=["async", "sync"])


def stalled(server, after=""):
    """From now on, completions of prompts that have `after` are never answered."""

    async def fault(path, body):
        if path.endswith("completions") and after in str(body.get("prompt")):
            await asyncio.sleep(60)

    server.fault = fault


@EVERY_WAY
@BOTH
def test_it_gives_the_same_and_has_the_contextvars_of_its_caller(program, way):
    def call():
        user.set("me")
        return way(program, "x")

    states = contextvars.copy_context().run(call)
    assert {state.text() for state in states} == {"x[1][1][7]me"}
    assert {state.ret_value for state in states} == {("me", "me")}


def test_what_a_function_in_a_thread_sets_is_seen_by_no_other_item():
    states = plain.run_batch([("x",)] * 20, backend=ScriptedBackend(), num_threads=1)
    assert {state.ret_value[0] for state in states} == {"nobody"}


@EVERY_WAY
@BOTH
def test_what_the_function_raises_is_raised_and_ends_its_requests(server, program, way):
    stalled(server, after="goes on")
    with pytest.raises(ZeroDivisionError):
        way(program, "fails")


@EVERY_WAY
@BOTH
def test_its_time_limit_reaches_the_request(server, program, way):
    stalled(server)
    with pytest.raises(sgl.ProgramError, match=r"gen 'a' failed: .* timeout_s=0\.2") as caught:
        way(program, "x", timeout_s=0.2)
    assert isinstance(caught.value.__cause__, TimeoutError)
    assert seen_to_go(server) >= 1


@EVERY_WAY
def test_its_time_limit_ends_the_function_of_an_async_program_too(way):
    ended = []

    @sgl.function
    async def program(s):
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(True)

    with pytest.raises(sgl.ProgramError, match=r"the program's function failed: .*=0\.1"):
        way(program, timeout_s=0.1)
    assert ended


def test_the_time_limit_of_a_batch_bounds_each_item_not_all(server):
    stalled(server, after="bad")
    items = [("x",), ("bad",), ("y",)]
    first, second, third = native.run_batch(items, timeout_s=1, return_errors=True, num_threads=1)
    assert (first["a"], third["a"]) == ("[1]", "[1]")
    assert isinstance(second, sgl.ProgramError)


def test_a_run_that_was_in_time_can_go_on_after_it():
    state = native.run("x", timeout_s=0.5)
    asyncio.run(asyncio.sleep(0.6))
    state += sgl.gen("c")
    assert state["c"]


@pytest.mark.timeout(20)
def test_a_batch_for_which_no_thread_starts_ends_with_that_error(monkeypatch):
    def submit(self: ThreadPoolExecutor, *args: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(ThreadPoolExecutor, "submit", submit)
    errors = plain.run_batch([("x",), ("y",)], return_errors=True)
    assert [str(error) for error in errors] == ["can't start new thread"] * 2


@pytest.mark.parametrize(
    "raised", [SystemExit("bye"), KeyboardInterrupt(), StopIteration(), asyncio.CancelledError()]
)
def test_whatever_the_function_raises_ends_its_run_and_not_the_language(raised):
    @sgl.function
    async def raises(s):
        s += "x"
        raise raised

    @sgl.function
    def raises_plainly(s):
        s += "x"
        raise raised

    for program in (raises, raises_plainly):
        errors = program.run_batch([{}, {}], return_errors=True)  # of several, the prefix is traced
        assert all(isinstance(error, BaseException) for error in errors)
        with pytest.raises(BaseException):  # noqa: B017
            program.run(stream=True).text()
    with pytest.raises(Exception, match=type(raised).__name__):
        raises.run()
    if not isinstance(raised, asyncio.CancelledError):
        with pytest.raises((RuntimeError, type(raised))):
            asyncio.run(raises_plainly.run_async())
    assert plain.run("x")["a"] == "[1]"
