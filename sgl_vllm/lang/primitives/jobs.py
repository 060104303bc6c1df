"""Runs coroutines, a number of them at once, until all are done or enough is known.

Owns the order in which they start and are heard. Knows no prompts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeAlias, TypeVar  # Any: what a coroutine sends is not used

T = TypeVar("T")

Job: TypeAlias = Callable[[], Coroutine[Any, Any, T]]


async def run_jobs(
    jobs: Sequence[Job[T]],
    at_once: int | None,
    ended: Callable[[int, T | Exception], object],
) -> int:
    """Run `jobs`, at most `at_once` at a time (None: all), in their order.

    Each calls ``ended(index, result or error)``. If that returns something true, no more jobs
    start, and those that run are canceled. Returns how many have started.
    """
    running: dict[asyncio.Task[T], int] = {}
    num_started = 0
    try:
        while running or num_started < len(jobs):
            while num_started < len(jobs) and (at_once is None or len(running) < at_once):
                running[asyncio.ensure_future(jobs[num_started]())] = num_started
                num_started += 1
            await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in [task for task in running if task.done()]:
                index = running.pop(task)
                try:
                    result: T | Exception = task.result()
                except Exception as error:
                    result = error
                if ended(index, result):
                    return num_started
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    return num_started


async def results_of(jobs: Sequence[Job[T]], at_once: int | None) -> list[T]:
    """The results of all `jobs`, in their order. Raises the first error, and cancels the rest."""
    results: dict[int, T] = {}
    errors: list[Exception] = []

    def ended(index: int, result: T | Exception) -> bool:
        if isinstance(result, Exception):
            errors.append(result)
            return True
        results[index] = result
        return False

    await run_jobs(jobs, at_once, ended)
    if errors:
        raise errors[0]
    return [results[index] for index in range(len(jobs))]
