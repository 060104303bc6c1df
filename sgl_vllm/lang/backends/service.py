"""What all backends that call a service share: its errors, time limits, streams and clients.

Owns how a failed call becomes a BackendError that says what to do, the official client of each
event loop (those of OpenAI and of Anthropic are made alike), and the driving of streamed answers.
Knows no API: which routes and words a service has is its backend's.
"""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from abc import abstractmethod
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Coroutine,
    Iterator,
    Mapping,
    Sequence,
)
from types import ModuleType
from typing import Any, Generic, Literal, NoReturn, Protocol, TypeVar

from sgl_vllm.lang.backends.base import Backend, GenRequest, Json, WarnOnce, Watch
from sgl_vllm.lang.constraints import JSON_SCHEMA
from sgl_vllm.lang.errors import BackendError, UnsupportedError
from sgl_vllm.lang.sampling import DEFAULT_SAMPLING, Sampling

T = TypeVar("T")

MAX_CALLS_PER_CLIENT = 64

_TRANSPORTS = ("httpx", "httpx2")

_NAMES_IN_GEN = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}


class Once(Generic[T]):
    """A question that is asked of the server once, by whoever needs the answer first.

    Those who come while it is being asked share the answer, or the failure; after a failure the
    next one asks again.
    """

    def __init__(self, ask: Callable[[], Coroutine[Any, Any, T]]) -> None:
        self._ask = ask
        self._task: asyncio.Task[T] | None = None

    async def answer(self) -> T:
        if self._task is None or (self._task.done() and not _succeeded(self._task)):
            self._task = asyncio.create_task(self._ask())
            self._task.add_done_callback(_succeeded)  # a failure nobody waits for is no warning
        return await asyncio.shield(self._task)

    @property
    def was_asked(self) -> bool:
        """Whether there is an answer, or may yet come one."""
        return self._task is not None


def _succeeded(task: asyncio.Task[Any]) -> bool:
    return not task.cancelled() and task.exception() is None


class Assembled(Protocol):
    """The answer that the chunks of a stream make, as if it had come at once."""

    finish_reason: str | None
    """None until the service has said why the text ends."""

    @property
    def num_tokens(self) -> int | None:
        """How many tokens have come; None if the service does not say so while it streams."""

    def add(self, chunk: Any) -> str:
        """Take a chunk; the text in it. LookupError, TypeError and the like for what is none."""


