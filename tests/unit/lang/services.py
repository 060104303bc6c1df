"""Scripted services on loopback, for the backends of other APIs. They record their requests.

OpenAI's and Anthropic's services answer with `reply(body)`, whole or streamed in pieces of `piece`
characters. `fault` can answer instead. A stream can end early: as if it were complete, or with a
broken connection.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import types
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import openai
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from tests.unit.lang.http_server import serving_app


@dataclass
class Service:
    """The script of a service and its records. `finish` is the finish reason of its answers."""

    url: str = ""
    reply: Callable[[dict[str, Any]], str] = lambda body: "fine"
    finish: str = "stop"
    piece: int = 3
    break_off_after: int | None = None
    break_off_rudely: bool = False
    fault: Callable[[dict[str, Any]], Awaitable[Response] | Response | None] = lambda body: None
    requests: list[tuple[str, dict[str, Any], dict[str, str]]] = field(default_factory=list)

    @property
    def bodies(self) -> list[dict[str, Any]]:
        return [body for _, body, _ in self.requests]

    @property
    def body(self) -> dict[str, Any]:
        """The body of the only request."""
        (body,) = self.bodies
        return body

    def break_off(self) -> None:
        if self.break_off_rudely:
            raise ConnectionAbortedError("as the test wants it")

    def pieces(self, text: str) -> Iterator[str]:
        cut = [text[i : i + self.piece] for i in range(0, len(text), self.piece)]
        return iter(cut[: self.break_off_after])


Answer = Callable[[Service, dict[str, Any]], Any]


def make_app(service: Service, routes: dict[str, Answer]) -> FastAPI:
    app = FastAPI()

    async def answer(request: Request) -> Any:
        body = await request.json()
        service.requests.append((request.url.path, body, dict(request.headers)))
        instead = service.fault(body)
        if isinstance(instead, Awaitable):
            instead = await instead
        return instead or routes[request.url.path](service, body)

    for path in routes:
        app.add_api_route(path, answer, methods=["POST"], response_model=None)
    return app


@contextmanager
def serving(service: Service, routes: dict[str, Answer]) -> Iterator[Service]:
    """`service`, running in a thread on a free loopback port."""
    with serving_app(make_app(service, routes)) as service.url:
        yield service


def error(status: int, message: str, headers: dict[str, str] | None = None) -> JSONResponse:
    """An error in the form of both APIs, which can be retried without a delay."""
    body = {"type": "error", "error": {"type": "some_error", "message": message}}
    return JSONResponse(body, status, {"retry-after-ms": "1", **(headers or {})})


# --- OpenAI's API ----------------------------------------------------------------------------


def _openai_usage(text: str) -> dict[str, Any]:
    return {
        "prompt_tokens": 10,
        "completion_tokens": len(text),
        "total_tokens": 10 + len(text),
        "prompt_tokens_details": {"cached_tokens": 4},
    }


def _logprobs(body: dict[str, Any], text: str) -> dict[str, Any] | None:
    if "messages" in body and body.get("logprobs"):
        tops = [{"token": "?", "logprob": -2.0}][: body["top_logprobs"]]
        return {"content": [{"token": c, "logprob": -0.5, "top_logprobs": tops} for c in text]}
    if "messages" not in body and "logprobs" in body:
        return {
            "tokens": list(text),
            "token_logprobs": [-0.5] * len(text),
            "top_logprobs": [{c: -0.5} for c in text],
        }
    return None


def _openai(service: Service, body: dict[str, Any]) -> Any:
    text, chat = service.reply(body), "messages" in body
    head = {"id": "a", "object": "chat.completion", "created": 1, "model": body["model"]}
    if body.get("stream"):
        return StreamingResponse(
            _openai_events(service, body, text), media_type="text/event-stream"
        )
    said = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
    choices = [
        {"index": i, "finish_reason": service.finish, "logprobs": _logprobs(body, text), **said}
        for i in range(body.get("n", 1))
    ]
    return {**head, "choices": choices, "usage": _openai_usage(text)}


def _openai_events(service: Service, body: dict[str, Any], text: str) -> Iterator[str]:
    head = {"id": "a", "object": "chat.completion.chunk", "created": 1, "model": body["model"]}

    def event(choices: list[Any], **more: Any) -> str:
        return f"data: {json.dumps({**head, 'choices': choices, **more})}\n\n"

    for piece in service.pieces(text):
        said = {"delta": {"content": piece}} if "messages" in body else {"text": piece}
        yield event([{"index": 0, "finish_reason": None, **said}])
    if service.break_off_after is not None:
        service.break_off()
        return
    end: dict[str, Any] = {"delta": {}} if "messages" in body else {"text": ""}
    yield event([{"index": 0, "finish_reason": service.finish, **end}])
    if (body.get("stream_options") or {}).get("include_usage"):
        yield event([], usage=_openai_usage(text))
    yield "data: [DONE]\n\n"


OPENAI_ROUTES: dict[str, Answer] = {"/v1/chat/completions": _openai, "/v1/completions": _openai}


# --- Anthropic's API -------------------------------------------------------------------------

_ANTHROPIC_USAGE = {
    "input_tokens": 5,
    "cache_read_input_tokens": 4,
    "cache_creation_input_tokens": 1,
    "output_tokens": 7,
}


def _anthropic(service: Service, body: dict[str, Any]) -> Any:
    text = service.reply(body)
    if body.get("stream"):
        events = _anthropic_events(service, body, text)
        return StreamingResponse(events, media_type="text/event-stream")
    block = {"type": "text", "text": text}
    if "tools" in body and service.finish == "tool_use":
        block = {"type": "tool_use", "id": "t", "name": "answer", "input": json.loads(text)}
    return {
        "id": "m",
        "type": "message",
        "role": "assistant",
        "model": body["model"],
        "content": [block],
        "stop_reason": service.finish,
        "usage": _ANTHROPIC_USAGE,
    }


def _anthropic_events(service: Service, body: dict[str, Any], text: str) -> Iterator[str]:
    def event(kind: str, **data: Any) -> str:
        return f"event: {kind}\ndata: {json.dumps({'type': kind, **data})}\n\n"

    yield event("message_start", message={"usage": {**_ANTHROPIC_USAGE, "output_tokens": 1}})
    yield event("ping")
    yield event("content_block_start", index=0, content_block={"type": "text", "text": ""})
    kind, key = ("input_json_delta", "partial_json") if "tools" in body else ("text_delta", "text")
    for piece in service.pieces(text):
        yield event("content_block_delta", index=0, delta={"type": kind, key: piece})
    if service.break_off_after is not None:
        service.break_off()
        return
    yield event("content_block_stop", index=0)
    yield event("message_delta", delta={"stop_reason": service.finish}, usage={"output_tokens": 7})
    yield event("message_stop")


ANTHROPIC_ROUTES: dict[str, Answer] = {"/v1/messages": _anthropic}


# --- LiteLLM ---------------------------------------------------------------------------------


async def _acompletion(
    *, model: str, timeout: float, num_retries: int, api_key: Any = None, **options: Any
) -> Any:
    client = openai.AsyncOpenAI(
        api_key=api_key or "none",
        base_url=options.pop("base_url"),
        timeout=timeout,
        max_retries=num_retries,
    )
    answer = await client.chat.completions.create(model=model.removeprefix("openai/"), **options)
    if options.get("stream"):
        setattr(answer, "aclose", answer.close)  # noqa: B010 - openai's type has no such name
    return answer


@contextmanager
def litellm_or_a_stand_in() -> Iterator[None]:
    """LiteLLM, or where it is not installed a module that sends its arguments with the official
    openai client. LiteLLM needs an older openai package than vLLM, so the two are rarely installed
    together."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # prices are in the network
        if importlib.util.find_spec("litellm") is None:
            standing_in = types.ModuleType("litellm")
            vars(standing_in).update(acompletion=_acompletion)
            patch.setitem(sys.modules, "litellm", standing_in)
        yield
