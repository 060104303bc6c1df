"""The backend for OpenAI, and for any server with OpenAI's API that is not vLLM.

Owns what that API can express. What it cannot is refused, never silently dropped. LiteLLM takes the
same requests and translates them for each service that it reaches. vLLM's extensions of the API are
in `vllm.py`.
"""

from __future__ import annotations

import asyncio
import os
import re
from abc import abstractmethod
from collections.abc import AsyncGenerator
from types import ModuleType
from typing import Any  # Any: options of LiteLLM's
from urllib.parse import urlsplit

from sgl_vllm.lang.backends.base import Json
from sgl_vllm.lang.backends.openai_api import (
    AssembledAnswer,
    read_generated,
    read_usage,
    sampling_body,
    streamed,
)
from sgl_vllm.lang.backends.openai_client import OpenAIBackend
from sgl_vllm.lang.backends.requests import (
    ChoiceAnswer,
    GenAnswer,
    Generated,
    GenRequest,
    SpokenRequest,
    Watch,
)
from sgl_vllm.lang.backends.scoreless import ScorelessBackend, choice_schema, strict_schema
from sgl_vllm.lang.errors import BackendError
from sgl_vllm.lang.keywords import refuse_unknown, suggests
from sgl_vllm.lang.prompts import ChatPrompt, Prompt, TextPrompt
from sgl_vllm.lang.sampling import Sampling, SamplingDefaults
from sgl_vllm.lang.usage import Usage
from sgl_vllm.spelling import did_you_mean

OPENAI_URL = "https://api.openai.com/v1"

_COMPLETION_MODELS = re.compile(r"gpt-[\w.-]*-instruct(-\d+)?|davinci-002|babbage-002")

_LACKING = {
    "min_new_tokens": "ask for a longer text in the prompt",
    "ignore_eos": "use a vLLM server of your own",
    "stop_token_ids": "use stop texts",
    "top_k": "use top_p",
    "min_p": "use top_p",
    "logprob_start_len": "the API has logprobs only for generated tokens; leave it at -1",
}

_DEFAULTS = {
    "n": 1,
    "temperature": 1.0,
    "top_p": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
}
"""The API's own defaults for options that are not sent."""

MAX_STOPS = 4
"""How many stop texts the API takes."""

_OPTIONS = {*_DEFAULTS, "max_tokens", "stop", "logprobs", "top_logprobs"}


def options_body(sampling: Sampling, *, chat: bool) -> Json:
    """The sampling options that OpenAI's API has."""
    given = sampling_body(sampling, chat=chat)
    body = {name: value for name, value in given.items() if name in _OPTIONS}
    if isinstance(sampling.stop, tuple):
        body["stop"] = list(sampling.stop[:MAX_STOPS])
    return body


def without_defaults(body: Json) -> Json:
    """`body` without options at the API's default, which some models reject even so."""
    return {k: v for k, v in body.items() if k not in _DEFAULTS or v != _DEFAULTS[k]}


def response_format(schema: Json) -> Json:
    """The option that makes a chat answer with a document of `schema`."""
    strict = strict_schema(schema)
    named = {"name": "answer", "schema": strict or schema, "strict": strict is not None}
    return {"type": "json_schema", "json_schema": named}


