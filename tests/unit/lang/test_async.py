"""Programs that are ``async def``, and programs that run in an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import time

import pytest

import sgl_vllm as sgl
from sgl_vllm.lang.loop import background_loop
from tests.unit.lang.conftest import seen_to_go

pytestmark = [pytest.mark.usefixtures("backend"), pytest.mark.timeout(30)]


@sgl.function
async def ask(s, q):
    s += q + sgl.gen("a", max_tokens=5)
    first = await s["a"]
    s += first + sgl.gen("b", max_tokens=5)
    return first


@sgl.function
def ask_plainly(s, q):
    s += q + sgl.gen("a", max_tokens=5)
    first = s["a"]
    s += first + sgl.gen("b", max_tokens=5)
    return first


BOTH = pytest.mark.parametrize("program", [ask, ask_plainly], ids=["async", "sync"])


def stalled(server, *, after=""):
    """From now on, completions of prompts that end with `after` are never answered."""

    async def fault(path, body):
        if path.endswith("completions") and str(body.get("prompt")).endswith(after):
            await asyncio.sleep(60)

    server.fault = fault


# --- what an async program can do ---------------------------------------------------------------


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

    assert asyncio.run(cell()) == "x[1][1][7]"


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


# --- errors -------------------------------------------------------------------------------------


def test_nothing_is_left_on_the_loop(server):
    stalled(server, after="bad")
    for q in ("x", "bad"):
        with pytest.raises(sgl.ProgramError) if q == "bad" else contextlib.nullcontext():
            asyncio.run(ask.run_async(q, timeout_s=0.5))
        with pytest.raises(sgl.ProgramError) if q == "bad" else contextlib.nullcontext():
            ask.run(q, timeout_s=0.5)

    async def tasks():
        await asyncio.sleep(0.1)
        return [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]

    assert background_loop().start(tasks()).result(timeout=5) == []
