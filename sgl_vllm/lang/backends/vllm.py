"""The backend for a vLLM server, with the sgl_vllm plugin or without, over HTTP.

Owns requests, answers and error messages of vLLM's OpenAI-compatible API and of the plugin's
routes under /v1/sgl/. Sends text prompts to /v1/completions and chats to /v1/chat/completions, so
that the chat template is always the server's. Gives the same answers on both kinds of server;
the plugin makes some of them cheaper. Knows nothing of programs.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import weakref
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from sgl_vllm.lang.backends.base import (
    Backend,
    ChatPrompt,
    GenAnswer,
    Generated,
    GenRequest,
    Prompt,
    ScoreAnswer,
    ServerInfo,
    TextPrompt,
    TokenLogprob,
    Usage,
)
from sgl_vllm.lang.choices import ChoiceTokens, first_scored_position
from sgl_vllm.lang.errors import BackendError, UnsupportedError
from sgl_vllm.lang.ir import Sampling

if TYPE_CHECKING:
    from openai import AsyncOpenAI

# Key in vllm_xargs: the index of the first prompt token whose log-probability is wanted. The
# plugin then takes what is before it from the cache; a stock server ignores the key.
SCORE_FROM = "sgl_score_from"

T = TypeVar("T")


class _Once(Generic[T]):
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


@dataclass(frozen=True)
class _Model:
    name: str
    max_model_len: int | None


@dataclass(frozen=True)
class _Connection:
    """The client of one event loop, and what is learned about the server through it."""

    loop: asyncio.AbstractEventLoop
    client: AsyncOpenAI
    model: _Once[_Model]
    plugin: _Once[bool]
    begin_ids: _Once[list[int]]  # what the tokenizer puts before any text: one token, or nothing


class VLLM(Backend):
    """A vLLM server at `base_url` (with or without a final ``/v1``).

    Nothing is sent before the first program runs. `model` defaults to the first one the server
    lists. `timeout_s` bounds every call including its retries; a call that meets a refused or
    broken connection, or status 408, 409, 429 or 5xx, is tried `max_retries` more times with
    back-off (the openai client's rule).
    """

    def __init__(
        self,
        base_url: str,
        api_key: str | None = None,
        model: str | None = None,
        timeout_s: float = 600.0,
        max_retries: int = 2,
    ) -> None:
        if not base_url.startswith(("http://", "https://")):
            raise ValueError(f"base_url must start with http:// or https://, not {base_url!r}")
        self.url = base_url.rstrip("/").removesuffix("/v1")
        self.timeout_s = timeout_s
        self.max_retries = max_retries
        self._api_key = api_key or os.environ.get("VLLM_API_KEY")
        self._model = model
        self._connection: _Connection | None = None

    @property
    def name(self) -> str:
        return f"the vLLM server at {self.url}"

    # --- what the interpreter asks for -----------------------------------------------------

    async def generate(self, request: GenRequest) -> GenAnswer:
        body = _sampling_body(request.sampling, chat=isinstance(request.prompt, ChatPrompt))
        if request.regex is not None:
            body["structured_outputs"] = {"regex": request.regex}
        elif request.json_schema is not None:
            body["structured_outputs"] = {"json": json.loads(request.json_schema)}
        answer = await self._run_model(request.prompt, body)
        with _reading(self.name):
            texts = tuple(_generated(choice) for choice in answer["choices"])
            return GenAnswer(texts, _usage(answer))

    async def warm(self, prompt: Prompt) -> Usage:
        try:
            answer = await self._run_model(prompt, {"max_tokens": 1, "temperature": 0.0})
        except BackendError as error:
            # A chat template may refuse a prompt that is not complete yet. The hint is only for
            # speed: if the prompt itself is at fault, the generation that follows will say so.
            if error.status is not None and 400 <= error.status < 500:
                return Usage(calls=1)
            raise
        with _reading(self.name):
            return _usage(answer)

    async def score(
        self, prompt: Prompt, choices: tuple[str, ...], *, unconditional: bool, warm: bool
    ) -> ScoreAnswer:
        prefix_ids, *full_ids = await asyncio.gather(
            self._tokenize(prompt), *(self._tokenize(prompt.extended(c)) for c in choices)
        )
        start = first_scored_position(prefix_ids, full_ids)
        usage = Usage()
        if warm and len(choices) > 1 and start > 0 and await self.has_plugin():
            usage += await self._warm_ids(prefix_ids[:start])
        # The first token of a sequence has no log-probability: nothing comes before it.
        scored_from = max(start, 1)
        rows, cost = await self._prompt_logprobs(full_ids, scored_from)
        usage += cost
        if any(not logprobs for logprobs in rows):
            raise BackendError(
                "a choice has no token that can be scored: the prompt before this select is "
                "empty, and the model's tokenizer puts nothing before the first token"
            )
        alone: list[tuple[float | None, ...] | None] = [None] * len(choices)
        if unconditional:
            begin_ids = await self._connect().begin_ids.answer()
            ids = [begin_ids + full[scored_from:] for full in full_ids]
            from_choice = max(len(begin_ids), 1)
            alone_rows, cost = await self._prompt_logprobs(ids, from_choice)
            usage += cost
            unknown = (None,) * (from_choice - len(begin_ids))
            alone = [(*unknown, *logprobs) for logprobs in alone_rows]
        scored = tuple(
            ChoiceTokens(tuple(full[scored_from:]), logprobs, unconditional_logprobs)
            for full, logprobs, unconditional_logprobs in zip(full_ids, rows, alone, strict=True)
        )
        return ScoreAnswer(scored, usage)

    async def flush_cache(self) -> None:
        if not await self.has_plugin():
            raise UnsupportedError(
                self.name, "flush_cache", "start it with `vllm serve MODEL --plugin sgl_vllm`"
            )
        await self._call("POST", f"{self.url}/v1/sgl/flush_cache", {})

    async def server_info(self) -> ServerInfo:
        model = await self._connect().model.answer()
        plugin = await self.has_plugin()
        stats = await self._call("GET", f"{self.url}/v1/sgl/stats") if plugin else None
        version = await self._call("GET", f"{self.url}/version")
        with _reading(self.name):
            return ServerInfo(
                url=self.url,
                model=model.name,
                max_model_len=model.max_model_len,
                vllm_version=version["version"],
                plugin=plugin,
                stats=stats,
            )

    async def has_plugin(self) -> bool:
        """Whether the server runs with the plugin; asked once."""
        return await self._connect().plugin.answer()

    # --- requests --------------------------------------------------------------------------

    async def _run_model(self, prompt: Prompt, body: dict[str, Any]) -> dict[str, Any]:
        body = {"model": await self._model_name(), **_prompt_body(prompt), **body}
        if prompt == TextPrompt(""):  # vLLM refuses an empty string, but not the token it is
            body["prompt"] = await self._connect().begin_ids.answer()
            if not body["prompt"]:
                raise BackendError(
                    "the prompt is empty, and the model's tokenizer has no beginning-of-text "
                    "token to start from: put some text before this"
                )
        path = "chat/completions" if isinstance(prompt, ChatPrompt) else "completions"
        return await self._call("POST", f"{self.url}/v1/{path}", body)

    async def _warm_ids(self, ids: list[int]) -> Usage:
        body = {
            "model": await self._model_name(),
            "prompt": ids,
            "max_tokens": 1,
            "temperature": 0.0,
        }
        answer = await self._call("POST", f"{self.url}/v1/completions", body)
        with _reading(self.name):
            return _usage(answer)

    async def _prompt_logprobs(
        self, sequences: list[list[int]], start: int
    ) -> tuple[list[tuple[float, ...]], Usage]:
        """The log-probabilities of the tokens from `start` on in each sequence, in one request."""
        body = {
            "model": await self._model_name(),
            "prompt": sequences,
            "max_tokens": 1,
            "temperature": 0.0,
            "prompt_logprobs": 0,
            "vllm_xargs": {SCORE_FROM: start},
        }
        answer = await self._call("POST", f"{self.url}/v1/completions", body)
        with _reading(self.name):
            rows = [
                tuple(
                    float(row[str(token)]["logprob"])
                    for row, token in zip(
                        choice["prompt_logprobs"][start:], ids[start:], strict=True
                    )
                )
                for choice, ids in zip(answer["choices"], sequences, strict=True)
            ]
            return rows, _usage(answer)

    async def _tokenize(self, prompt: Prompt) -> list[int]:
        body = {"model": await self._model_name(), **_prompt_body(prompt)}
        answer = await self._call("POST", f"{self.url}/tokenize", body)
        with _reading(self.name):
            return [int(token) for token in answer["tokens"]]

    async def _model_name(self) -> str:
        return self._model or (await self._connect().model.answer()).name

    async def _ask_model(self) -> _Model:
        answer = await self._call("GET", f"{self.url}/v1/models")
        with _reading(self.name):
            models = [_Model(str(m["id"]), m.get("max_model_len")) for m in answer["data"]]
            return next((m for m in models if m.name == self._model), models[0])

    async def _ask_plugin(self) -> bool:
        try:
            await self._call("GET", f"{self.url}/v1/sgl/stats")
        except BackendError as error:
            if error.status != 404:
                raise
            return False
        return True

    # --- transport -------------------------------------------------------------------------

    def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        if self._connection is None or self._connection.loop is not loop:
            from openai import AsyncOpenAI  # here: `import sgl_vllm` stays quick

            client = AsyncOpenAI(
                base_url=f"{self.url}/v1",
                api_key=self._api_key or "EMPTY",
                timeout=self.timeout_s,
                max_retries=self.max_retries,
            )
            self._connection = _Connection(
                loop,
                client,
                model=_Once(self._ask_model),
                plugin=_Once(self._ask_plugin),
                begin_ids=_Once(lambda: self._tokenize(TextPrompt(""))),
            )
            weakref.finalize(self, _close, loop, client).atexit = False
        return self._connection

    async def _call(
        self, method: Literal["GET", "POST"], url: str, body: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """One call's JSON object; every failure as a BackendError that says what to do."""
        import openai

        client = self._connect().client
        try:
            async with asyncio.timeout(self.timeout_s):
                if method == "GET":
                    answer = await client.get(url, cast_to=object)
                else:
                    answer = await client.post(url, cast_to=object, body=body)
        except (TimeoutError, openai.APITimeoutError) as error:
            raise BackendError(
                f"{self.name} did not answer within {self.timeout_s:g} s: raise timeout_s, or "
                f"see whether it still runs"
            ) from error
        except openai.APIConnectionError as error:
            reason = str(error.__cause__ or error)
            raise BackendError(
                f"no answer from {self.name} ({reason}): is the URL right, and is the server "
                f"running? Start one with `vllm serve MODEL --plugin sgl_vllm`"
            ) from error
        except (openai.AuthenticationError, openai.PermissionDeniedError) as error:
            have = "refused the api_key it was given" if self._api_key else "wants an api_key"
            raise BackendError(
                f"{self.name} {have}: pass the server's --api-key as VLLM(..., api_key=...)",
                status=error.status_code,
            ) from error
        except openai.APIStatusError as error:
            said = error.body if isinstance(error.body, dict) else {}
            detail = said.get("message") or said.get("detail") or error.message
            raise BackendError(
                f"{self.name} answered {error.status_code}: {detail}",
                status=error.status_code,
            ) from error
        except (openai.APIError, ValueError) as error:
            raise _not_understood(self.name) from error
        if not isinstance(answer, dict):
            raise _not_understood(self.name)
        return answer


RuntimeEndpoint = VLLM


def _close(loop: asyncio.AbstractEventLoop, client: AsyncOpenAI) -> None:
    """Close the client of a backend that is gone, on its own loop, from any thread.

    It must be done: a client that is only garbage collected closes its sockets first and takes
    them from the loop later, when another connection may have got the same file descriptor. That
    connection then never hears its answer.
    """
    with contextlib.suppress(RuntimeError):  # the loop has ended, and the sockets with it
        asyncio.run_coroutine_threadsafe(client.close(), loop)


class _reading:
    """Turns a failure to read an answer into a BackendError."""

    def __init__(self, backend: str) -> None:
        self._backend = backend

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, (LookupError, TypeError, ValueError, AttributeError)):
            raise _not_understood(self._backend) from error


