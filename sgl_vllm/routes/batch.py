"""Many requests in one: `POST /v1/sgl/batch`, and a way to stop single ones of them.

Owns the envelope: that the requests run beside each other, that each is answered by a line as soon
as it is done, and that none runs on after its client has left. What a request means and what it is
answered is vLLM's: its own request classes, serving objects and exception handlers.

    {"requests": [{"id": "a", "path": "completions", "body": {...}},
                  {"id": "b", "path": "chat/completions", "body": {...}}]}

    {"index":1,"status":200,"body":{...}}
    {"index":0,"status":404,"body":{"error":{...}}}
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal, Self, TypeVar  # Any: the JSON of a request

from fastapi import HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, Field, ValidationError, model_validator
from starlette.datastructures import State
from starlette.types import Receive, Scope, Send
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.serve import create_error_response
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.logger import init_logger

from sgl_vllm.routes.bodies import JSON_ONLY, Body, router
from sgl_vllm.routes.forced_usage import begin_answer

logger = init_logger("vllm.sgl_vllm.batch")

MAX_REQUESTS = 1024
"""In one batch."""

STARTED_AT_ONCE = 16
"""This many are started before the event loop serves other requests: each takes some tenths of a
millisecond until vLLM's tokenizer threads have the prompt."""

STATUS_ABORTED = 499
"""Of a request that `/v1/sgl/batch/abort` has stopped; no status of HTTP's own says that."""

_Parsed = TypeVar("_Parsed", bound=BaseModel)


class BatchedRequest(Body):
    """`body` is not looked at before it is run: what is wrong with it is answered in its line."""

    path: Literal["completions", "chat/completions"]
    body: Any
    id: str | None = None


class BatchBody(Body):
    requests: Annotated[list[BatchedRequest], Field(min_length=1, max_length=MAX_REQUESTS)]

    @model_validator(mode="after")
    def _has_different_ids(self) -> Self:
        ids = [request.id for request in self.requests if request.id is not None]
        if len(set(ids)) < len(ids):
            raise ValueError("two requests of the batch have the same id")
        return self


class AbortBody(Body):
    ids: list[str]


@dataclass(slots=True, eq=False)
class Item:
    """A request of a batch until its line is made. Aborted before it was started, it never is."""

    index: int
    request: BatchedRequest
    task: asyncio.Task[Response] | None = None
    aborted: bool = False

    def abort(self) -> bool:
        """Stop it; whether there was anything left to stop."""
        if self.aborted or (self.task is not None and not self.task.cancel()):
            return False
        self.aborted = True
        return True


ItemsById = dict[str, list[Item]]
"""What can be aborted in this API process. A list, as a client that sends a batch again may do so
before the end of the first is noticed."""


@router.post("/batch", dependencies=JSON_ONLY)
async def batch(body: BatchBody, request: Request) -> Response:
    """Run all requests at once; a line for each as soon as it is done, in that order.

    400 if the batch cannot be read. What is wrong with one request is the status of its line, with
    the body that vLLM's route would have answered. All are stopped when the client disconnects.
    """
    return BatchResponse(request, [Item(index, one) for index, one in enumerate(body.requests)])


@router.post("/batch/abort", dependencies=JSON_ONLY)
async def abort(body: AbortBody, request: Request) -> dict[str, int]:
    """Stop requests of batches under way in this API process; unknown ids are ignored."""
    known: ItemsById = request.app.state.sgl_vllm_running
    return {"aborted": sum(item.abort() for id in set(body.ids) for item in known.get(id, ()))}


# -- the answer


