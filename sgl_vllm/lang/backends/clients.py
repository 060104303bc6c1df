"""Services called through their official client: OpenAI's, or Anthropic's, which is made alike.

Owns the clients of each event loop, how many calls share one, and when they are closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from abc import abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from sgl_vllm.lang.backends.base import Json
from sgl_vllm.lang.backends.service import ServiceBackend
from sgl_vllm.lang.errors import BackendError

if TYPE_CHECKING:
    from openai import AsyncOpenAI

Client: TypeAlias = "AsyncOpenAI"
"""AsyncOpenAI, or AsyncAnthropic, which has the same methods."""

T = TypeVar("T")

MAX_CALLS_PER_CLIENT = 64


class Connection:
    """The clients of one event loop, each with at most `MAX_CALLS_PER_CLIENT` calls at a time.

    A client scans all its connections whenever a call begins or ends. With thousands of calls on
    one client, that costs more than the calls themselves.
    """

    def __init__(self, make: Callable[[], Client]) -> None:
        self.loop = asyncio.get_running_loop()
        self._make = make
        self._num_calls: dict[Client, int] = {}
        self.clients: list[Client] = []

    @contextlib.contextmanager
    def client(self) -> Iterator[Client]:
        """The client to use for one call."""
        client = min(self.clients, key=self._num_calls.__getitem__, default=None)
        if client is None or self._num_calls[client] >= MAX_CALLS_PER_CLIENT:
            client = self._make()
            self._num_calls[client] = 0
            self.clients.append(client)
        self._num_calls[client] += 1
        try:
            yield client
        finally:
            self._num_calls[client] -= 1


class ClientBackend(ServiceBackend):
    """A service that is called through its official client.

    Nothing is sent before the first program runs. A call that finds a refused or broken
    connection, or status 408, 409, 429 or 5xx, is retried up to `max_retries` times with
    exponential back-off, as the client does.
    """

    def __init__(self, api_key: str | None, timeout_s: float, max_retries: int) -> None:
        super().__init__(api_key, timeout_s)
        self.max_retries = max_retries
        self._connection: Connection | None = None

    @abstractmethod
    def new_client(self) -> Client:
        """A client for the running event loop."""

    def connect(self) -> Connection:
        """The clients of the running event loop."""
        loop = asyncio.get_running_loop()
        if self._connection is None or self._connection.loop is not loop:
            self._connection = Connection(self.new_client)
            weakref.finalize(self, _close, loop, self._connection.clients).atexit = False
        return self._connection

    async def aclose(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await _close_all(connection.clients)

    async def call(
        self, url: str, body: Json | None = None, headers: Mapping[str, str] | None = None
    ) -> Json:
        """The JSON object that a POST of `body` is answered with, or a GET. Every failure is a
        BackendError that says what to do."""

        def send(client: Client) -> Awaitable[object]:
            if body is None:
                return client.get(url, cast_to=object, options={"headers": dict(headers or {})})
            return client.post(url, cast_to=object, body=body)

        answer = await self.through_client(send)
        if not isinstance(answer, dict):
            raise self.unreadable()
        return answer

    async def through_client(self, send: Callable[[Client], Awaitable[T]]) -> T:
        """One call of the client, within `timeout_s`. Every failure is a BackendError."""
        try:
            with self.connect().client() as client:
                async with asyncio.timeout(self.timeout_s):
                    return await send(client)
        except BackendError:
            raise
        except Exception as error:
            self.raise_as_backend_error(error)

    async def chunks(self, url: str, body: Json) -> AsyncGenerator[Json]:
        """The chunks of one call's stream."""
        with self.connect().client() as client:
            stream = await client.post(
                url,
                cast_to=object,
                body=body,
                stream=True,
                stream_cls=self.library().AsyncStream[object],
            )
            try:
                async for chunk in stream:
                    yield chunk
            finally:
                await stream.close()


def _close(loop: asyncio.AbstractEventLoop, clients: list[Client]) -> None:
    """Close the clients of a deleted backend on its own loop, from any thread.

    A client that is only garbage collected closes its sockets first, and removes them from the
    loop later. By then, another connection may have the same file descriptor, and would never
    receive its answer.
    """
    with contextlib.suppress(RuntimeError):  # the loop has ended, and its sockets with it
        asyncio.run_coroutine_threadsafe(_close_all(clients), loop)


async def _close_all(clients: list[Client]) -> None:
    for client in clients:
        await client.close()
