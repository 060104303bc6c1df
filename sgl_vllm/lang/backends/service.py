"""What all backends that call a service share: errors, time limits, streams and clients.

Owns how a failed call becomes a BackendError that says what to do, how a streamed answer is read,
and the official clients of each event loop. Knows no API: its routes and words belong to each
backend.
"""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterator, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeAlias, TypeVar  # Any: JSON

from sgl_vllm.lang.backends.base import Backend, Json, logger
from sgl_vllm.lang.backends.requests import Watch
from sgl_vllm.lang.errors import BackendError, UnsupportedError

if TYPE_CHECKING:
    from openai import AsyncOpenAI

Client: TypeAlias = "AsyncOpenAI"
"""AsyncOpenAI, or AsyncAnthropic, which has the same methods."""

T = TypeVar("T")

MAX_CALLS_PER_CLIENT = 64


class Assembled(ABC):
    """Collects the chunks of a stream into the answer that a single response would have had."""

    finish_reason: str | None = None
    """None until the service has said why the text ends."""

    num_tokens: int | None = None
    """How many tokens have arrived; None if the service does not say while it streams."""

    @abstractmethod
    def add(self, chunk: Json) -> str:
        """Add a chunk and return its text. LookupError, TypeError or the like if it has the wrong
        form."""


class ServiceBackend(Backend):
    """A service with an API. `timeout_s` limits every call, including its retries."""

    def __init__(self, api_key: str | None, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._api_key = api_key
        self._warned: set[str] = set()

    @property
    def secrets(self) -> tuple[str, ...]:
        return (self._api_key,) if self._api_key else ()

    # --- what differs between services -----------------------------------------------------------

    advice_on_no_answer = "is base_url right, and can this machine reach it?"
    advice_on_nonsense = "is the URL right?"
    advice_on_key: str
    """How to pass the API key."""

    def library(self) -> ModuleType:
        """The official client's module: `openai`, or one whose errors have the same names."""
        import openai  # here, so that `import sgl_vllm` stays fast

        return openai

    def warn_once(self, message: str) -> None:
        """Log a warning unless it was logged before."""
        if message not in self._warned:
            self._warned.add(message)
            logger.warning("%s: %s", self.name, message)

    # --- failures --------------------------------------------------------------------------------

    def raise_as_backend_error(self, error: Exception) -> NoReturn:
        """Raise a failed call's error as a BackendError that says what to do. The error itself is
        its ``__context__``: a traceback through the client says nothing more."""
        errors = self.library()
        status = getattr(error, "status_code", None)
        if self._is_timeout(error):
            problem = (
                f"{self.name} did not answer within {self.timeout_s:g} s: raise timeout_s, or "
                f"check whether it is still running"
            )
        elif self._is_lost_connection(error):
            cause = error.__cause__ or error
            reason = str(cause) or type(cause).__name__
            problem = f"no answer from {self.name} ({reason}): {self.advice_on_no_answer}"
        elif isinstance(error, (errors.AuthenticationError, errors.PermissionDeniedError)):
            about_key = "rejected the api_key" if self._api_key else "needs an api_key"
            problem = f"{self.name} {about_key}: {self.advice_on_key}"
        elif isinstance(error, errors.APIStatusError) and error.status_code >= 400:
            message = _message_in(error.body) or error.message
            problem = f"{self.name} answered {status}: {message}"
        elif isinstance(error, errors.APIError) and isinstance(error.body, dict):
            message = _message_in(error.body) or error.message
            problem = f"{self.name} ended its answer with an error: {message}"
        elif isinstance(error, (errors.APIError, ValueError)):
            raise self.unreadable() from error
        else:
            raise error
        raise BackendError(problem, status=status) from None

    def _is_timeout(self, error: Exception) -> bool:
        is_one = isinstance(error, (TimeoutError, self.library().APITimeoutError))
        return is_one or "TimeoutException" in _names_in_transport(error)

    def _is_lost_connection(self, error: Exception) -> bool:
        """In mid-stream, some versions of the clients raise their transport's own errors."""
        is_one = isinstance(error, (ConnectionError, self.library().APIConnectionError))
        is_one |= "TransportError" in _names_in_transport(error)
        return is_one and not self._is_timeout(error)

    def interrupted(self, reason: str) -> BackendError:
        """The error for an answer that ended too early."""
        return BackendError(
            f"{self.name} stopped in the middle of an answer{reason}: try again, or check whether "
            f"it is still running"
        )

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """A context in which a failure to read an answer becomes a BackendError."""
        try:
            yield
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise self.unreadable() from error

    def unreadable(self) -> BackendError:
        return BackendError(
            f"{self.name} sent an answer that cannot be read: {self.advice_on_nonsense}"
        )

    def refuse(self, feature: str, advice: str) -> NoReturn:
        """Raise UnsupportedError for `feature`."""
        raise UnsupportedError(self.name, feature, advice)

    # --- streams ---------------------------------------------------------------------------------

    async def drive(self, chunks: AsyncGenerator[Json], assembled: Assembled, watch: Watch) -> None:
        """Read the chunks of one text and pass each piece to `watch`.

        If `watch` returns True, the stream is closed, which ends the service's work on it, and
        `finish_reason` is "length".
        """
        has_begun = False
        try:
            async with asyncio.timeout(self.timeout_s), contextlib.aclosing(chunks):
                async for chunk in chunks:
                    has_begun = True
                    with self.reading():
                        piece = assembled.add(chunk)
                    if piece and watch(piece, assembled.num_tokens):
                        assembled.finish_reason = assembled.finish_reason or "length"
                        break
        except BackendError:
            raise
        except Exception as error:
            if has_begun and self._is_lost_connection(error):
                raise self.interrupted(f" ({error.__cause__ or error})") from None
            self.raise_as_backend_error(error)
        if assembled.finish_reason is None:
            raise self.interrupted("")


def _names_in_transport(error: Exception) -> set[str]:
    """The names of an httpx error's classes. By their version, the clients use httpx or httpx2."""
    classes = type(error).__mro__
    return {c.__name__ for c in classes if c.__module__.partition(".")[0] in ("httpx", "httpx2")}


def _message_in(body: object) -> Any:  # any JSON: it is only shown
    """The message in the body of an error."""
    if not isinstance(body, dict):
        return None
    inner = body.get("error")
    return body.get("message") or body.get("detail") or (_message_in(inner) if inner else None)


class Once(Generic[T]):
    """An answer that is requested when it is first needed, on one event loop.

    Callers that come while it is being requested share the answer, or the failure. After a
    failure, the next caller asks again.
    """

    def __init__(self, ask: Callable[[], Coroutine[Any, Any, T]]) -> None:
        self._ask = ask
        self._task: asyncio.Task[T] | None = None

    async def answer(self) -> T:
        if self._task is None or (self._task.done() and not _succeeded(self._task)):
            self._task = asyncio.create_task(self._ask())
            self._task.add_done_callback(_succeeded)  # marks a failure as seen for asyncio
        return await asyncio.shield(self._task)

    @property
    def was_asked(self) -> bool:
        """Whether there is an answer, or one may still arrive."""
        return self._task is not None


def _succeeded(task: asyncio.Task[Any]) -> bool:
    return not task.cancelled() and task.exception() is None


# --- official clients ----------------------------------------------------------------------------


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