class OpenAIRequests(ScorelessBackend):
    """A service that accepts OpenAI's requests, however they are sent.

    A chat model accepts only prompts with roles, a completion model only prompts without. The API
    cannot express that a chat continues inside its last turn.

    `select` lets a chat model choose, without scores, by a JSON schema that allows only the
    choices.
    """

    continues_turns = False
    model: str
    is_chat_model: bool

    @abstractmethod
    async def ask(self, body: Json, watch: Watch | None) -> Json:
        """Send a chat (a body with "messages") or a completion, and return the whole answer."""

    async def generate(self, request: GenRequest) -> GenAnswer:
        sampling = request.sampling
        body = self.request_body(request.prompt, sampling)
        if (schema := self.schema_of(request)) is not None:
            if not self.is_chat_model:
                self.refuse("json_schema on a completion model", "use a chat model")
            body["response_format"] = response_format(schema)
        stop = sampling.stop
        return await self.generate_until(
            body,
            request,
            stop if isinstance(stop, tuple) and len(stop) > MAX_STOPS else (),
            f"the API takes {MAX_STOPS} stop texts: the client watches for all, and cuts there",
        )

    async def texts(self, body: Json, watch: Watch | None) -> tuple[list[Generated], Usage]:
        answer = await self.ask(body, watch)
        with self.reading():
            texts = [self._read(choice) for choice in answer["choices"]]
            if len(texts) != body.get("n", 1):
                raise ValueError(f"{len(texts)} texts instead of {body.get('n', 1)}")
            return texts, read_usage(answer)

    def _read(self, choice: Json) -> Generated:
        refusal = (choice.get("message") or {}).get("refusal")
        if refusal and not choice["message"].get("content"):
            raise BackendError(f"{self.name} refused to answer: {refusal}")
        return read_generated(choice)

    # --- prompts ---------------------------------------------------------------------------------

    def request_body(self, prompt: Prompt, sampling: Sampling) -> Json:
        """A prompt and the options for what is generated after it."""
        self.refuse_options(sampling, _LACKING)
        return self.prompt_body(prompt) | options_body(sampling, chat=self.is_chat_model)

    def prompt_body(self, prompt: Prompt) -> Json:
        """A prompt in the form of OpenAI's API."""
        if isinstance(prompt, ChatPrompt) and self.is_chat_model:
            return {"messages": self._messages(prompt)}
        if isinstance(prompt, TextPrompt) and not self.is_chat_model:
            return {"prompt": prompt.text}
        if isinstance(prompt, TextPrompt):
            self.refuse(
                f"a prompt without roles for the chat model {self.model}",
                "put the text into turns (s.user(...), s.assistant(...)); for a model that "
                "completes text, pass is_chat_model=False",
            )
        self.refuse(
            f"a prompt with roles for the completion model {self.model}",
            "leave the roles out; for a chat model, pass is_chat_model=True",
        )

    def _messages(self, prompt: ChatPrompt) -> list[Json]:
        if prompt.ending != "generate":
            self.refuse("gen after other text in a turn", "let the assistant turn begin with it")
        if any(media.num_frames is not None for media in prompt.media):
            self.refuse("num_frames of a video", "leave it out: the service chooses")
        return [message.as_dict() for message in prompt.messages]

    # --- select ----------------------------------------------------------------------------------

    async def score(
        self, prompt: Prompt, choices: tuple[str, ...], *, unconditional: bool, warm: bool
    ) -> ChoiceAnswer:
        body = self.prompt_body(prompt)
        if not self.is_chat_model:
            self.refuse("select on a completion model", "use a chat model, or gen")
        body["response_format"] = response_format(choice_schema(choices))
        return await self.choose(body, choices, "a JSON schema that allows nothing else")


class OpenAI(OpenAIRequests, OpenAIBackend):
    """OpenAI's service, or any server with its API at `base_url` (usually ending in ``/v1``). For
    a vLLM server use `VLLM`, which has more features.

    Without `base_url` and `api_key`, the environment variables OPENAI_BASE_URL and OPENAI_API_KEY
    apply. `is_chat_model` says whether `model` is for chats or completes text. By default that
    depends on its name: OpenAI's instruct models, davinci-002 and babbage-002 complete text.

    `select` lets a chat model choose, without scores, by a JSON schema that allows only the
    choices. Options at the API's defaults are not sent to OpenAI itself, because its reasoning
    models reject them. Other servers may have other defaults and are sent all options.
    """

    advice_on_key = "pass it as OpenAI(..., api_key=...) or set OPENAI_API_KEY"

    @suggests
    def __init__(
        self,
        model: str,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        is_chat_model: bool | None = None,
        timeout_s: float = 600.0,
        max_retries: int = 2,
    ) -> None:
        url = base_url or os.environ.get("OPENAI_BASE_URL") or OPENAI_URL
        key = api_key or os.environ.get("OPENAI_API_KEY")
        super().__init__(url, key, timeout_s, max_retries)
        self.model = model
        if is_chat_model is None:
            is_chat_model = _COMPLETION_MODELS.fullmatch(model) is None
        self.is_chat_model = is_chat_model

    @property
    def is_openai_itself(self) -> bool:
        """Whether this is OpenAI's own service, or Azure's."""
        host = urlsplit(self.base_url).hostname or ""
        return host.endswith((".openai.com", ".openai.azure.com"))

    @property
    def name(self) -> str:
        return (
            f"OpenAI's {self.model}" if self.is_openai_itself else f"the server at {self.base_url}"
        )

    async def ask(self, body: Json, watch: Watch | None) -> Json:
        return await self.post({"model": self.model, **self.adapted(body)}, watch)

    async def model_name(self) -> str:
        return self.model

    async def chat_body(self, request: SpokenRequest) -> Json:
        body = self.request_body(request.prompt, request.sampling)
        return {"model": self.model, **self.adapted(body)}

    def adapted(self, body: Json) -> Json:
        """The body in the form that this service accepts."""
        if not self.is_openai_itself:
            return body
        body = without_defaults(body)
        if "messages" in body and "max_tokens" in body:  # newer models reject max_tokens
            body["max_completion_tokens"] = body.pop("max_tokens")
        return body

    def _messages(self, prompt: ChatPrompt) -> list[Json]:
        for media in prompt.media if self.is_openai_itself else ():
            if media.kind == "video":
                self.refuse("video", "show some of its frames as images")
            if media.kind == "audio" and media.media_type not in ("audio/wav", "audio/mpeg"):
                given = f"audio in {media.media_type}" if media.media_type else "audio at a URL"
                self.refuse(given, "pass the bytes of a WAV or MP3 file")
        return super()._messages(prompt)


