"""`group.first` in async programs leaks nothing."""

from __future__ import annotations

import asyncio
import gc

import pytest

import sgl_vllm as sgl

pytestmark = pytest.mark.usefixtures("backend")


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
