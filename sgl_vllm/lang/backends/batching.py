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
from typing import TYPE_CHECKING, Any, TypeAlias  # Any: a response of either httpx

from sgl_vllm.lang.backends.base import Json
from sgl_vllm.lang.backends.openai_api import path_of

if TYPE_CHECKING:
    from openai import AsyncOpenAI

Response: TypeAlias = Any
"""An answer that is arriving: a response of httpx or httpx2, by the client's version."""

Answer: TypeAlias = tuple[int, Json]
"""A line: the status and body that the post would have got alone."""

NOT_FORWARDED = frozenset({403, 404, 405})
"""Status codes of an older plugin without the route, or of a gateway that does not forward it."""
MAX_POSTS = 256
"""The most posts in one batch. More at the same moment make several batches."""

END_TIMEOUT_S = 1.0
"""How long to wait for the end of an answer after its last line, which keeps the connection."""


class UnansweredError(ConnectionError):
    """The connection ended before a post had its answer. The server may or may not have run it."""


@dataclass(eq=False, slots=True)
class _Post:
    """One request. Its `answer` is None if it must be sent alone."""

    id: str
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
    When the last of them is canceled, the connection is closed, and the server stops the rest."""

    def __init__(self, posts: list[_Post]) -> None:
        self.waiting = dict(enumerate(posts))
        self.num_lines_left = len(posts)
        self.to_abort: list[str] = []
        self.is_open = False
        self.task: asyncio.Task[None] | None = None
        for index, post in self.waiting.items():
            post.batch, post.index = self, index

    def as_body(self) -> Json:
        posts = self.waiting.values()
        return {"requests": [{"id": p.id, "path": path_of(p.body), "body": p.body} for p in posts]}

    def read(self, line: bytes, *, retry: bool) -> None:
        """Give a line to its post. ValueError, KeyError or TypeError if it cannot be read."""
        fields = json.loads(line)
        status, body = int(fields["status"]), fields["body"]
        if not isinstance(body, dict):
            raise TypeError("the body of a line is not an object")
        self.num_lines_left -= 1
        post = self.waiting.pop(fields["index"], None)
        if post is not None:  # the official client would retry the same statuses
            is_retried = retry and (status in (408, 409, 429) or status >= 500)
            post.settle(None if is_retried else (status, body))

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
        client: AsyncOpenAI,
        post_one: Callable[[Json], Awaitable[Json]],
        *,
        timeout_s: float,
        retry: bool = True,
    ) -> None:
        """Args:
        client: has the server's `/v1` as its base URL.
        post_one: sends a body alone and returns the answer's object, or raises.
        timeout_s: limits connecting, sending and aborting, but not the wait for lines.
        retry: whether a post is sent again, alone, after a status that the official client
            retries (408, 409, 429, 5xx), or if the connection breaks before its line.
        """
        self._client = client
        self._post_one = post_one
        self._timeout_s = timeout_s
        self._retry = retry
        self._has_route = True
        self._gathered: list[_Post] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._name = uuid.uuid4().hex
        self._num_posts = 0

    async def post(self, body: Json) -> tuple[int, Json]:
        """Post a completion or a chat. Returns the status and the object of the answer.

        Waits two turns of the event loop for other posts to join. A single post is sent with
        `post_one`, whose exceptions are raised. Otherwise raises the client's errors, and
        UnansweredError if there are no retries.

        Canceling it also stops the request on the server: by closing the connection if no other
        caller waits on it, otherwise by an abort. On a server with several API processes, the
        abort may reach the wrong one; the answer is then dropped when it arrives.
        """
        answer = await self._gather(body) if self._has_route else None
        if answer is None:
            return 200, await self._post_one(body)
        return answer

    async def _gather(self, body: Json) -> Answer | None:
        loop = asyncio.get_running_loop()
        self._num_posts += 1
        post = _Post(f"{self._name}-{self._num_posts}", body, loop.create_future())
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
            response = await self.open(batch.as_body())
        except Exception as error:
            for post in batch.take_waiting():
                post.fail(error)
            return
        if response is None:
            for post in batch.take_waiting():
                post.settle(None)
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

    async def open(self, body: Json) -> Response | None:
        """Send a batch, and return when the answer begins. None if the server rejects it, so that
        its posts are sent alone. Raises the client's error for any other failure."""
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
            self._has_route &= error.status_code not in NOT_FORWARDED
            if self._has_route and error.status_code not in (400, 413, 422):
                raise
            return None
        return stream.response

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

    # --- posts that are canceled -----------------------------------------------------------

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
        """Abort posts canceled since the last time. If no caller is left, closing the connection
        does it."""
        ids, batch.to_abort = batch.to_abort, []
        if ids and batch.waiting:
            self._start(self.abort(ids))

    async def abort(self, ids: list[str]) -> None:
        """Ask the server to stop the requests with these ids. May fail."""
        with contextlib.suppress(Exception):
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
