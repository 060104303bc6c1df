"""Calls that arrive while one runs share the next run, and never get an older answer."""

from __future__ import annotations

import asyncio
import itertools

from sgl_vllm.routes.coalescing import Coalescer


class Slow:
    """Answers with the number of the run, as long after its begin as `go` says."""

    def __init__(self) -> None:
        self.begun = 0
        self.go = asyncio.Event()

    async def __call__(self) -> int:
        self.begun += 1
        number = self.begun
        await self.go.wait()
        return number


async def until(condition) -> None:
    for _ in range(100):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("it never became true")


def test_calls_that_arrive_during_a_run_share_the_next_one() -> None:
    async def run() -> tuple[list[int], int]:
        shared, slow = Coalescer[int](), Slow()
        first = asyncio.create_task(shared.call("key", slow))
        await until(lambda: slow.begun == 1)
        later = [asyncio.create_task(shared.call("key", slow)) for _ in range(20)]
        await asyncio.sleep(0)
        slow.go.set()
        return await asyncio.gather(first, *later), slow.begun

    answers, num_runs = asyncio.run(run())
    assert answers == [1] + [2] * 20
    assert num_runs == 2


def test_a_caller_that_leaves_takes_no_answer_from_the_others() -> None:
    async def run() -> int:
        shared, slow = Coalescer[int](), Slow()
        leaving, staying = (asyncio.create_task(shared.call("key", slow)) for _ in range(2))
        await until(lambda: slow.begun == 1)
        leaving.cancel()
        slow.go.set()
        return await staying

    assert asyncio.run(run()) == 1


def test_all_who_share_a_run_get_its_exception_and_the_next_call_runs_again() -> None:
    async def fail() -> int:
        raise ValueError("no answer")

    async def run() -> list[object]:
        shared, slow = Coalescer[int](), Slow()
        slow.go.set()
        calls = (shared.call("key", fail) for _ in range(3))
        failed = await asyncio.gather(*calls, return_exceptions=True)
        return [*map(repr, failed), await shared.call("key", slow)]

    assert asyncio.run(run()) == [repr(ValueError("no answer"))] * 3 + [1]


def test_runs_of_all_keys_take_turns_and_rest() -> None:
    async def run() -> list[tuple[float, float]]:
        shared = Coalescer[None](rest=4)
        now_s = asyncio.get_running_loop().time
        runs: list[tuple[float, float]] = []

        async def slow() -> None:
            begin_s = now_s()
            await asyncio.sleep(0.02)
            runs.append((begin_s, now_s()))

        await asyncio.gather(*[shared.call(key, slow) for key in range(4)])
        return runs

    runs = asyncio.run(run())
    for (begin_s, end_s), (next_s, _) in itertools.pairwise(runs):
        assert next_s - end_s >= 3.9 * (end_s - begin_s)
    assert len(runs) == 4
