"""A scripted server with the parts of vLLM's API that the language uses.

It is deterministic. Every character is a token (its code point) after a beginning-of-text token,
except that "ab" is one token, for tests of token healing. A completion is `reply(prompt)`. With
`document`, it is the continuation of the prompt in that document, ended by the request's `stop` and
`max_tokens` as in vLLM. The log-probability of a prompt token is `logprob(token, position)`. Chats
are rendered with a simple template. Every request is recorded, even if its client disconnects
before the answer. `fault` can answer instead of the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any

import pytest
from fastapi import FastAPI, Header
from fastapi.responses import JSONResponse, Response, StreamingResponse

import sgl_vllm as sgl
from tests.unit.lang.http_server import HttpServer

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


LONG = "A shared beginning that is long enough to be worth sending ahead of its branches. "


def words(text: str) -> list[str]:
    """Tokens of up to four letters with the space before them; other characters are tokens."""
    return re.findall(r" ?\w{1,4}|.", text, re.DOTALL)


def content_of(message: dict[str, Any]) -> str:
    if isinstance(message["content"], str):
        return message["content"]
    return "".join(part.get("text", f"({part['type']})") for part in message["content"])


def render(body: dict[str, Any]) -> str:
    turns = [f"<{m['role']}>{content_of(m)}</>" for m in body["messages"]]
    text = "".join(turns)
    if body.get("continue_final_message"):
        assert not body.get("add_generation_prompt")
        return text.removesuffix("</>")
    return text + ("<assistant>" if body.get("add_generation_prompt", True) else "")


@dataclass
class FakeServer:
    """The server's script and its records.

    `tokens_of` splits a completion into tokens. A stream sends `tokens_per_chunk` of them at a
    time, every `chunk_s` seconds, and reports how many have been sent if `tells_tokens`. Without
    `tokenizes`, it acts as a gateway that does not tokenize. With the plugin it tells of cached
    tokens in blocks of `cached_block_size`, if that is set. `gone` has the requests whose clients
    disconnected before the answer ended.
    """

    url: str = ""
    reply: Callable[[str], str] = lambda prompt: f"[{len(prompt)}]"
    document: Callable[[str], str] | None = None
    logprob: Callable[[int, int], float] = lambda token, position: -1.0
    fault: Callable[[str, dict[str, Any]], Awaitable[Any] | Any] = lambda path, body: None
    plugin: bool = False
    cached_block_size: int | None = None
    api_key: str | None = None
    latency_s: float = 0.0
    tokens_of: Callable[[str], list[str]] = lambda text: re.findall("ab|.", text, re.DOTALL)
    tokens_per_chunk: int = 1
    tells_tokens: bool = True
    tokenizes: bool = True
    chunk_s: float = 0.0
    requests: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    gone: list[dict[str, Any]] = field(default_factory=list)
    at_once: int = 0
    most_at_once: int = 0

    def bodies(self, path: str) -> list[dict[str, Any]]:
        return [body for seen, body in self.requests if seen == path]

    @property
    def calls(self) -> list[dict[str, Any]]:
        """The requests that ran the model."""
        return [body for path, body in self.requests if path.endswith("completions")]

    @property
    def hints(self) -> list[dict[str, Any]]:
        """The requests that only warm the cache."""
        return [
            body for body in self.calls if body["max_tokens"] == 1 and "prompt_logprobs" not in body
        ]

    def complete(self, prompt: str, body: dict[str, Any]) -> Completion:
        if self.document is None:
            text = self.reply(prompt)
            return Completion(text, self.tokens_of(text), "stop")
        stops = body.get("stop") or ()
        stops = (stops,) if isinstance(stops, str) else tuple(stops)
        tokens: list[str] = []
        text = ""
        for token in self.tokens_of(self.document(prompt)):
            tokens.append(token)
            text += token
            found = [(at + len(s), at) for s in stops if (at := text.find(s)) >= 0]
            if found:
                return Completion(text[: min(found)[1]], tokens, "stop")
            if len(tokens) == body["max_tokens"]:
                return Completion(text, tokens, "length")
        return Completion(text, tokens, "stop")


@dataclass(frozen=True)
class Completion:
    """`tokens` are all that were generated. A stop text in them is not in `text`."""

    text: str
    tokens: list[str]
    finish_reason: str

    def pieces(self, tokens_per_chunk: int) -> Iterator[tuple[str, int]]:
        """The text as a stream sends it, each piece with the number of tokens so far."""
        sent = 0
        for count in range(tokens_per_chunk, len(self.tokens) + tokens_per_chunk, tokens_per_chunk):
            end = min(len("".join(self.tokens[:count])), len(self.text))
            yield self.text[sent:end], min(count, len(self.tokens))
            sent = max(sent, end)


def seen_to_go(server: FakeServer, count: int = 1) -> int:
    """Wait until `count` clients have disconnected. Returns how many have."""
    ends = time.monotonic() + 5
    while len(server.gone) < count and time.monotonic() < ends:
        time.sleep(0.01)
    return len(server.gone)


class Recorder:
    """In front of the API: records requests, lets faults answer, and notices disconnects."""

    def __init__(self, running: RunningServer, api: Any) -> None:
        self._running = running
        self._api = api

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        server, data, more = self._running.fake, b"", True
        while more:
            message = await receive()
            data += message.get("body", b"")
            more = message.get("more_body", False)
        path, body = scope["path"], json.loads(data or b"{}")
        server.requests.append((path, body))
        key = dict(scope["headers"]).get(b"authorization", b"").decode()
        server.at_once += 1
        server.most_at_once = max(server.most_at_once, server.at_once)
        has_ended = False

        async def watched_send(message: Any) -> None:
            nonlocal has_ended
            has_ended = message["type"] == "http.response.body" and not message.get("more_body")
            if has_ended:  # before the client hears of it, and sends its next request
                server.at_once -= 1
            await send(message)

        async def answer() -> None:
            if server.api_key and key != f"Bearer {server.api_key}":
                response: Any = JSONResponse({"error": {"message": "Unauthorized"}}, 401)
            else:
                if path != "/v1/models" and server.latency_s:
                    await asyncio.sleep(server.latency_s)
                response = server.fault(path, body)
                if isinstance(response, Awaitable):
                    response = await response
            await (response or self._api)(
                scope, once({"type": "http.request", "body": data}), watched_send
            )

        answering = asyncio.create_task(answer())
        leaving = asyncio.create_task(receive())
        try:
            await asyncio.wait([answering, leaving], return_when=asyncio.FIRST_COMPLETED)
            if not has_ended and not answering.done():
                server.gone.append(body)
                answering.cancel()
            await answering
        except asyncio.CancelledError:
            pass
        finally:
            leaving.cancel()
            if not has_ended:
                server.at_once -= 1


def once(message: dict[str, Any]) -> Callable[[], Awaitable[Any]]:
    messages = [message]

    async def receive() -> Any:
        if messages:
            return messages.pop()
        await asyncio.Event().wait()

    return receive


def make_app(running: RunningServer) -> Recorder:
    app = FastAPI()

    @app.get("/v1/models")
    async def models() -> Any:
        return {"data": [{"id": "fake", "max_model_len": 4096}]}

    @app.get("/version")
    async def version() -> Any:
        return {"version": "0.32.0"}

    @app.get("/v1/sgl/stats")
    async def stats() -> Any:
        if running.fake.plugin:
            size = running.fake.cached_block_size
            return {"hit_tokens": 7, **({"cached_block_size": size} if size else {})}
        return JSONResponse({"detail": "Not Found"}, 404)

    @app.post("/v1/sgl/flush_cache")
    async def flush(content_type: Annotated[str, Header()]) -> Any:
        assert content_type == "application/json"  # the plugin refuses all others
        return {} if running.fake.plugin else JSONResponse({"detail": "Not Found"}, 404)

    @app.post("/tokenize")
    async def tokenize_route(body: dict[str, Any]) -> Any:
        if not running.fake.tokenizes:
            return JSONResponse({"detail": "This model does not support the task"}, 400)
        text = render(body) if "messages" in body else body["prompt"]
        return {"tokens": tokenize(text)}

    def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, Any]:
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": prompt_tokens // 2},
        }

    def streamed(prompt: str, body: dict[str, Any]) -> Response:
        server = running.fake
        completion = server.complete(prompt, body)
        is_chat = "messages" in body

        def chunk(piece: str, num_tokens: int, finish_reason: str | None = None) -> str:
            choice: dict[str, Any] = {"index": 0, "finish_reason": finish_reason}
            choice |= {"delta": {"content": piece}} if is_chat else {"text": piece}
            data: dict[str, Any] = {"choices": [choice]}
            if server.tells_tokens and body["stream_options"]["continuous_usage_stats"]:
                data["usage"] = usage(len(tokenize(prompt)), num_tokens)
            return f"data: {json.dumps(data)}\n\n"

        async def chunks() -> AsyncIterator[str]:
            if is_chat:
                yield chunk("", 0)
            for piece, num_tokens in completion.pieces(server.tokens_per_chunk):
                if server.chunk_s:
                    await asyncio.sleep(server.chunk_s)
                yield chunk(piece, num_tokens)
            yield chunk("", len(completion.tokens), completion.finish_reason)
            total = usage(len(tokenize(prompt)), len(completion.tokens))
            yield f"data: {json.dumps({'choices': [], 'usage': total})}\n\n"
            yield "data: [DONE]\n\n"

        return StreamingResponse(chunks(), media_type="text/event-stream")

    def prompt_rows(body: dict[str, Any], ids: list[int]) -> list[dict[str, Any] | None]:
        """The log-probabilities of a prompt. With the plugin, the rows before the requested tokens
        are unspecified."""
        server = running.fake
        start = body.get("vllm_xargs", {}).get("sgl_score_from", 1) if server.plugin else 1
        return [None] * start + [
            {
                str(token): {
                    "logprob": server.logprob(token, position),
                    "decoded_token": detokenize([token]),
                }
            }
            for position, token in enumerate(ids)
            if position >= start
        ]

    @app.post("/v1/completions")
    async def completions(body: dict[str, Any]) -> Any:
        server = running.fake
        prompts = body["prompt"]
        if isinstance(prompts, str) or isinstance(prompts[0], int):
            prompts = [prompts]
        sequences = [tokenize(p) if isinstance(p, str) else p for p in prompts]
        if body.get("stream"):
            return streamed(detokenize(sequences[0]), body)
        choices, num_tokens = [], 0
        for ids in sequences:
            for _ in range(body.get("n", 1)):
                completion = server.complete(detokenize(ids), body)
                text = completion.text
                num_tokens += 1 if server.document is None else len(completion.tokens)
                choice: dict[str, Any] = {
                    "text": text,
                    "finish_reason": completion.finish_reason,
                    "logprobs": None,
                }
                if body.get("return_token_ids"):
                    choice["prompt_token_ids"] = ids
                if "logprobs" in body:
                    choice["logprobs"] = {
                        "tokens": list(text),
                        "token_logprobs": [-0.5] * len(text),
                        "top_logprobs": [{c: -0.5, "?": -2.0} for c in text],
                    }
                if "prompt_logprobs" in body:
                    choice["prompt_logprobs"] = prompt_rows(body, ids)
                choices.append(choice)
        return {"choices": choices, "usage": usage(sum(map(len, sequences)), num_tokens)}

    @app.post("/v1/chat/completions")
    async def chat(body: dict[str, Any]) -> Any:
        prompt = render(body)
        if body.get("stream"):
            return streamed(prompt, body)
        choices = []
        for _ in range(body.get("n", 1)):
            completion = running.fake.complete(prompt, body)
            text = completion.text
            choice: dict[str, Any] = {
                "message": {"role": "assistant", "content": text},
                "finish_reason": completion.finish_reason,
            }
            if body.get("logprobs"):
                choice["logprobs"] = {
                    "content": [{"token": c, "logprob": -0.5, "top_logprobs": []} for c in text]
                }
            choices.append(choice)
        told: dict[str, Any] = {}
        if body.get("return_token_ids"):
            told["prompt_token_ids"] = tokenize(prompt)
        if "prompt_logprobs" in body:
            told["prompt_logprobs"] = prompt_rows(body, tokenize(prompt))
        return {"choices": choices, "usage": usage(len(prompt), len(text)), **told}

    return Recorder(running, app)


class RunningServer:
    """A FakeServer that runs in a thread, on a free loopback port, until `stop`.

    Tests share it one after another: `renew` resets the script and records, and closes the
    connections.
    """

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=2048)
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self.fake = FakeServer(self.url)
        self.is_dead = False
        self._server = HttpServer(make_app(self))
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        with contextlib.suppress(ValueError, OSError):  # a socket that `die` has closed
            self._server.run([self._socket])

    @property
    def num_connections(self) -> int:
        return len(self._server.server_state.connections)

    def renew(self) -> None:
        self.fake = FakeServer(self.url)
        self._server.soon(self._server.hang_up)

    def die(self) -> None:
        """On the server's own loop: close every connection, as when a process is killed."""
        self.is_dead = True
        self._server.hang_up()
        self._socket.close()

    def stop(self) -> None:
        self.is_dead = True
        self._server.end()
        self._thread.join(timeout=10)
        self._socket.close()


@pytest.fixture(scope="session")
def running_servers() -> Iterator[list[RunningServer]]:
    """The servers of this session. At most one of them is running."""
    servers: list[RunningServer] = []
    yield servers
    for server in servers:
        server.stop()


@pytest.fixture
def running(running_servers: list[RunningServer]) -> Iterator[RunningServer]:
    if not running_servers or running_servers[-1].is_dead:
        running_servers.append(RunningServer())
    running = running_servers[-1]
    yield running
    running.renew()


@pytest.fixture
def server(running: RunningServer) -> FakeServer:
    """The fake server, without the plugin unless the test sets `plugin`."""
    return running.fake


@pytest.fixture
def backend(server: FakeServer) -> sgl.VLLM:
    """A backend for the fake server, which is also the default backend of the test."""
    backend = sgl.VLLM(server.url, timeout_s=20, max_retries=0)
    sgl.set_default_backend(backend)
    return backend
