"""What all backends with OpenAI's API share: the official client, its errors, and its answers.

Owns the transport (one client per event loop, time limits, retries by the client's rule, streaming)
and the reading of completions and chats in OpenAI's form. Which routes and options a service
has is its backend's.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import weakref
from abc import abstractmethod
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from typing import TYPE_CHECKING, Any, Generic, Literal, NoReturn, TypeVar

from sgl_vllm.lang.backends.base import (
    Backend,
    Generated,
    Prompt,
    TextPrompt,
    TokenLogprob,
    Usage,
    Watch,
)
from sgl_vllm.lang.errors import BackendError
from sgl_vllm.lang.ir import Sampling

if TYPE_CHECKING:
    from openai import AsyncOpenAI

T = TypeVar("T")

MAX_CALLS_PER_CLIENT = 64


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


def _succeeded(task: asyncio.Task[Any]) -> bool:
    return not task.cancelled() and task.exception() is None


class Connection:
    """The clients of one event loop: one, and one more for every so many calls at a time.

    A client looks through all its connections whenever a call begins or ends, so that thousands
    of calls over one client cost more than the calls.
    """

    def __init__(self, make: Callable[[], AsyncOpenAI]) -> None:
        self.loop = asyncio.get_running_loop()
        self._make = make
        self._num_calls: dict[AsyncOpenAI, int] = {}
        self.clients: list[AsyncOpenAI] = []

    @contextlib.contextmanager
    def client(self) -> Iterator[AsyncOpenAI]:
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


class OpenAIBackend(Backend):
    """A service with OpenAI's API at `base_url`, which ends in ``/v1`` or the like.

    Nothing is sent before the first program runs. `timeout_s` bounds every call including its
    retries; a call that meets a refused or broken connection, or status 408, 409, 429 or 5xx, is
    tried `max_retries` more times with back-off (the openai client's rule).
    """

    def __init__(
        self, base_url: str, api_key: str | None, timeout_s: float, max_retries: int
    ) -> None:
        if not base_url.startswith(("http://", "https://")):
            raise ValueError(f"base_url must start with http:// or https://, not {base_url!r}")
        self.base_url = base_url.rstrip("/")
        self.timeout_s = timeout_s
        self.max_retries = max_retries
        self._api_key = api_key
        self._connection: Connection | None = None

    # --- what differs between services -----------------------------------------------------------

    @property
    @abstractmethod
    def advice_on_no_answer(self) -> str:
        """What to do when nobody answers at the address."""

    @property
    @abstractmethod
    def advice_on_key(self) -> str:
        """Where the key is given."""

    def connected(self) -> None:
        """Called with a new connection: what was learned over the last one is of no use."""

    # --- transport -------------------------------------------------------------------------------

    def connect(self) -> Connection:
        """The clients of this event loop."""
        loop = asyncio.get_running_loop()
        if self._connection is None or self._connection.loop is not loop:
            from openai import AsyncOpenAI  # here: `import sgl_vllm` stays quick

            make_client = functools.partial(
                AsyncOpenAI,
                base_url=self.base_url,
                api_key=self._api_key or "EMPTY",
                timeout=self.timeout_s,
                max_retries=self.max_retries,
            )
            self._connection = Connection(make_client)
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

    async def call_streamed(self, url: str, body: dict[str, Any], watch: Watch) -> dict[str, Any]:
        """One generation of one text, streamed to `watch`, as the answer that is not streamed.

        Ends it as soon as `watch` says so, with `finish_reason` "length": the connection is
        closed, and with it the server's work on it.
        """
        assembled = _Assembled("messages" in body)
        try:
            async with (
                asyncio.timeout(self.timeout_s),
                contextlib.aclosing(self._chunks(url, body)) as chunks,
            ):
                async for chunk in chunks:
                    with self.reading():
                        piece = assembled.add(chunk)
                    if piece and watch(piece, assembled.num_tokens):
                        assembled.finish_reason = assembled.finish_reason or "length"
                        break
        except BackendError:
            raise
        except Exception as error:
            self.raise_as_backend_error(error)
        if assembled.finish_reason is None:
            raise BackendError(
                f"{self.name} broke off in the middle of an answer: try again, or see whether it "
                f"still runs"
            )
        return assembled.answer()

    async def _chunks(self, url: str, body: dict[str, Any]) -> AsyncGenerator[Any]:
        from openai import AsyncStream

        with self.connect().client() as client:
            stream = await client.post(
                url,
                cast_to=object,
                body=body,
                stream=True,
                stream_cls=AsyncStream[object],
            )
            try:
                async for chunk in stream:
                    yield chunk
            finally:
                await stream.close()

    def raise_as_backend_error(self, error: Exception) -> NoReturn:
        """Any failure of a call, as a BackendError that says what to do."""
        import httpx
        import openai

        if isinstance(error, (TimeoutError, openai.APITimeoutError, httpx.TimeoutException)):
            raise BackendError(
                f"{self.name} did not answer within {self.timeout_s:g} s: raise timeout_s, or "
                f"see whether it still runs"
            ) from error
        if isinstance(error, (openai.APIConnectionError, ConnectionError)):
            reason = str(error.__cause__ or error)
            raise BackendError(
                f"no answer from {self.name} ({reason}): {self.advice_on_no_answer}"
            ) from error
        if isinstance(error, (openai.AuthenticationError, openai.PermissionDeniedError)):
            have = "refused the api_key it was given" if self._api_key else "wants an api_key"
            raise BackendError(
                f"{self.name} {have}: {self.advice_on_key}", status=error.status_code
            ) from error
        if isinstance(error, openai.APIStatusError):
            said = error.body if isinstance(error.body, dict) else {}
            detail = said.get("message") or said.get("detail") or error.message
            raise BackendError(
                f"{self.name} answered {error.status_code}: {detail}", status=error.status_code
            ) from error
        if isinstance(error, httpx.TransportError):  # in mid-stream the client leaves it as it is
            raise BackendError(
                f"{self.name} broke off in the middle of an answer ({error}): try again, or see "
                f"whether it still runs"
            ) from error
        if isinstance(error, openai.APIError) and isinstance(error.body, dict):
            reason = error.body.get("message") or error.message
            raise BackendError(f"{self.name} ended its answer with an error: {reason}") from error
        if isinstance(error, (openai.APIError, ValueError)):
            raise self.not_understood() from error
        raise error

    def reading(self) -> Reading:
        """A context in which a failure to read an answer becomes a BackendError."""
        return Reading(self)

    def not_understood(self) -> BackendError:
        return BackendError(
            f"{self.name} gave an answer that cannot be read: is it what it should be?"
        )


class Reading:
    """Turns a failure to read an answer into a BackendError."""

    def __init__(self, backend: OpenAIBackend) -> None:
        self._backend = backend

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, (LookupError, TypeError, ValueError, AttributeError)):
            raise self._backend.not_understood() from error


def _close(loop: asyncio.AbstractEventLoop, clients: list[AsyncOpenAI]) -> None:
    """Close the clients of a backend that is gone, on its own loop, from any thread.

    It must be done: a client that is only garbage collected closes its sockets first and takes
    them from the loop later, when another connection may have got the same file descriptor. That
    connection then never hears its answer.
    """
    with contextlib.suppress(RuntimeError):  # the loop has ended, and the sockets with it
        asyncio.run_coroutine_threadsafe(_close_all(clients), loop)


async def _close_all(clients: list[AsyncOpenAI]) -> None:
    for client in clients:
        await client.close()


# --- requests and answers ------------------------------------------------------------------------


def prompt_body(prompt: Prompt) -> dict[str, Any]:
    """A prompt in vLLM's words; for a chat, how the rendered prompt is to end."""
    if isinstance(prompt, TextPrompt):
        return {"prompt": prompt.text}
    return {
        "messages": [message.as_dict() for message in prompt.messages],
        "add_generation_prompt": prompt.ending == "generate",
        "continue_final_message": prompt.ending == "continue",
    }


def sampling_body(sampling: Sampling, *, chat: bool) -> dict[str, Any]:
    """Sampling options in vLLM's words. All are sent: the server has defaults of its own."""
    body: dict[str, Any] = {
        "max_tokens": sampling.max_new_tokens,
        "min_tokens": sampling.min_new_tokens,
        "n": sampling.n,
        "stop": sampling.stop,
        "stop_token_ids": sampling.stop_token_ids,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "frequency_penalty": sampling.frequency_penalty,
        "presence_penalty": sampling.presence_penalty,
        "ignore_eos": sampling.ignore_eos,
    }
    if sampling.return_logprob and chat:
        body |= {"logprobs": True, "top_logprobs": sampling.top_logprobs_num}
    elif sampling.return_logprob:
        body |= {"logprobs": sampling.top_logprobs_num}
    return {key: value for key, value in body.items() if value is not None}


def read_generated(choice: dict[str, Any]) -> Generated:
    """One choice of an answer, of either API."""
    finish_reason = str(choice["finish_reason"])
    logprobs = choice.get("logprobs") or {}
    if "message" in choice:
        text = choice["message"]["content"] or ""
        if not isinstance(text, str):
            raise TypeError("the content of a chat message is not a string")
        return Generated(text, finish_reason, _chat_logprobs(logprobs.get("content") or ()))
    text = choice["text"]
    if not isinstance(text, str):
        raise TypeError("the text of a completion is not a string")
    return Generated(text, finish_reason, _completion_logprobs(logprobs))


def _chat_logprobs(entries: Any) -> tuple[TokenLogprob, ...]:
    return tuple(
        TokenLogprob(
            entry["token"],
            float(entry["logprob"]),
            tuple((top["token"], float(top["logprob"])) for top in entry["top_logprobs"]),
        )
        for entry in entries
    )


def _completion_logprobs(logprobs: dict[str, Any]) -> tuple[TokenLogprob, ...]:
    if not logprobs:
        return ()
    tops = logprobs["top_logprobs"] or [None] * len(logprobs["tokens"])
    return tuple(
        TokenLogprob(token, float(logprob), tuple((top or {}).items()))
        for token, logprob, top in zip(
            logprobs["tokens"], logprobs["token_logprobs"], tops, strict=True
        )
    )


def read_usage(answer: dict[str, Any]) -> Usage:
    """What an answer says it has cost, as one call; nothing where it says nothing."""
    usage = answer.get("usage") or {}
    details = usage.get("prompt_tokens_details") or {}
    return Usage(
        prompt_tokens=int(usage.get("prompt_tokens") or 0),
        cached_prompt_tokens=int(details.get("cached_tokens") or 0),
        completion_tokens=int(usage.get("completion_tokens") or 0),
        calls=1,
    )


class _Assembled:
    """The answer that chunks of a stream make, as if it had come at once."""

    def __init__(self, chat: bool) -> None:
        self._chat = chat
        self._pieces: list[str] = []
        self._logprobs: dict[str, list[Any]] = {}
        self._usage: dict[str, Any] | None = None
        self.finish_reason: str | None = None
        self.num_tokens: int | None = None
        """So many tokens have come; None if the server does not say so while it streams."""

    def add(self, chunk: Any) -> str:
        """Take a chunk; the text in it."""
        if chunk.get("usage"):
            self._usage = chunk["usage"]
            self.num_tokens = int(chunk["usage"]["completion_tokens"])
        if not chunk["choices"]:
            return ""
        choice = chunk["choices"][0]
        for key, values in (choice.get("logprobs") or {}).items():
            self._logprobs.setdefault(key, []).extend(values or ())
        self.finish_reason = choice.get("finish_reason") or self.finish_reason
        piece = choice["delta"].get("content") if self._chat else choice["text"]
        if not piece:
            return ""
        if not isinstance(piece, str):
            raise TypeError("a piece of a text is not a string")
        self._pieces.append(piece)
        return piece

    def answer(self) -> dict[str, Any]:
        text = "".join(self._pieces)
        choice: dict[str, Any] = {"finish_reason": self.finish_reason, "logprobs": self._logprobs}
        choice |= {"message": {"content": text}} if self._chat else {"text": text}
        return {"choices": [choice], "usage": self._usage}
