"""What a batch does around vLLM's serving objects, with scripted ones in their place."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from vllm.entrypoints.openai.completion.protocol import CompletionRequest, CompletionResponse
from vllm.entrypoints.serve.engine.protocol import UsageInfo

from sgl_vllm.routes.batch import MAX_REQUESTS, STARTED_AT_ONCE
from tests.fake_engines import FakeEngine, fake_server


class Serving:
    """Answers with the prompt, or does what is scripted for it."""

    def __init__(self, **scripted: Callable[[], Any]) -> None:
        self.scripted = scripted
        self.load: list[int] = []
        self.app: FastAPI | None = None

    async def create_completion(self, request: CompletionRequest, raw: Any) -> CompletionResponse:
        self.load.append(getattr(raw.app.state, "server_load_metrics", 0))
        await asyncio.sleep(0)
        if request.prompt in self.scripted:
            await self.scripted[request.prompt]()
        usage = UsageInfo(prompt_tokens=1, total_tokens=1)
        return CompletionResponse(id=request.prompt, model="demo", choices=[], usage=usage)


def connect(serving: Serving | None) -> TestClient:
    app = fake_server(FakeEngine())
    app.state.openai_serving_completion = serving
    app.state.openai_serving_chat = None
    return TestClient(app)


def item(prompt: str, **more: Any) -> dict[str, Any]:
    return {"path": "completions", "body": {"model": "demo", "prompt": prompt}, **more}


def run(client: TestClient, *requests: dict[str, Any]) -> dict[int, dict[str, Any]]:
    answer = client.post("/v1/sgl/batch", json={"requests": requests})
    assert answer.status_code == 200
    return {line["index"]: line for line in map(json.loads, answer.text.splitlines())}


def raising(error: BaseException) -> Callable[[], Any]:
    async def fail() -> None:
        raise error

    return fail


GOOD = item("Once")


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({}, "requests: Field required"),
        ({"requests": []}, "requests: List should have at least 1 item"),
        ({"requests": [GOOD], "more": 1}, "unknown key 'more'"),
        ({"requests": [GOOD] * 1025}, "at most 1024 items"),
        ({"requests": [{"path": "completions"}]}, "requests.0.body: Field required"),
        ({"requests": [{"path": "embeddings", "body": {}}]}, "requests.0.path: Input should be"),
        ({"requests": [{"path": [], "body": {}}]}, "requests.0.path: Input should be"),
        ({"requests": [{**GOOD, "id": 7}]}, "requests.0.id: Input should be"),
        ({"requests": [{**GOOD, "id": "a"}] * 2}, "the same id"),
    ],
)
def test_a_batch_that_cannot_be_read_is_refused_in_one_sentence(body, said):
    refused = connect(Serving()).post("/v1/sgl/batch", json=body)
    assert refused.status_code == 400 and said in refused.json()["detail"]


def test_an_unexpected_error_is_one_lines():
    lines = run(connect(Serving(bad=raising(KeyError("no such key")))), item("good"), item("bad"))
    assert lines[0]["status"] == 200
    assert lines[1]["status"] == 500
    assert lines[1]["body"]["error"]["type"] == "InternalServerError"


@pytest.mark.parametrize("error", [KeyError("x"), asyncio.CancelledError(), None])
def test_the_load_of_a_server_counts_each_request_as_long_as_it_runs(error):
    serving = Serving(bad=raising(error)) if error else Serving()
    client = connect(serving)
    assert isinstance(client.app, FastAPI)
    client.app.state.enable_server_load_tracking = True
    run(client, item("bad"), item("a"), item("b"))
    assert max(serving.load) == 3
    assert client.app.state.server_load_metrics == 0


def test_the_start_of_a_batch_leaves_turns_to_others():
    """Of another task on the same loop, however many requests a batch has."""

    async def main() -> None:
        app = fake_server(FakeEngine())
        serving = app.state.openai_serving_completion = Serving()
        num_started: list[int] = []

        async def other() -> None:
            while True:
                num_started.append(len(serving.load))
                await asyncio.sleep(0)

        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            watching = asyncio.create_task(other())
            requests = [item(f"{i}") for i in range(MAX_REQUESTS)]
            await client.post("/v1/sgl/batch", json={"requests": requests})
            watching.cancel()
        assert num_started[-1] == MAX_REQUESTS
        between_turns = (b - a for a, b in itertools.pairwise(num_started))
        assert max(between_turns) == STARTED_AT_ONCE

    asyncio.run(asyncio.wait_for(main(), 30))


def test_a_client_that_does_not_read_holds_up_nothing_but_its_own_lines():
    """Its requests run to their end, and other tasks on the same loop get their turns."""

    async def main() -> None:
        app = fake_server(FakeEngine())
        serving = app.state.openai_serving_completion = Serving()
        whole = json.dumps({"requests": [item(f"{i}") for i in range(300)]}).encode()
        num_turns = num_sends = 0
        incoming = iter([{"type": "http.request", "body": whole, "more_body": False}])

        async def receive() -> Any:
            if (message := next(incoming, None)) is None:
                await asyncio.Event().wait()  # it stays connected
            return message

        async def send(message: Any) -> None:
            nonlocal num_sends
            num_sends += 1
            if message["type"] == "http.response.body":
                await asyncio.Event().wait()  # the connection takes no more

        async def other() -> None:
            nonlocal num_turns
            while len(serving.load) < 300:
                num_turns += 1
                await asyncio.sleep(0)

        path = "/v1/sgl/batch"
        headers = [(b"content-type", b"application/json")]
        scope: dict[str, Any] = {"type": "http", "method": "POST", "path": path}
        scope |= {"headers": headers, "query_string": b"", "root_path": ""}
        answering = asyncio.create_task(app(scope, receive, send))
        await other()
        assert num_turns >= 300 // STARTED_AT_ONCE
        assert num_sends <= 2, "further lines wait until the first are taken"
        answering.cancel()
        await asyncio.gather(answering, return_exceptions=True)
        assert app.state.sgl_vllm_running == {}

    asyncio.run(asyncio.wait_for(main(), 30))


def test_an_abort_stops_every_request_of_that_name():
    """A client that sends a batch again may do so while the server still runs the first."""

    async def main() -> None:
        held = asyncio.Event()
        app = fake_server(FakeEngine())
        app.state.openai_serving_completion = Serving(held=held.wait)
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            body = {"requests": [item("held", id="twice"), item("a", id="b")]}
            batches = [
                asyncio.create_task(client.post("/v1/sgl/batch", json=body)) for _ in range(2)
            ]
            while len(app.state.sgl_vllm_running.get("twice", ())) < 2:
                await asyncio.sleep(0)
            answer = await client.post("/v1/sgl/batch/abort", json={"ids": ["twice"]})
            assert answer.json() == {"aborted": 2}
            for batch in await asyncio.gather(*batches):
                statuses = {
                    line["index"]: line["status"] for line in map(json.loads, batch.iter_lines())
                }
                assert statuses == {0: 499, 1: 200}
            assert app.state.sgl_vllm_running == {}

    asyncio.run(asyncio.wait_for(main(), 10))
