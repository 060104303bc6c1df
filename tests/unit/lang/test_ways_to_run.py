"""However a program is run: its results, errors, time limit and contextvars; cancellation."""

from __future__ import annotations

import asyncio
import contextvars
import threading
import time
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
    with pytest.raises(sgl.ProgramError, match=r"gen 'a' failed: .* timeout_s=0\.5") as caught:
        way(program, "x", timeout_s=0.5)
    assert isinstance(caught.value.__cause__, TimeoutError)
    assert seen_to_go(server) >= 1


@EVERY_WAY
def test_its_time_limit_ends_the_function_of_an_async_program_too(way):
    ended = threading.Event()

    @sgl.function
    async def program(s):
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    with pytest.raises(sgl.ProgramError, match=r"the program's function failed: .*=0\.1"):
        way(program, timeout_s=0.1)
    assert ended.wait(5)  # a streamed run tells its readers first


def test_the_time_limit_of_a_batch_bounds_each_item_not_all(server):
    stalled(server, after="bad")
    items = [("x",), ("bad",), ("y",)]
    first, second, third = native.run_batch(items, timeout_s=2, return_errors=True, num_threads=1)
    assert (first["a"], third["a"]) == ("[1]", "[1]")
    assert isinstance(second, sgl.ProgramError)


def test_a_run_that_was_in_time_can_go_on_after_it():
    state = native.run("x", timeout_s=1)
    asyncio.run(asyncio.sleep(1.1))
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


# --- programs that are ``async def``, and programs in an event loop -------------------------------


@sgl.function
async def ask(s, q):
    s += q + sgl.gen("a", max_tokens=5)
    first = await s["a"]
    s += first + sgl.gen("b", max_tokens=5)
    return first


def test_all_that_reads_is_awaited_as_often_as_one_likes():
    @sgl.function
    async def program(s):
        s += sgl.user("Q")
        with s.assistant():
            s += "A:" + sgl.gen("a", return_logprob=True)
        waiting = s["a"]
        once, again, never = await waiting, await waiting, s["a"]
        assert never is not waiting
        return {
            "reads": [once, again, await s.get_var("a")],
            "text": await s.text(),
            "messages": await s.messages(),
            "meta": (await s.get_meta_info("a"))["finish_reason"],
            "error": await s.error(),
            "sync": await s.sync(),
            "has": ("a" in s, "b" in s),
        }

    got = program.run().ret_value
    assert got["reads"] == ["[23]"] * 3
    assert got["text"] == "QA:[23]"
    assert got["messages"][1] == {"role": "assistant", "content": "A:[23]"}
    assert (got["meta"], got["error"], got["sync"], got["has"]) == (
        "stop",
        None,
        None,
        (True, False),
    )


@pytest.mark.parametrize(
    "use",
    [
        lambda value: f"said {value}",
        str,
        bool,
        lambda value: value == "ok",
        lambda value: "o" in value,
        len,
    ],
    ids=["f-string", "str", "bool", "==", "in", "len"],
)
def test_a_forgotten_await_is_an_error_that_names_it(use):
    @sgl.function
    async def program(s):
        s += "A:" + sgl.gen("a")
        use(s["a"])

    with pytest.raises(TypeError, match=r"await s\['a'\]"):
        program.run()


def test_another_program_can_be_a_part_of_it_and_be_run_by_it():
    @sgl.function
    async def part(s, q):
        s += q + sgl.gen("p")
        return await s["p"]

    @sgl.function
    async def whole(s):
        inside = await part(s, "x")
        beside = await part.run_async("yy")
        return inside, beside["p"], await s.text()

    assert whole.run().ret_value == ("[1]", "[2]", "x[1]")
    assert asyncio.run(whole.run_async()).ret_value == ("[1]", "[2]", "x[1]")


def test_it_runs_in_the_callers_loop_and_task_as_the_caller_expects():
    async def main():
        here = asyncio.current_task()

        @sgl.function
        async def program(s):
            assert asyncio.current_task() is here
            s += "x" + sgl.gen("a")
            return await s["a"]

        return (await program.run_async()).ret_value

    assert asyncio.run(main()) == "[1]"


@BOTH
def test_a_plain_run_works_where_a_loop_is_running_as_in_a_notebook(program):
    async def cell():
        return program.run("x").text()

    assert asyncio.run(cell()).startswith("x[1][1][7]")


# --- cancelling and time limits -----------------------------------------------------------------


@BOTH
def test_cancelling_run_async_reaches_the_request(server, program):
    stalled(server)

    async def main():
        task = asyncio.create_task(program.run_async("x"))
        while not server.calls:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert seen_to_go(server) == 1
    assert len(server.calls) == 1


def test_cancelling_a_batch_cancels_all_requests_in_flight(server):
    stalled(server)

    async def main():
        task = asyncio.create_task(ask.run_batch_async([("x",)] * 20, num_threads=5))
        while len(server.calls) < 5:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert seen_to_go(server, 5) == 5
    time.sleep(0.1)
    assert len(server.calls) == 5