class ServiceBackend(Backend):
    """A service with an API, of which `timeout_s` bounds every call including its retries."""

    def __init__(self, api_key: str | None, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._api_key = api_key
        self._warn_once = WarnOnce(self)

    # --- what differs between services -----------------------------------------------------------

    @property
    @abstractmethod
    def advice_on_no_answer(self) -> str:
        """What to do when nobody answers at the address."""

    @property
    @abstractmethod
    def advice_on_key(self) -> str:
        """Where the key is given."""

    @abstractmethod
    def library(self) -> ModuleType:
        """The official client's module, `openai` or one whose errors have the same names."""

    # --- failures --------------------------------------------------------------------------------

    def raise_as_backend_error(self, error: Exception) -> NoReturn:
        """Any failure of a call, as a BackendError that says what to do."""
        errors = self.library()
        if self._is_timeout(error):
            raise BackendError(
                f"{self.name} did not answer within {self.timeout_s:g} s: raise timeout_s, or "
                f"see whether it still runs"
            ) from error
        if self._is_lost_connection(error):
            cause = error.__cause__ or error
            reason = str(cause) or type(cause).__name__
            raise BackendError(
                f"no answer from {self.name} ({reason}): {self.advice_on_no_answer}"
            ) from error
        if isinstance(error, (errors.AuthenticationError, errors.PermissionDeniedError)):
            have = "refused the api_key it was given" if self._api_key else "wants an api_key"
            raise BackendError(
                f"{self.name} {have}: {self.advice_on_key}", status=error.status_code
            ) from error
        if isinstance(error, errors.APIStatusError) and error.status_code >= 400:
            raise BackendError(
                f"{self.name} answered {error.status_code}: {_said(error.body) or error.message}",
                status=error.status_code,
            ) from error
        if isinstance(error, errors.APIError) and isinstance(error.body, dict):
            reason = _said(error.body) or error.message
            raise BackendError(f"{self.name} ended its answer with an error: {reason}") from error
        if isinstance(error, (errors.APIError, ValueError)):
            raise self.not_understood() from error
        raise error

    def _is_timeout(self, error: Exception) -> bool:
        is_one = isinstance(error, (TimeoutError, self.library().APITimeoutError))
        return is_one or "TimeoutException" in _names_in_transport(error)

    def _is_lost_connection(self, error: Exception) -> bool:
        """Some versions of the clients pass their transport's errors on in mid-stream."""
        is_one = isinstance(error, (ConnectionError, self.library().APIConnectionError))
        is_one |= "TransportError" in _names_in_transport(error)
        return is_one and not self._is_timeout(error)

    def _broke_off(self, why: str) -> BackendError:
        return BackendError(
            f"{self.name} broke off in the middle of an answer{why}: try again, or see whether it "
            f"still runs"
        )

    def reading(self) -> Reading:
        """A context in which a failure to read an answer becomes a BackendError."""
        return Reading(self)

    def not_understood(self) -> BackendError:
        return BackendError(
            f"{self.name} gave an answer that cannot be read: is it what it should be?"
        )

    # --- what a service lacks --------------------------------------------------------------------

    def refuse(self, feature: str, advice: str) -> NoReturn:
        """UnsupportedError for `feature`."""
        raise UnsupportedError(self.name, feature, advice)

    def refuse_options(self, sampling: Sampling, lacking: Mapping[str, str]) -> None:
        """UnsupportedError for the first option in `lacking` that would change something; to each
        it has an advice."""
        for option, advice in lacking.items():
            if option == "logprob_start_len" and not sampling.return_logprob:
                continue
            value = getattr(sampling, option)
            if value not in (None, (), getattr(DEFAULT_SAMPLING, option)):
                self.refuse(_NAMES_IN_GEN.get(option, option), advice)

    def schema_of(self, request: GenRequest) -> Json | None:
        """The JSON schema of a request, if it has one. Refuses other kinds of constraint."""
        constraint = request.constraint
        if constraint is None:
            return None
        if constraint.kind != JSON_SCHEMA:
            self.refuse(constraint.kind.shown, "use json_schema, or describe it in the prompt")
        schema: Json = constraint.value
        return schema

    # --- choosing by constraint ------------------------------------------------------------------

    def say_that_it_chooses(self, how: str) -> None:
        self._warn_once(
            f"select lets the model choose here, by {how}: there are no scores, and the choice "
            f"may differ from that of a server that scores"
        )

    async def at_temperature_0(
        self, ask: Callable[[dict[str, Any]], Awaitable[T]], body: dict[str, Any]
    ) -> T:
        """What `ask` gives for `body` at temperature 0, or at the default where the model refuses
        to be told one."""
        try:
            return await ask({**body, "temperature": 0.0})
        except BackendError as error:
            if error.status != 400 or "temperature" not in str(error):
                raise
        self._warn_once("select leaves temperature at its default: the model takes no other")
        return await ask(body)

    def chosen(self, choices: Sequence[str], document: object) -> int:
        """Which of `choices` a document of `choice_schema` names."""
        choice = document.get("choice") if isinstance(document, dict) else None
        if choice not in choices:
            raise BackendError(
                f"{self.name} chose {choice!r}, which is none of the choices: it does not keep to "
                f"the JSON schema that it is given"
            )
        return choices.index(choice)

    # --- streams ---------------------------------------------------------------------------------

    async def drive(self, chunks: AsyncGenerator[Any], assembled: Assembled, watch: Watch) -> None:
        """Take the chunks of one text, and show it to `watch` as it comes.

        Ends it as soon as `watch` says so, with `finish_reason` "length": the chunks are closed,
        and with them the service's work on it.
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
                raise self._broke_off(f" ({error.__cause__ or error})") from error
            self.raise_as_backend_error(error)
        if assembled.finish_reason is None:
            raise self._broke_off("")


def _names_in_transport(error: Exception) -> set[str]:
    """What an error of httpx is, by the names of its classes; the official clients use httpx or
    httpx2, by their version."""
    of_httpx = (c for c in type(error).__mro__ if c.__module__.split(".")[0] in _TRANSPORTS)
    return {c.__name__ for c in of_httpx}


def _said(body: object) -> str | None:
    """What a service says in the body of an error."""
    if not isinstance(body, dict):
        return None
    inner = body.get("error")
    return body.get("message") or body.get("detail") or (_said(inner) if inner else None)


def choice_schema(choices: Sequence[str]) -> dict[str, Any]:
    """The JSON schema of a document that names one of `choices`."""
    one_of = {"type": "string", "enum": list(dict.fromkeys(choices))}
    return {
        "type": "object",
        "properties": {"choice": one_of},
        "required": ["choice"],
        "additionalProperties": False,
    }


class Reading:
    """Turns a failure to read an answer into a BackendError."""

    def __init__(self, backend: ServiceBackend) -> None:
        self._backend = backend

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, (LookupError, TypeError, ValueError, AttributeError)):
            raise self._backend.not_understood() from error


class Connection:
    """The clients of one event loop: one, and one more for every so many calls at a time.

    A client looks through all its connections whenever a call begins or ends, so that thousands
    of calls over one client cost more than the calls.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self.loop = asyncio.get_running_loop()
        self._make = make
        self._num_calls: dict[Any, int] = {}
        self.clients: list[Any] = []  # AsyncOpenAI or AsyncAnthropic

    @contextlib.contextmanager
    def client(self) -> Iterator[Any]:
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

    Nothing is sent before the first program runs. A call that meets a refused or broken
    connection, or status 408, 409, 429 or 5xx, is tried `max_retries` more times with back-off
    (the client's rule).
    """

    def __init__(self, api_key: str | None, timeout_s: float, max_retries: int) -> None:
        super().__init__(api_key, timeout_s)
        self.max_retries = max_retries
        self._connection: Connection | None = None

    @abstractmethod
    def new_client(self) -> Any:
        """A client for the event loop that runs."""

    def connected(self) -> None:
        """Called with a new connection: what was learned over the last one is of no use."""

    def connect(self) -> Connection:
        """The clients of this event loop."""
        loop = asyncio.get_running_loop()
        if self._connection is None or self._connection.loop is not loop:
            self._connection = Connection(self.new_client)
            weakref.finalize(self, _close, loop, self._connection.clients).atexit = False
            self.connected()
        return self._connection

    async def aclose(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await _close_all(connection.clients)

    async def call(
        self, method: Literal["GET", "POST"], url: str, body: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """One call's JSON object; every failure as a BackendError that says what to do."""
        try:
            with self.connect().client() as client:
                async with asyncio.timeout(self.timeout_s):
                    if method == "GET":
                        answer = await client.get(url, cast_to=object)
                    else:
                        answer = await client.post(url, cast_to=object, body=body)
        except Exception as error:
            self.raise_as_backend_error(error)
        if not isinstance(answer, dict):
            raise self.not_understood()
        return answer

    async def chunks(self, url: str, body: dict[str, Any]) -> AsyncGenerator[Any]:
        """The chunks of one call's stream, each a JSON object."""
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


def _close(loop: asyncio.AbstractEventLoop, clients: list[Any]) -> None:
    """Close the clients of a backend that is gone, on its own loop, from any thread.

    It must be done: a client that is only garbage collected closes its sockets first and takes
    them from the loop later, when another connection may have got the same file descriptor. That
    connection then never hears its answer.
    """
    with contextlib.suppress(RuntimeError):  # the loop has ended, and the sockets with it
        asyncio.run_coroutine_threadsafe(_close_all(clients), loop)


async def _close_all(clients: list[Any]) -> None:
    for client in clients:
        await client.close()
