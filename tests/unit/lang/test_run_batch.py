"""run_batch: order, bounded concurrency, errors, the iterator."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref

import pytest

import sgl_vllm as sgl
from tests.unit.lang.http_server import refusing
from tests.unit.lang.scripted import ScriptedBackend

pytestmark = pytest.mark.usefixtures("backend")


@sgl.function
def ask(s, q):
    s += q + sgl.gen("a", max_tokens=5)


@sgl.function
def ask_and_read(s, q):
    s += q + sgl.gen("a", max_tokens=5)
    s += s["a"]
    s += sgl.gen("b", max_tokens=5)


def questions(count):
    return [{"q": "x" * (i + 1)} for i in range(count)]


def test_states_come_in_the_items_order_whatever_finishes_first(server):
    async def slow_first(path, body):
        await asyncio.sleep(0.3 if body.get("prompt") == "x" else 0)

    server.fault = slow_first
    states = ask.run_batch(questions(20))
    assert [state["a"] for state in states] == [f"[{i + 1}]" for i in range(20)]


def test_an_item_may_be_a_dict_or_a_sequence():
    assert [state["a"] for state in ask.run_batch([("xx",), {"q": "xxx"}])] == ["[2]", "[3]"]


@pytest.mark.parametrize("item", [{"wrong": 1}, ("a", "b"), "ab"])
def test_an_item_that_does_not_fit_the_function_is_refused_before_anything_runs(server, item):
    with pytest.raises(TypeError):
        ask.run_batch([{"q": "x"}, item])
    assert server.requests == []


def test_an_empty_batch_is_an_empty_list():
    assert ask.run_batch([]) == []


def test_concurrency_is_bounded_by_num_threads(server):
    server.latency_s = 0.05
    ask.run_batch(questions(20), num_threads=4)
    assert server.most_at_once == 4
    with pytest.raises(ValueError):
        ask.run_batch(questions(1), num_threads=0)


def test_two_hundred_concurrent_programs_do_not_take_two_hundred_threads(server):
    together = 0
    all_there = asyncio.Event()

    async def wait_for_all(path, body):
        nonlocal together
        if path == "/v1/completions":
            together += 1
            if together == 200:
                all_there.set()
            await all_there.wait()

    server.fault = wait_for_all
    peak = []

    @sgl.function
    def program(s, q):
        s += q + sgl.gen("a", max_tokens=5)
        peak.append(threading.active_count())

    before = threading.active_count()
    states = program.run_batch(questions(200), num_threads=200)
    assert [state["a"] for state in states] == [f"[{i + 1}]" for i in range(200)]
    assert max(peak) - before <= 100  # a thread that is idle is used again


def test_bodies_that_read_run_concurrently_too(server):
    server.latency_s = 0.3
    started = time.monotonic()
    states = ask_and_read.run_batch(questions(30), num_threads=30)
    assert [state["a"] for state in states] == [f"[{i + 1}]" for i in range(30)]
    assert time.monotonic() - started < 9  # sequentially, it would be 18 s


def test_the_first_error_is_raised_once_all_have_finished(server):
    server.fault = refusing(lambda path, body: body.get("prompt") in ("xx", "xxxx"))
    with pytest.raises(sgl.ProgramError, match="gen 'a' failed") as caught:
        ask.run_batch(questions(6), num_threads=2)
    assert len(server.bodies("/v1/completions")) == 6
    assert "2 of 6 programs" in caught.value.__notes__[0]


def test_a_whole_batch_fails_at_once_if_there_is_no_server():
    backend = sgl.VLLM("http://127.0.0.1:9")  # with its usual retries
    started = time.monotonic()
    errors = ask.run_batch(questions(60), backend=backend, return_errors=True)
    assert time.monotonic() - started < 10
    assert all("no answer from" in str(error) for error in errors)


def test_a_batch_asks_once_what_the_server_is(server):
    server.latency_s = 0.05
    ask.run_batch(questions(20), backend=sgl.VLLM(server.url))
    assert [path for path, _ in server.requests].count("/v1/models") == 1


def test_the_iterator_gives_results_while_the_rest_still_runs(server):
    released = threading.Event()

    async def held_last(path, body):
        while body.get("prompt") == "xxx" and not released.is_set():
            await asyncio.sleep(0.005)

    server.fault = held_last
    states = ask.run_batch(questions(3), generator_style=True)
    assert next(states)["a"] == "[1]"
    released.set()
    assert [state["a"] for state in states] == ["[2]", "[3]"]


def test_leaving_the_iterator_cancels_requests_in_flight(server):
    async def slow(path, body):
        await asyncio.sleep(30 if body.get("prompt", "").startswith("xx") else 0)

    server.fault = slow
    states = ask_and_read.run_batch(questions(40), generator_style=True, num_threads=8)
    started = time.monotonic()
    with pytest.raises(StopIteration):
        for state in states:
            assert state["a"]
            states.close()
            next(states)
    assert time.monotonic() - started < 5
    for thread in threading.enumerate():
        if thread.name.startswith("sgl-vllm-body"):
            thread.join(5)
            assert not thread.is_alive()
    assert len(server.bodies("/v1/completions")) <= 10


def test_a_progress_bar_counts_to_the_end(capsys):
    ask.run_batch(questions(3), progress_bar=True)
    assert "3/3" in capsys.readouterr().err


def test_the_iterator_does_not_keep_the_states_that_it_has_given(backend):
    states, alive = [], []
    for state in ask.run_batch(questions(30), generator_style=True, num_threads=2):
        states.append(weakref.ref(state))
        del state
        gc.collect()
        alive.append(sum(known() is not None for known in states))
    assert max(alive) <= 3


def test_canceling_an_awaited_batch_leaves_no_warning_about_unread_exceptions(caplog):
    async def wait(_: object) -> None:
        await asyncio.sleep(60)

    async def main():
        batch = ask.run_batch_async(questions(5), backend=ScriptedBackend(before=wait))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(batch, 0.2)
        await asyncio.sleep(0.2)  # the runs end
        gc.collect()

    asyncio.run(main())
    gc.collect()
    assert caplog.text == ""
