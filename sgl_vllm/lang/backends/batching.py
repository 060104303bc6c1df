"""Sends requests that programs make at the same moment as one: `POST /v1/sgl/batch`.

Owns which posts share a request, which line of the answer belongs to which post, and what happens
to posts without a line. Does not retry: a post that may be retried is sent again alone, through
the official client, which has its own rules.

    post ──┐                      ┌─ {"index":1, ...} ──> second post
    post ──┼──> one request ──────┼─ {"index":0, ...} ──> first post
    post ──┘                      └─ the connection breaks ──> third post, alone
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol  # Any: what a coroutine sends is not used

from sgl_vllm.lang.backends.base import Json

if TYPE_CHECKING:
    from openai import AsyncOpenAI

NOT_FORWARDED = frozenset({403, 404, 405})
"""Status codes of an older plugin without the route, or of a gateway that does not forward it."""
MAX_POSTS = 256
"""The most posts in one batch. More at the same moment make several batches."""

END_TIMEOUT_S = 1.0
"""How long to wait for the end of an answer after its last line, which keeps the connection."""


class BatchRefusedError(Exception):
    """The server rejects this batch; its posts are sent alone."""


class NoBatchRouteError(BatchRefusedError):
    """The server does not have the route; it is not tried again."""


class UnansweredError(ConnectionError):
    """The connection ended before a post had its answer. The server may or may not have run it."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A line: the status and body that the post would have got alone."""

    status: int
    body: Json

    @property
    def may_be_retried(self) -> bool:
        """As the official client decides it."""
        return self.status in (408, 409, 429) or self.status >= 500


class Response(Protocol):
    """An answer that is arriving: a response of httpx or httpx2."""

    def aiter_bytes(self) -> AsyncIterator[bytes]: ...

    async def aclose(self) -> None: ...


@dataclass(eq=False, slots=True)
class _Post:
    """One request. Its `answer` is None if it must be sent alone."""

    id: str
    path: str
    body: Json
    answer: asyncio.Future[Answer | None]
    batch: _Batch | None = None
    index: int = 0

    def settle(self, answer: Answer | None) -> None:
        if not self.answer.done():
            self.answer.set_result(answer)

    def fail(self, error: Exception) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)


class _Batch:
    """Posts sent together. `waiting` are those without an answer that a caller still waits for.
    When the last of them is cancelled, the connection is closed, and the server stops the rest."""

    def __init__(self, posts: list[_Post]) -> None:
        self.waiting = dict(enumerate(posts))
        self.num_lines_left = len(posts)
        self.to_abort: list[str] = []
        self.is_open = False
        self.task: asyncio.Task[None] | None = None
        for index, post in self.waiting.items():
            post.batch, post.index = self, index

    def as_body(self) -> Json:
        requests = [
            {"id": post.id, "path": post.path, "body": post.body} for post in self.waiting.values()
        ]
        return {"requests": requests}

    def read(self, line: bytes, *, retry: bool) -> None:
        """Give a line to its post. ValueError, KeyError or TypeError if it cannot be read."""
        fields = json.loads(line)
        answer = Answer(int(fields["status"]), fields["body"])
        if not isinstance(answer.body, dict):
            raise TypeError("the body of a line is not an object")
        self.num_lines_left -= 1
        post = self.waiting.pop(fields["index"], None)
        if post is not None:
            post.settle(None if retry and answer.may_be_retried else answer)

    def take_waiting(self) -> list[_Post]:
        posts = list(self.waiting.values())
        self.waiting.clear()
        return posts