# --- LiteLLM -------------------------------------------------------------------------------------

_LITELLM_OPTIONS = (
    "api_key",
    "base_url",
    "max_retries",
    "timeout",
    "timeout_s",
    *SamplingDefaults.__annotations__,
)
"""Options that are known here. Services have others, which LiteLLM passes on."""


class LiteLLM(OpenAIRequests):
    """A chat model under LiteLLM's name for it, such as ``"mistral/mistral-small-latest"``.

    `options` (api_key, base_url, a service's own) are passed to every `litellm.acompletion`. Other
    keys are found where LiteLLM looks for them. A failed call is retried up to `max_retries` times
    by LiteLLM's rule. Options at OpenAI's defaults are not sent, because many services support
    only some of them. LiteLLM rejects what a service does not support.
    """

    is_chat_model = True
    advice_on_no_answer = "is the service's address right, and can this machine reach it?"
    advice_on_key = "pass it as LiteLLM(..., api_key=...) or set the service's environment variable"

    def __init__(
        self, model: str, *, timeout_s: float = 600.0, max_retries: int = 2, **options: Any
    ) -> None:
        misspelled = [name for name in options if did_you_mean(name, _LITELLM_OPTIONS, cutoff=0.85)]
        refuse_unknown("LiteLLM", misspelled, _LITELLM_OPTIONS)
        super().__init__(options.get("api_key"), timeout_s)
        self.model = model
        self.max_retries = max_retries
        self._options = options

    @property
    def name(self) -> str:
        return f"{self.model} through LiteLLM"

    async def ask(self, body: Json, watch: Watch | None) -> Json:
        call: Json = {
            "model": self.model,
            **without_defaults(body),
            "timeout": self.timeout_s,
            "num_retries": self.max_retries,
            **self._options,
        }
        if watch is not None:
            assembled = AssembledAnswer(chat=True)
            await self.drive(self._chunks(streamed(call)), assembled, watch)
            return assembled.answer()
        try:
            async with asyncio.timeout(self.timeout_s):
                answer = await (await _litellm()).acompletion(**call)
        except Exception as error:
            self.raise_as_backend_error(error)
        with self.reading():
            return dict(answer.model_dump())

    async def _chunks(self, call: Json) -> AsyncGenerator[Json]:
        stream = await (await _litellm()).acompletion(**call)
        try:
            async for chunk in stream:
                yield chunk.model_dump()
        finally:
            await stream.aclose()


async def _litellm() -> ModuleType:
    """The package. Its first import takes seconds and may fetch prices from the network, so it
    runs in a thread: programs of other backends share the event loop."""

    def load() -> ModuleType:
        try:
            import litellm
        except ImportError as error:
            raise BackendError("LiteLLM needs the package litellm: pip install litellm") from error
        module: ModuleType = litellm
        return module

    return await asyncio.to_thread(load)
