"""`group.first(predicate)`: the first accepted branch, and the end of the others."""

from __future__ import annotations

import asyncio
import gc
import time

import pytest

import sgl_vllm as sgl
from tests.unit.lang.conftest import seen_to_go
from tests.unit.lang.http_server import completes, refusing

pytestmark = [pytest.mark.usefixtures("backend"), pytest.mark.timeout(20)]


def slow_unless(*quick, when=lambda: True):
    """Completions of prompts that end with one of `quick` come as soon as `when()`, others in a
    minute."""

    async def fault(path, body):
        if not path.endswith("completions"):
            return
        if not str(body["prompt"]).endswith(quick):
            await asyncio.sleep(60)
        while not when():
            await asyncio.sleep(0.01)

    return fault


def test_the_losers_requests_are_cancelled_and_join_brings_the_winner_alone(server):
    num_losers = 3
    server.fault = slow_unless("1", when=lambda: server.at_once > num_losers)

    @sgl.function
    def program(s):
        s += "x"
        forks = s.fork(4)
        forks += lambda i: f"{i}" + sgl.gen("b")
        winner = forks.first(lambda branch: branch["b"])
        assert len(forks) == 1
        assert forks[0] is winner
        forks.join()
        s += s["b"][0]
        return winner.text()

    started = time.monotonic()
    state = program.run()
    assert state.ret_value == "x1[2]"
    assert state["b"] == ["[2]"]
    assert state.text() == "x[2]"
    assert time.monotonic() - started < 5
    assert seen_to_go(server, num_losers) == num_losers
    assert sorted(body["prompt"] for body in server.gone) == ["x0", "x2", "x3"]


def test_the_branches_of_losing_branches_are_cancelled_too(server):
    server.fault = slow_unless("win")

    @sgl.function
    def program(s):
        s += "x"
        forks = s.fork(2)
        inner = forks[0].fork(3)
        inner += lambda i: f"{i}" + sgl.gen("c")
        inner.join()
        forks[1] += "win" + sgl.gen("b")
        ends = time.monotonic() + 5
        while server.at_once < 3 and time.monotonic() < ends:
            time.sleep(0.01)
        return forks.first(lambda branch: True).text()

    state = program.run()
    assert state.ret_value == "xwin[4]"
    assert seen_to_go(server, 3) == 3


def test_of_branches_that_are_done_already_the_first_listed_is_taken(server):
    @sgl.function
    def program(s):
        forks = s.fork(8)
        forks += lambda i: f"{i}" + sgl.gen("b")
        for branch in reversed(list(forks)):
            branch.sync()
        return forks.first(lambda branch: branch["b"]).text()

    assert [program.run().ret_value for _ in range(5)] == ["0[1]"] * 5


def test_none_accepted_is_none_and_all_branches_stay(server):
    @sgl.function
    def program(s):
        forks = s.fork(3)
        forks += "y" + sgl.gen("b")
        assert forks.first(lambda branch: False) is None
        forks.join()

    assert program.run()["b"] == ["[1]"] * 3


def test_failed_branches_are_passed_over_and_forgotten(server):
    server.fault = refusing(lambda path, body: completes(path, body) and body["prompt"] != "x2")

    @sgl.function
    def program(s):
        s += "x"
        forks = s.fork(3)
        forks += lambda i: f"{i}" + sgl.gen("b")
        return forks.first(lambda branch: True).text()

    assert program.run().ret_value == "x2[2]"


def test_what_the_predicate_raises_ends_the_program_and_its_requests(server):
    server.fault = slow_unless("0")
    server.latency_s = 0.1  # by then both have finished

    @sgl.function
    def program(s):
        forks = s.fork(2)
        forks += lambda i: f"{i}" + sgl.gen("b")
        forks.first(lambda branch: 1 / 0)

    with pytest.raises(ZeroDivisionError):
        program.run()
    assert seen_to_go(server, 1) == 1


def test_losers_can_no_longer_be_written_or_forked_and_do_no_harm(server):
    server.fault = slow_unless("0")

    @sgl.function
    def program(s):
        s += "x"
        forks = s.fork(2)
        loser = forks[1]
        forks += lambda i: f"{i}" + sgl.gen("b")
        forks.first(lambda branch: True)
        loser += sgl.gen("late")
        more = loser.fork(2)
        more += sgl.gen("later")
        for lost in (loser, more[0]):
            with pytest.raises(sgl.ProgramError, match="another branch was chosen"):
                lost.text()

    program.run()


def test_in_an_async_program_it_is_awaited_and_the_predicate_may_be_async(server):
    refused: list[object] = []
    third_after_second = slow_unless("3", when=lambda: refused)

    async def fault(path, body):
        if not str(body.get("prompt")).endswith("2"):
            await third_after_second(path, body)

    server.fault = fault

    @sgl.function
    async def program(s):
        s += "x"
        forks = s.fork(4)
        forks += lambda i: f"{i}" + sgl.gen("b")

        async def is_third(branch):
            if (await branch.text()).startswith("x3"):
                return True
            refused.append(branch)
            return False

        winner = await forks.first(is_third)
        forks.join()
        return await winner["b"], await s["b"]

    assert asyncio.run(program.run_async()).ret_value == ("[2]", ["[2]"])
    assert seen_to_go(server, 2) == 2
    assert program.run().ret_value == ("[2]", ["[2]"])


@sgl.function
async def race(s):
    forks = s.fork(3)
    forks += lambda i: str(i) + sgl.gen("answer")
    return await (await forks.first(lambda branch: True))["answer"]


def test_the_losers_of_a_race_are_not_logged_by_asyncio(server, caplog):
    async def slow_losers(path, body):
        await asyncio.sleep(0 if body.get("prompt") == "1" else 0.2)

    server.fault = slow_losers
    assert race.run().ret_value == "[1]"
    gc.collect()
    asyncio.run(asyncio.sleep(0.3))
    gc.collect()
    assert [record for record in caplog.records if record.name == "asyncio"] == []
