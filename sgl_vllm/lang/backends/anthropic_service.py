"""The backend for Anthropic's Messages API.

Owns that API's requests, answers and streams, and replacements for what it lacks: a JSON schema and
a select become a tool that the model must call, and whitespace stops are found on the client.
"""

from __future__ import annotations

import json
from types import ModuleType
from typing import NoReturn, cast

from sgl_vllm.lang.backends.base import Json
from sgl_vllm.lang.backends.requests import ChoiceAnswer, GenAnswer, Generated, GenRequest, Watch
from sgl_vllm.lang.backends.scoreless import ScorelessBackend, choice_schema
from sgl_vllm.lang.backends.service import Assembled, Client, ClientBackend
from sgl_vllm.lang.errors import BackendError
from sgl_vllm.lang.keywords import suggests
from sgl_vllm.lang.media import Media
from sgl_vllm.lang.prompts import ChatPrompt, Content, Message, Prompt
from sgl_vllm.lang.sampling import DEFAULT_SAMPLING, Sampling
from sgl_vllm.lang.usage import Usage

_LACKING = {
    "n": "fork the prompt, or use run_batch",
    "min_new_tokens": "ask for a longer text in the prompt",
    "ignore_eos": "use a vLLM server of your own",
    "stop_token_ids": "use stop texts",
    "min_p": "use top_p or top_k",
    "frequency_penalty": "leave it at 0",
    "presence_penalty": "leave it at 0",
    "return_logprob": "the API has no logprobs",
}

_FINISH_REASONS = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "tool_use": "stop",  # the model calls only the tool that it must call
    "max_tokens": "length",
}

_SELECT_MAX_TOKENS = 1024


def _cost(usage: Json) -> Usage:
    """Anthropic counts tokens read from and written to its cache separately."""
    read = int(usage.get("cache_read_input_tokens") or 0)
    written = int(usage.get("cache_creation_input_tokens") or 0)
    return Usage(
        prompt_tokens=int(usage.get("input_tokens") or 0) + read + written,
        cached_prompt_tokens=read,
        completion_tokens=int(usage.get("output_tokens") or 0),
        calls=1,
    )


