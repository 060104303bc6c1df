"""Calls to the engines end: with an answer, with the engines, or after a time."""

from __future__ import annotations

import asyncio
import time

import pytest
from fastapi import HTTPException

from sgl_vllm.routes import engines
from tests.fake_engines import FakeClient, FakeEngine


class SilentClient(FakeClient):
    """Its engine never answers, as one that has ended after it got the question."""

    async def call_utility_all_async(self, *call: object) -> list[object]:
        future: asyncio.Future[list[object]] = asyncio.get_running_loop().create_future()
        return await future


def test_a_call_ends_when_the_engine_ends() -> None:
    client = SilentClient(FakeEngine())

    async def ask() -> float:
        asyncio.get_running_loop().call_later(0.1, setattr, client, "errored", True)
        begun = time.monotonic()
        with pytest.raises(HTTPException, match="the engine has ended") as refused:
            await asyncio.wait_for(engines.engine_stats(client), 5)
        assert refused.value.status_code == 503
        return time.monotonic() - begun

    assert asyncio.run(ask()) < 4


def test_a_call_ends_after_a_time(monkeypatch) -> None:
    monkeypatch.setattr(engines, "ANSWER_TIMEOUT_S", 0.3)
    with pytest.raises(HTTPException, match="did not answer within") as refused:
        asyncio.run(asyncio.wait_for(engines.engine_stats(SilentClient(FakeEngine())), 5))
    assert refused.value.status_code == 503


def test_an_error_of_the_engine_is_not_hidden() -> None:
    def fail() -> None:
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        asyncio.run(engines.engine_stats(FakeClient(FakeEngine(stats=fail))))