def _not_understood(backend: str) -> BackendError:
    return BackendError(f"{backend} gave an answer that cannot be read: is it a vLLM server?")


def _prompt_body(prompt: Prompt) -> dict[str, Any]:
    if isinstance(prompt, TextPrompt):
        return {"prompt": prompt.text}
    return {
        "messages": [message.as_dict() for message in prompt.messages],
        "add_generation_prompt": prompt.ending == "generate",
        "continue_final_message": prompt.ending == "continue",
    }


def _sampling_body(sampling: Sampling, *, chat: bool) -> dict[str, Any]:
    """Sampling options in the API's words. All are sent: the server has defaults of its own."""
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


def _generated(choice: dict[str, Any]) -> Generated:
    """One choice of an answer, of either API."""
    finish_reason = str(choice["finish_reason"])
    logprobs = choice.get("logprobs")
    if "message" in choice:
        text = choice["message"]["content"] or ""
        tokens = tuple(
            TokenLogprob(
                entry["token"],
                float(entry["logprob"]),
                tuple((top["token"], float(top["logprob"])) for top in entry["top_logprobs"]),
            )
            for entry in (logprobs or {}).get("content") or ()
        )
        return Generated(text, finish_reason, tokens)
    text = choice["text"]
    if not isinstance(text, str):
        raise TypeError("the text of a completion is not a string")
    if not logprobs:
        return Generated(text, finish_reason)
    tops = logprobs["top_logprobs"] or [None] * len(logprobs["tokens"])
    tokens = tuple(
        TokenLogprob(token, float(logprob), tuple((top or {}).items()))
        for token, logprob, top in zip(
            logprobs["tokens"], logprobs["token_logprobs"], tops, strict=True
        )
    )
    return Generated(text, finish_reason, tokens)


def _usage(answer: dict[str, Any]) -> Usage:
    usage = answer["usage"]
    details = usage.get("prompt_tokens_details") or {}
    return Usage(
        prompt_tokens=int(usage["prompt_tokens"]),
        cached_prompt_tokens=int(details.get("cached_tokens") or 0),
        completion_tokens=int(usage.get("completion_tokens") or 0),
        calls=1,
    )
