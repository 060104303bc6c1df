"""Bodies that are too large, over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest
from fastapi import FastAPI, HTTPException, Request
from fastapi.testclient import TestClient
from starlette.types import Message, Receive, Scope, Send

from sgl_vllm.routes.body_limit import BodyLimitMiddleware

LIMIT = 1_000
JSON = {"content-type": "application/json"}


@pytest.fixture
def app() -> FastAPI:
    app = FastAPI()
    app.state.sgl_vllm_max_body_bytes = LIMIT
    app.add_middleware(BodyLimitMiddleware)

    @app.post("/parsed")
    async def parsed(body: dict[str, Any]) -> int:
        return len(body["text"])

    @app.post("/read")
    async def read(request: Request) -> int:
        return len(await request.body())

    return app


def body_of(num_bytes: int) -> bytes:
    return b'{"text": "%s"}' % (b"x" * (num_bytes - 12))


def in_parts(body: bytes) -> Iterator[bytes]:
    """Sent without a Content-Length."""
    for start in range(0, len(body), 300):
        yield body[start : start + 300]


@pytest.mark.parametrize("path", ["/parsed", "/read"])
@pytest.mark.parametrize("send", [bytes, in_parts], ids=["declared", "in parts"])
def test_a_body_is_refused_from_the_limit_on(app, path, send) -> None:
    with TestClient(app) as client:
        assert client.post(path, content=send(body_of(LIMIT)), headers=JSON).status_code == 200
        refused = client.post(path, content=send(body_of(LIMIT + 1)), headers=JSON)
        assert refused.status_code == 413
        assert "1,000 bytes, the limit of this server (max_body_mb)" in refused.text
        assert client.post(path, content=send(body_of(50)), headers=JSON).status_code == 200


def test_a_declared_length_beyond_the_limit_is_refused_before_the_body_is_read() -> None:
    async def receive() -> Message:
        raise AssertionError("the body is read")

    async def reader(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()

    state = SimpleNamespace(sgl_vllm_max_body_bytes=LIMIT)
    headers = [(b"content-length", str(LIMIT + 1).encode())]
    scope = {"type": "http", "app": SimpleNamespace(state=state), "headers": headers}
    with pytest.raises(HTTPException) as refused:
        asyncio.run(BodyLimitMiddleware(reader)(scope, receive, AsyncMock()))
    assert refused.value.status_code == 413


def test_0_is_no_limit(app) -> None:
    app.state.sgl_vllm_max_body_bytes = 0
    with TestClient(app) as client:
        assert client.post("/parsed", content=body_of(50_000), headers=JSON).status_code == 200
