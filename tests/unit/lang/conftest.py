"""A scripted server that speaks the parts of vLLM's API the language uses; for tests.

Deterministic: every character is a token (its code point) after a beginning-of-text token, except
that "ab" is one token, so that seams can be healed. A completion is `reply(prompt)`; the
log-probability of a prompt token is `logprob(token, position)`. Chats are rendered by a simple
template. Every request is recorded, and `fault` may answer in the server's place.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

import sgl_vllm as sgl

BEGIN = 1
PAIR = 0x110000  # the token "ab"


def tokenize(text: str, *, begin: bool = True) -> list[int]:
    ids = [BEGIN] if begin else []
    i = 0
    while i < len(text):
        if text[i : i + 2] == "ab":
            ids.append(PAIR)
            i += 2
        else:
            ids.append(ord(text[i]))
            i += 1
    return ids


def detokenize(ids: list[int]) -> str:
    return "".join("ab" if i == PAIR else chr(i) for i in ids if i != BEGIN)


def render(body: dict[str, Any]) -> str:
    turns = [f"<{m['role']}>{m['content']}</>" for m in body["messages"]]
    text = "".join(turns)
    if body.get("continue_final_message"):
        assert not body.get("add_generation_prompt")
        return text.removesuffix("</>")
    return text + ("<assistant>" if body.get("add_generation_prompt", True) else "")


@dataclass
class FakeServer:
    """The server's script and its records."""

    url: str = ""
    reply: Callable[[str], str] = lambda prompt: f"[{len(prompt)}]"
    logprob: Callable[[int, int], float] = lambda token, position: -1.0
    fault: Callable[[str, dict[str, Any]], Awaitable[Response | None] | Response | None] = (
        lambda path, body: None
    )
    plugin: bool = False
    api_key: str | None = None
    latency_s: float = 0.0
    requests: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    at_once: int = 0
    most_at_once: int = 0

    def bodies(self, path: str) -> list[dict[str, Any]]:
        return [body for seen, body in self.requests if seen == path]

    @property
    def hints(self) -> list[dict[str, Any]]:
        """The requests that only warm the cache."""
        return [
            body
            for path, body in self.requests
            if path.endswith("completions")
            and body["max_tokens"] == 1
            and "prompt_logprobs" not in body
        ]


def make_app(server: FakeServer) -> FastAPI:
    app = FastAPI()

    @app.middleware("http")
    async def record(request: Request, call_next: Any) -> Response:
        path = request.url.path
        body = await request.json() if request.method == "POST" else {}
        server.requests.append((path, body))
        if server.api_key and request.headers.get("authorization") != f"Bearer {server.api_key}":
            return JSONResponse({"error": {"message": "Unauthorized"}}, 401)
        server.at_once += 1
        server.most_at_once = max(server.most_at_once, server.at_once)
        try:
            if path != "/v1/models" and server.latency_s:
                await asyncio.sleep(server.latency_s)
            answer = server.fault(path, body)
            if isinstance(answer, Awaitable):
                answer = await answer
            return answer if answer is not None else await call_next(request)
        finally:
            server.at_once -= 1

    @app.get("/v1/models")
    async def models() -> Any:
        return {"data": [{"id": "fake", "max_model_len": 4096}]}

    @app.get("/version")
    async def version() -> Any:
        return {"version": "0.32.0"}

    @app.get("/v1/sgl/stats")
    async def stats() -> Any:
        return {"hit_tokens": 7} if server.plugin else JSONResponse({"detail": "Not Found"}, 404)

    @app.post("/v1/sgl/flush_cache")
    async def flush() -> Any:
        return {} if server.plugin else JSONResponse({"detail": "Not Found"}, 404)

    @app.post("/tokenize")
    async def tokenize_route(body: dict[str, Any]) -> Any:
        text = render(body) if "messages" in body else body["prompt"]
        return {"tokens": tokenize(text)}

    def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, Any]:
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": prompt_tokens // 2},
        }

    @app.post("/v1/completions")
    async def completions(body: dict[str, Any]) -> Any:
        prompts = body["prompt"]
        if isinstance(prompts, str) or isinstance(prompts[0], int):
            prompts = [prompts]
        sequences = [tokenize(p) if isinstance(p, str) else p for p in prompts]
        choices = []
        for ids in sequences:
            for _ in range(body.get("n", 1)):
                text = server.reply(detokenize(ids))
                choice: dict[str, Any] = {"text": text, "finish_reason": "stop", "logprobs": None}
                if "logprobs" in body:
                    choice["logprobs"] = {
                        "tokens": list(text),
                        "token_logprobs": [-0.5] * len(text),
                        "top_logprobs": [{c: -0.5, "?": -2.0} for c in text],
                    }
                if "prompt_logprobs" in body:
                    # What is before the wanted tokens is unspecified when the plugin answers.
                    start = body["vllm_xargs"]["sgl_score_from"] if server.plugin else 1
                    choice["prompt_logprobs"] = [None] * start + [
                        {str(token): {"logprob": server.logprob(token, position)}}
                        for position, token in enumerate(ids)
                        if position >= start
                    ]
                choices.append(choice)
        return {"choices": choices, "usage": usage(sum(map(len, sequences)), len(choices))}

    @app.post("/v1/chat/completions")
    async def chat(body: dict[str, Any]) -> Any:
        prompt = render(body)
        text = server.reply(prompt)
        choice: dict[str, Any] = {
            "message": {"role": "assistant", "content": text},
            "finish_reason": "stop",
        }
        if body.get("logprobs"):
            choice["logprobs"] = {
                "content": [{"token": c, "logprob": -0.5, "top_logprobs": []} for c in text]
            }
        return {"choices": [choice] * body.get("n", 1), "usage": usage(len(prompt), len(text))}

    return app


class _Uvicorn(uvicorn.Server):
    def install_signal_handlers(self) -> None:
        """Leave the test process's handlers alone."""


class RunningServer:
    """A FakeServer being served in a thread on a free loopback port, until `stop`."""

    def __init__(self) -> None:
        self.fake = FakeServer()
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.fake.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        config = uvicorn.Config(make_app(self.fake), log_level="error", lifespan="off")
        self._uvicorn = _Uvicorn(config)
        self._thread = threading.Thread(
            target=self._uvicorn.run, kwargs={"sockets": [self._socket]}, daemon=True
        )
        self._thread.start()

    @property
    def num_connections(self) -> int:
        return len(self._uvicorn.server_state.connections)

    def die(self) -> None:
        """On the server's own loop: drop every connection, as a killed process does."""
        for connection in list(self._uvicorn.server_state.connections):
            connection.transport.abort()
        self._socket.close()

    def stop(self) -> None:
        self._uvicorn.should_exit = self._uvicorn.force_exit = True
        self._thread.join(timeout=10)
        self._socket.close()


@pytest.fixture
def running() -> Iterator[RunningServer]:
    running = RunningServer()
    yield running
    running.stop()


@pytest.fixture
def server(running: RunningServer) -> FakeServer:
    """The fake server, a stock one unless the test sets `plugin`."""
    return running.fake


@pytest.fixture
def backend(server: FakeServer) -> sgl.VLLM:
    """A backend for the fake server, and the default one of this test."""
    backend = sgl.VLLM(server.url, timeout_s=20, max_retries=0)
    sgl.set_default_backend(backend)
    return backend
