"""What all backends that call a service share: errors, refusals, time limits and streams.

Owns how a failed call becomes a BackendError that says what to do, and how a streamed answer is
read. Knows no API: its routes and words belong to each backend. Official clients are in
`clients.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
from abc import abstractmethod
from collections.abc import AsyncGenerator
from types import ModuleType
from typing import Any, NoReturn, Protocol  # Any: the JSON of an answer

from sgl_vllm.lang.backends.base import Backend, Json, WarnOnce
from sgl_vllm.lang.backends.requests import Watch
from sgl_vllm.lang.errors import BackendError, UnsupportedError

_TRANSPORTS = ("httpx", "httpx2")


class Assembled(Protocol):
    """Collects the chunks of a stream into the answer that a single response would have had."""

    finish_reason: str | None
    """None until the service has said why the text ends."""

    @property
    def num_tokens(self) -> int | None:
        """How many tokens have arrived; None if the service does not say while it streams."""

    def add(self, chunk: Json) -> str:
        """Add a chunk and return its text. LookupError, TypeError or the like if it has the wrong
        form."""


class ServiceBackend(Backend):
    """A service with an API. `timeout_s` limits every call, including its retries."""

    def __init__(self, api_key: str | None, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._api_key = api_key
        self._warn_once = WarnOnce(self)

    @property
    def secrets(self) -> tuple[str, ...]:
        return (self._api_key,) if self._api_key else ()

    # --- what differs between services -----------------------------------------------------------

    @property
    @abstractmethod
    def advice_on_no_answer(self) -> str:
        """What to do if nothing answers at the address."""

    @property
    @abstractmethod
    def advice_on_key(self) -> str:
        """How to pass the API key."""

    @abstractmethod
    def library(self) -> ModuleType:
        """The official client's module: `openai`, or one whose errors have the same names."""

    # --- failures --------------------------------------------------------------------------------

    def raise_as_backend_error(self, error: Exception) -> NoReturn:
        """Raise a failed call's error as a BackendError that says what to do. The error itself is
        its ``__context__``: a traceback through the client says nothing more."""
        errors = self.library()
        if self._is_timeout(error):
            raise BackendError(
                f"{self.name} did not answer within {self.timeout_s:g} s: raise timeout_s, or "
                f"check whether it is still running"
            ) from None
        if self._is_lost_connection(error):
            cause = error.__cause__ or error
            reason = str(cause) or type(cause).__name__
            raise BackendError(
                f"no answer from {self.name} ({reason}): {self.advice_on_no_answer}"
            ) from None
        if isinstance(error, (errors.AuthenticationError, errors.PermissionDeniedError)):
            problem = "rejected the api_key" if self._api_key else "needs an api_key"
            raise BackendError(
                f"{self.name} {problem}: {self.advice_on_key}", status=error.status_code
            ) from None
        if isinstance(error, errors.APIStatusError) and error.status_code >= 400:
            message = _message_in(error.body) or error.message
            raise BackendError(
                f"{self.name} answered {error.status_code}: {message}", status=error.status_code
            ) from None
        if isinstance(error, errors.APIError) and isinstance(error.body, dict):
            message = _message_in(error.body) or error.message
            raise BackendError(f"{self.name} ended its answer with an error: {message}") from None
        if isinstance(error, (errors.APIError, ValueError)):
            raise self.unreadable() from error
        raise error

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

    def reading(self) -> Reading:
        """A context in which a failure to read an answer becomes a BackendError."""
        return Reading(self)

    def unreadable(self) -> BackendError:
        return BackendError(f"{self.name} sent an answer that cannot be read: is the URL right?")

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


class Reading:
    """Turns a failure to read an answer into a BackendError."""

    def __init__(self, backend: ServiceBackend) -> None:
        self._backend = backend

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, (LookupError, TypeError, ValueError, AttributeError)):
            raise self._backend.unreadable() from error


def _names_in_transport(error: Exception) -> set[str]:
    """The names of an httpx error's classes. By their version, the clients use httpx or httpx2."""
    of_httpx = (c for c in type(error).__mro__ if c.__module__.split(".")[0] in _TRANSPORTS)
    return {c.__name__ for c in of_httpx}


def _message_in(body: object) -> Any:  # any JSON: it is only shown
    """The message in the body of an error."""
    if not isinstance(body, dict):
        return None
    inner = body.get("error")
    return body.get("message") or body.get("detail") or (_message_in(inner) if inner else None)