class BatchResponse(Response):
    """Runs the items while it is being sent. No task of theirs outlives it: whether all lines are
    sent, the client disconnects, or the server ends, vLLM aborts what is left in the engine."""

    def __init__(self, request: Request, items: Sequence[Item]) -> None:
        # A proxy that buffers an answer would delay the first line until the last.
        super().__init__(media_type="application/x-ndjson", headers={"X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._request = request
        self._items = items
        self._known: ItemsById = request.app.state.sgl_vllm_running
        self._lines: asyncio.Queue[bytes | None] = asyncio.Queue()
        """Lines to send; None when the client has disconnected."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        for item in self._items:
            if item.request.id is not None:
                self._known.setdefault(item.request.id, []).append(item)
        beside = [
            asyncio.create_task(self._watch_client(receive)),
            asyncio.create_task(self._start_all()),
        ]
        try:
            await self._send_lines(send)
        finally:
            tasks = [*beside, *(one.task for one in self._items if one.task is not None)]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for item in self._items:
                self._forget(item)

    async def _send_lines(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        num_left = len(self._items)
        while num_left:
            lines = [await self._lines.get()]
            while not self._lines.empty():
                lines.append(self._lines.get_nowait())
            made = [line for line in lines if line is not None]
            if len(made) < len(lines):
                return
            num_left -= len(made)
            await send({"type": "http.response.body", "body": b"".join(made), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _watch_client(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._lines.put_nowait(None)

    async def _start_all(self) -> None:
        for count, item in enumerate(self._items, 1):
            if item.aborted:
                self._end(item, _aborted())
            else:
                item.task = asyncio.create_task(answer(self._request, item))
                item.task.add_done_callback(partial(self._done, item))
            if count % STARTED_AT_ONCE == 0:
                await asyncio.sleep(0)

    def _done(self, item: Item, task: asyncio.Task[Response]) -> None:
        if item.aborted or task.cancelled():  # vLLM answers a cancelled request with a 400
            self._end(item, _aborted())
        elif (error := task.exception()) is not None:
            logger.error("a request of a batch failed", exc_info=error)
            self._end(item, error_answer(create_error_response(RuntimeError("unexpected"))))
        else:
            self._end(item, task.result())

    def _end(self, item: Item, answer: Response) -> None:
        self._forget(item)
        item.task = None  # it holds the answer, which is in the line
        head = b'{"index":%d,"status":%d,"body":' % (item.index, answer.status_code)
        self._lines.put_nowait(b"".join((head, answer.body, b"}\n")))

    def _forget(self, item: Item) -> None:
        id = item.request.id or ""
        if item in (with_same_id := self._known.get(id, [])):
            with_same_id.remove(item)
            if not with_same_id:
                del self._known[id]


async def answer(batch: Request, item: Item) -> Response:
    """What vLLM's route answers this request, an error included."""
    request = _request_of(batch, item)
    begin_answer()
    with counted_as_load(request.app.state):
        try:
            result = await _ROUTES[item.request.path](request, item.request.body)
            if isinstance(result, ErrorResponse):
                return error_answer(result)
            return JSONResponse(result.model_dump())
        except Exception as error:
            return await handled(request, error)


async def complete(request: Request, body: Any) -> BaseModel:
    handler = request.app.state.openai_serving_completion
    if handler is None:
        raise NotImplementedError("The model does not support Completions API")
    return await handler.create_completion(parsed(CompletionRequest, body), request)


async def _chat(request: Request, body: Any) -> BaseModel:
    handler = request.app.state.openai_serving_chat
    if handler is None:
        raise NotImplementedError("The model does not support Chat Completions API")
    return await handler.create_chat_completion(parsed(ChatCompletionRequest, body), request)


_ROUTES: dict[str, Callable[[Request, Any], Awaitable[BaseModel]]] = {
    "completions": complete,
    "chat/completions": _chat,
}


def parsed(kind: type[_Parsed], body: Any) -> _Parsed:
    """As FastAPI reads a body, so that what is wrong is said in the same words."""
    try:
        made = kind.model_validate(body, from_attributes=True)
    except RecursionError:
        raise HTTPException(400, "the body is nested too deeply") from None
    except ValidationError as error:
        errors = [{**e, "loc": ("body", *e["loc"])} for e in error.errors(include_url=False)]
        raise RequestValidationError(errors, body=body) from None
    if getattr(made, "stream", False):
        raise HTTPException(400, "a request in a batch cannot stream: leave `stream` out")
    return made


def _request_of(batch: Request, item: Item) -> Request:
    """The raw request that vLLM's serving objects take headers from and keep state in."""
    scope = dict(batch.scope)
    scope["path"] = f"/v1/{item.request.path}"
    scope["state"] = dict(scope.get("state", {}))
    if "x-request-id" in batch.headers:  # of which vLLM makes the answer's id
        own = f"{batch.headers['x-request-id']}-{item.index}".encode("latin-1")
        others = [pair for pair in scope["headers"] if pair[0] != b"x-request-id"]
        scope["headers"] = [*others, (b"x-request-id", own)]
    return Request(scope)


@contextmanager
def counted_as_load(state: State) -> Iterator[None]:
    """In vLLM's `--enable-server-load-tracking`, as its own decorator does for a whole route."""
    if not getattr(state, "enable_server_load_tracking", False):
        yield
        return
    state.server_load_metrics = getattr(state, "server_load_metrics", 0) + 1
    try:
        yield
    finally:
        state.server_load_metrics -= 1


async def handled(request: Request, error: Exception) -> Response:
    """What the app's own handler for this kind of exception answers."""
    handlers = request.app.exception_handlers
    handler = next((handlers[kind] for kind in type(error).__mro__ if kind in handlers), None)
    if handler is None:
        return error_answer(create_error_response(error))
    answered = handler(request, error)
    answer: Response = await answered if inspect.isawaitable(answered) else answered
    return answer


def error_answer(error: ErrorResponse) -> Response:
    return JSONResponse(error.model_dump(), error.error.code)


def _aborted() -> Response:
    error = {"message": "the request was aborted", "type": "Aborted", "param": None}
    return JSONResponse({"error": {**error, "code": STATUS_ABORTED}}, STATUS_ABORTED)
