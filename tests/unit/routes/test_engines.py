"""Calls to the engines end: with an answer, with the engines, or after a time."""

from __future__ import annotations

import asyncio
import time
from functools import partial

import pytest
from fastapi import HTTPException
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector

from benchmarks.schedulers import engine_request
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


# -- requests


class StoppableClient:
    """Its output processor is vLLM's own, of which nobody reads the outputs after `shutdown`."""

    def __init__(self) -> None:
        self.output_processor = OutputProcessor(None, log_stats=False)
        self.num_shutdowns = 0

    def shutdown(self, timeout: float | None = None) -> None:
        self.num_shutdowns += 1

    def add_request(self, name: str) -> RequestOutputCollector:
        queue = RequestOutputCollector(RequestOutputKind.DELTA, name)
        params = SamplingParams(output_kind=RequestOutputKind.DELTA, detokenize=False)
        request = engine_request(params, request_id=name)
        self.output_processor.add_request(request, None, queue=queue)
        return queue


def test_requests_end_when_the_engines_are_shut_down() -> None:
    """Those that wait, and those that arrive at that moment. vLLM shuts down in a thread."""

    async def serve() -> None:
        client = StoppableClient()
        ending = engines.end_requests_at_shutdown(client)
        waiting = client.add_request("waiting")
        await asyncio.get_running_loop().run_in_executor(None, partial(client.shutdown, timeout=1))
        assert client.num_shutdowns == 1
        with pytest.raises(EngineDeadError):
            await asyncio.wait_for(waiting.get(), 5)
        late = client.add_request("late")
        with pytest.raises(EngineDeadError):
            await asyncio.wait_for(late.get(), 5)
        await asyncio.get_running_loop().run_in_executor(None, client.shutdown)  # as when freed
        await asyncio.sleep(0)
        assert len(ending) == 1

    asyncio.run(serve())