class Batcher:
    """Sends posts made at the same moment, on one event loop, as one request.

    Invariant: every post ends, by its line, by being sent alone, by an exception, or because its
    caller cancels it. A batch ends when no caller waits for it. There is no timeout here: callers
    cancel a post that takes too long.
    """

    def __init__(
        self,
        post_one: Callable[[str, Json], Awaitable[Json]],
        open_batch: Callable[[Json], Awaitable[Response]],
        abort: Callable[[list[str]], Awaitable[object]],
        *,
        retry: bool = True,
    ) -> None:
        """Args:
        post_one: sends `(path, body)` alone and returns the answer's object, or raises.
        open_batch: sends the body of a batch and returns when the answer begins. Raises
            BatchRefusedError, or an exception that every post of the batch then raises.
        abort: asks the server to stop the requests with these ids. May fail.
        retry: whether a post is sent again, alone, after a status that the official client
            retries (408, 409, 429, 5xx), or if the connection breaks before its line.
        """
        self._post_one = post_one
        self._open_batch = open_batch
        self._abort = abort
        self._retry = retry
        self._has_route = True
        self._gathered: list[_Post] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._name = uuid.uuid4().hex
        self._num_posts = 0

    async def post(self, path: str, body: Json) -> tuple[int, Json]:
        """Post `body` to `path` ("completions" or "chat/completions"). Returns the status and the
        object of the answer.

        Waits two turns of the event loop for other posts to join. A single post is sent with
        `post_one`, whose exceptions are raised. Otherwise raises what `open_batch` raises, and
        UnansweredError if there are no retries.

        Cancelling it also stops the request on the server: by closing the connection if no other
        caller waits on it, otherwise by an abort. On a server with several API processes, the
        abort may reach the wrong one; the answer is then dropped when it arrives.
        """
        answer = await self._gather(path, body) if self._has_route else None
        if answer is None:
            return 200, await self._post_one(path, body)
        return answer.status, answer.body

    async def _gather(self, path: str, body: Json) -> Answer | None:
        loop = asyncio.get_running_loop()
        self._num_posts += 1
        post = _Post(f"{self._name}-{self._num_posts}", path, body, loop.create_future())
        if not self._gathered:
            loop.call_soon(loop.call_soon, self._send)
        self._gathered.append(post)
        if len(self._gathered) == MAX_POSTS:
            self._send()
        try:
            return await post.answer
        except asyncio.CancelledError:
            self._leave(post)
            raise

    def _send(self) -> None:
        posts = [post for post in self._gathered if not post.answer.done()]
        self._gathered = []
        if len(posts) == 1 or not self._has_route:
            for post in posts:
                post.settle(None)
        elif posts:
            batch = _Batch(posts)
            batch.task = self._start(self._run(batch))

    def _start(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # --- one batch -------------------------------------------------------------------------

    async def _run(self, batch: _Batch) -> None:
        try:
            response = await self._open_batch(batch.as_body())
        except BatchRefusedError as error:
            self._has_route &= not isinstance(error, NoBatchRouteError)
            for post in batch.take_waiting():
                post.settle(None)
            return
        except Exception as error:
            for post in batch.take_waiting():
                post.fail(error)
            return
        broken: Exception | None = None
        try:
            batch.is_open = True
            self._send_aborts(batch)
            await self._read_lines(batch, response)
        except Exception as error:
            broken = error
        finally:
            with contextlib.suppress(Exception):
                await response.aclose()
        for post in batch.take_waiting():
            if self._retry:
                post.settle(None)
            else:
                lost = UnansweredError("the connection ended before the answer")
                lost.__cause__ = broken
                post.fail(lost)

    async def _read_lines(self, batch: _Batch, response: Response) -> None:
        lines = lines_of(response)
        async for line in lines:
            batch.read(line, retry=self._retry)
            if not batch.waiting:
                break
        if not batch.num_lines_left:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(END_TIMEOUT_S):
                    async for _ in lines:
                        pass

    # --- posts that are cancelled ----------------------------------------------------------

    def _leave(self, post: _Post) -> None:
        batch = post.batch
        if batch is None or batch.waiting.pop(post.index, None) is None:
            return
        assert batch.task is not None
        if not batch.waiting:
            batch.task.cancel()
            return
        batch.to_abort.append(post.id)
        if batch.is_open and len(batch.to_abort) == 1:
            asyncio.get_running_loop().call_soon(self._send_aborts, batch)

    def _send_aborts(self, batch: _Batch) -> None:
        """Abort posts cancelled since the last time. If no caller is left, closing the connection
        does it."""
        ids, batch.to_abort = batch.to_abort, []
        if ids and batch.waiting:
            self._start(self._try_to_abort(ids))

    async def _try_to_abort(self, ids: list[str]) -> None:
        with contextlib.suppress(Exception):
            await self._abort(ids)


class BatchRoute:
    """The plugin's batch routes, called through the official client with its retries."""

    def __init__(self, client: AsyncOpenAI, *, timeout_s: float) -> None:
        """`client` has the server's `/v1` as its base URL. `timeout_s` limits connecting, sending
        and aborting, but not the wait for lines."""
        self._client = client
        self._timeout_s = timeout_s

    async def open(self, body: Json) -> Response:
        """Send a batch. Raises BatchRefusedError, or the client's error for any other failure."""
        import openai

        try:
            stream = await self._client.post(
                "/sgl/batch",
                cast_to=object,
                body=body,
                options={"timeout": openai.Timeout(self._timeout_s, read=None)},
                stream=True,
                stream_cls=openai.AsyncStream[object],
            )
        except openai.APIStatusError as error:
            if error.status_code in NOT_FORWARDED:
                raise NoBatchRouteError from error
            if error.status_code in (400, 413, 422):
                raise BatchRefusedError from error
            raise
        response: Response = stream.response
        return response

    async def abort(self, ids: list[str]) -> None:
        await self._client.post(
            "/sgl/batch/abort",
            cast_to=object,
            body={"ids": ids},
            options={"timeout": self._timeout_s, "max_retries": 0},
        )


async def lines_of(response: Response) -> AsyncIterator[bytes]:
    """The complete lines of an answer, without their newlines.

    httpx's own iterator also splits at separators that JSON strings may contain unescaped.
    """
    pieces: list[bytes] = []
    async for chunk in response.aiter_bytes():
        first, *others = chunk.split(b"\n")
        pieces.append(first)
        for piece in others:
            yield b"".join(pieces)
            pieces = [piece]