class Anthropic(ScorelessBackend, ClientBackend):
    """A model of Anthropic's, or a server with its API at `base_url`.

    Without `api_key`, the official client finds one (ANTHROPIC_API_KEY). Programs must have roles,
    and system turns must come first. A `gen` after other text in an assistant turn uses prefill,
    which the service offers for some models only; that text must not end in whitespace. `select`
    lets the model choose, without scores.
    """

    advice_on_key = "pass it as Anthropic(..., api_key=...) or set ANTHROPIC_API_KEY"

    @suggests
    def __init__(
        self,
        model: str,
        *,
        api_key: str | None = None,
        base_url: str | None = None,
        timeout_s: float = 600.0,
        max_retries: int = 2,
    ) -> None:
        super().__init__(api_key, timeout_s, max_retries)
        self.model = model
        self.base_url = base_url

    @property
    def name(self) -> str:
        where = f" at {self.base_url}" if self.base_url else ""
        return f"Anthropic's {self.model}{where}"

    def library(self) -> ModuleType:
        try:
            import anthropic
        except ImportError as error:
            raise BackendError(
                "Anthropic needs the package anthropic: pip install anthropic"
            ) from error
        return anthropic

    def new_client(self) -> Client:
        client = self.library().AsyncAnthropic(
            api_key=self._api_key,
            base_url=self.base_url,
            timeout=self.timeout_s,
            max_retries=self.max_retries,
        )
        return cast("Client", client)

    def raise_as_backend_error(self, error: Exception) -> NoReturn:
        errors = self.library()
        no_key = isinstance(error, errors.AnthropicError) and not isinstance(error, errors.APIError)
        # Without any key, the client fails before it sends anything.
        if no_key or (isinstance(error, TypeError) and "authentication" in str(error)):
            raise BackendError(
                f"{self.name} needs an api_key: {self.advice_on_key} ({error})"
            ) from error
        super().raise_as_backend_error(error)

    # --- the interface of a backend --------------------------------------------------------------

    async def generate(self, request: GenRequest) -> GenAnswer:
        sampling = request.sampling
        self.refuse_options(sampling, _LACKING)
        schema = self.schema_of(request)
        body = self.prompt_body(request.prompt) | _options(sampling)
        stops = (sampling.stop,) if isinstance(sampling.stop, str) else sampling.stop or ()
        if schema is not None:
            if stops:
                self.refuse("stop with json_schema", "leave out stop: the document ends by itself")
            self._force_tool(body, request.prompt, "json_schema", self._object_schema(schema))
        if others := [stop for stop in stops if stop.strip()]:
            body["stop_sequences"] = others
        return await self.generate_until(
            body,
            request,
            tuple(stop for stop in stops if not stop.strip()),
            "the service does not accept a stop text of only whitespace: the text is streamed and "
            "cut at the stop",
        )

    async def score(
        self, prompt: Prompt, choices: tuple[str, ...], *, unconditional: bool, warm: bool
    ) -> ChoiceAnswer:
        body = self.prompt_body(prompt) | {"max_tokens": _SELECT_MAX_TOKENS}
        self._force_tool(body, prompt, "select", choice_schema(choices))
        return await self.choose(body, choices, "a tool that accepts nothing else")

    # --- requests --------------------------------------------------------------------------------

    def prompt_body(self, prompt: Prompt) -> Json:
        if not isinstance(prompt, ChatPrompt):
            self.refuse(
                "a prompt without roles", "put the text into turns (s.user(...), s.assistant(...))"
            )
        if prompt.ending == "continue":
            self._check_prefill(prompt.messages[-1])
        turns = list(prompt.messages)
        system = []
        while turns and turns[0].role == "system":
            system += self._parts(turns.pop(0).content)
        if any(turn.role == "system" for turn in turns):
            self.refuse("a system turn after another turn", "put it first, or into a user turn")
        messages = [
            {
                "role": turn.role,
                "content": turn.content
                if isinstance(turn.content, str)
                else self._parts(turn.content),
            }
            for turn in turns
        ]
        return {"messages": messages} | ({"system": system} if system else {})

    def _check_prefill(self, begun: Message) -> None:
        if begun.role != "assistant":
            self.refuse(f"gen in a {begun.role} turn", "let the assistant write")
        if begun.text != begun.text.rstrip():
            self.refuse(
                "whitespace at the end of the text before a gen",
                "end that text without it: the model writes it, or strip it from the variable",
            )

    def _parts(self, content: Content) -> list[Json]:
        parts = (content,) if isinstance(content, str) else content
        return [
            {"type": "text", "text": part} if isinstance(part, str) else self._image(part)
            for part in parts
        ]

    def _image(self, media: Media) -> Json:
        if media.kind == "audio":
            self.refuse("audio", "transcribe it first, with a backend that has transcribe")
        if media.kind == "video":
            self.refuse("video", "show some of its frames as images")
        if not media.url.startswith("data:"):
            return {"type": "image", "source": {"type": "url", "url": media.url}}
        header, _, data = media.url.removeprefix("data:").partition(",")
        if not header.endswith(";base64"):
            self.refuse("an image in a data URL without base64", "pass its bytes to image(...)")
        source = {"type": "base64", "media_type": header.removesuffix(";base64"), "data": data}
        return {"type": "image", "source": source}

    def _object_schema(self, schema: Json) -> Json:
        if schema.get("type") != "object":
            self.refuse(
                "a json_schema that is not of an object", "make it a property of an object schema"
            )
        return schema

    def _force_tool(self, body: Json, prompt: Prompt, feature: str, schema: Json) -> None:
        """Make the model answer with a document of `schema`."""
        if isinstance(prompt, ChatPrompt) and prompt.ending == "continue":
            self.refuse(
                f"{feature} after other text in a turn", "let the assistant turn begin with it"
            )
        tool = {"name": "answer", "description": "Give the answer.", "input_schema": schema}
        body |= {"tools": [tool], "tool_choice": {"type": "tool", "name": "answer"}}

    async def texts(self, body: Json, watch: Watch | None) -> tuple[list[Generated], Usage]:
        """The text of a message, or the input of the tool that it calls, as JSON text."""
        body = {"model": self.model, **body}
        if watch is not None:
            assembled = _Assembled()
            chunks = self.chunks("/v1/messages", {**body, "stream": True})
            await self.drive(chunks, assembled, watch)
            return [assembled.generated()], _cost(assembled.usage)
        answer = await self.call("/v1/messages", body)
        with self.reading():
            stop_reason, blocks = str(answer["stop_reason"]), answer["content"]
            text = "".join(block["text"] for block in blocks if block["type"] == "text")
            inputs = [block["input"] for block in blocks if block["type"] == "tool_use"]
        if "tools" in body and not inputs:
            raise BackendError(
                f"{self.name} did not answer in the required form: it ended with {stop_reason!r}"
            )
        if "tools" in body:
            text = json.dumps(inputs[0], ensure_ascii=False)
        return [_generated(text, stop_reason)], _cost(answer.get("usage") or {})


def _options(sampling: Sampling) -> Json:
    """Sampling options under Anthropic's names. Options at the API's default are not sent, because
    some models reject them even so."""
    body: Json = {"max_tokens": sampling.max_new_tokens}
    for option in ("temperature", "top_p", "top_k"):
        value = getattr(sampling, option)
        if value not in (None, getattr(DEFAULT_SAMPLING, option)):
            body[option] = value
    return body


def _generated(text: str, stop_reason: str) -> Generated:
    return Generated(text, _FINISH_REASONS.get(stop_reason, stop_reason))


class _Assembled(Assembled):
    """Collects a stream's events into a message."""

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self.usage: Json = {}

    def add(self, chunk: Json) -> str:
        match chunk["type"]:
            case "message_start":
                self.usage |= chunk["message"]["usage"]
            case "message_delta":
                self.finish_reason = chunk["delta"]["stop_reason"]
                self.usage |= {k: v for k, v in chunk["usage"].items() if v is not None}
            case "content_block_delta":
                delta = chunk["delta"]
                piece = delta.get("text") or delta.get("partial_json") or ""
                if not isinstance(piece, str):
                    raise TypeError("a piece of a text is not a string")
                self._pieces.append(piece)
                return piece
        return ""

    def generated(self) -> Generated:
        assert self.finish_reason is not None
        return _generated("".join(self._pieces), self.finish_reason)
