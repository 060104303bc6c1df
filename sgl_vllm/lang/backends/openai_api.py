"""Requests and answers of OpenAI's API, as all backends with that API use them.

Owns the names of sampling options, and reading completions and chats, whole or in chunks. Which
options a service has is up to its backend.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any  # Any: the JSON of an answer

from sgl_vllm.lang.backends.base import Json
from sgl_vllm.lang.backends.requests import Generated, TokenLogprob
from sgl_vllm.lang.backends.service import Assembled
from sgl_vllm.lang.sampling import Sampling
from sgl_vllm.lang.usage import Usage

# --- requests ------------------------------------------------------------------------------------


def path_of(body: Json) -> str:
    """Where a request is sent: a chat, or a completion."""
    return "chat/completions" if "messages" in body else "completions"


def streamed(body: Json) -> Json:
    """The same request, whose answer comes in chunks."""
    return {"stream": True, "stream_options": {"include_usage": True}, **body}


_OPTIONS = (
    *("max_new_tokens", "min_new_tokens", "n", "stop", "stop_token_ids", "temperature", "top_p"),
    *("top_k", "min_p", "frequency_penalty", "presence_penalty", "ignore_eos"),
)
_NAMES = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}


def sampling_body(sampling: Sampling, *, chat: bool) -> Json:
    """Sampling options under the names of vLLM's API. All are sent, because the server may have
    other defaults."""
    body: Json = {_NAMES.get(name, name): getattr(sampling, name) for name in _OPTIONS}
    if sampling.return_logprob and chat:
        body |= {"logprobs": True, "top_logprobs": sampling.top_logprobs_num}
    elif sampling.return_logprob:
        body |= {"logprobs": sampling.top_logprobs_num}
    return {key: value for key, value in body.items() if value is not None}


# --- answers -------------------------------------------------------------------------------------


def read_generated(choice: Json) -> Generated:
    """One choice of an answer from either API."""
    finish_reason = str(choice["finish_reason"])
    logprobs = choice.get("logprobs") or {}
    if "message" in choice:
        text = _checked_text(choice["message"]["content"])
        tokens = _chat_logprobs(logprobs.get("content") or ())
        return Generated(text, finish_reason, tokens, reasoning=_reasoning(choice["message"]))
    text = choice["text"]
    if text is None:
        raise TypeError("a completion has no text")
    return Generated(_checked_text(text), finish_reason, _completion_logprobs(logprobs))


def _checked_text(text: object) -> str:
    """A text of a chat, or of a chunk, which may be null. TypeError for anything else."""
    if not isinstance(text, str | None):
        raise TypeError("a text is not a string")
    return text or ""


def _reasoning(message: Json) -> str | None:
    """The reasoning that the server's parser removed from the text. The key's name varies."""
    reasoning = message.get("reasoning") or message.get("reasoning_content")
    return reasoning if isinstance(reasoning, str) else None


def _chat_logprobs(entries: Iterable[Json]) -> tuple[TokenLogprob, ...]:
    return tuple(
        TokenLogprob(
            entry["token"],
            float(entry["logprob"]),
            tuple((top["token"], float(top["logprob"])) for top in entry.get("top_logprobs") or ()),
        )
        for entry in entries
    )


def _completion_logprobs(logprobs: Json) -> tuple[TokenLogprob, ...]:
    if not logprobs:
        return ()
    tops = logprobs["top_logprobs"] or [None] * len(logprobs["tokens"])
    return tuple(
        TokenLogprob(token, float(logprob), tuple((top or {}).items()))
        for token, logprob, top in zip(
            logprobs["tokens"], logprobs["token_logprobs"], tops, strict=True
        )
    )


def read_usage(answer: Json) -> Usage:
    """The cost that an answer reports, as one call. Cached tokens that it does not report are None,
    other numbers 0."""
    usage = answer.get("usage") or {}
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    return Usage(
        prompt_tokens=int(usage.get("prompt_tokens") or 0),
        cached_prompt_tokens=None if cached is None else int(cached),
        completion_tokens=int(usage.get("completion_tokens") or 0),
        calls=1,
    )


class AssembledAnswer(Assembled):
    """The chunks of a stream, collected into the form of an answer that was not streamed."""

    def __init__(self, *, chat: bool) -> None:
        self._chat = chat
        self._pieces: list[str] = []
        self._reasoning = ""
        self._logprobs: dict[str, list[Any]] = {}  # as in the answer: unchecked JSON
        self._usage: Json | None = None
        self._id: str | None = None

    def add(self, chunk: Json) -> str:
        self._id = chunk.get("id")
        if chunk.get("usage"):
            self._usage = chunk["usage"]
            self.num_tokens = int(chunk["usage"]["completion_tokens"])
        if not chunk["choices"]:
            return ""
        choice = chunk["choices"][0]
        for key, values in (choice.get("logprobs") or {}).items():
            self._logprobs.setdefault(key, []).extend(values or ())
        self.finish_reason = choice.get("finish_reason") or self.finish_reason
        if self._chat:
            self._reasoning += _reasoning(choice["delta"]) or ""
        piece = _checked_text(choice["delta"].get("content") if self._chat else choice["text"])
        self._pieces.append(piece)
        return piece

    def answer(self) -> Json:
        text = "".join(self._pieces)
        choice: Json = {"finish_reason": self.finish_reason, "logprobs": self._logprobs}
        message = {"content": text, "reasoning": self._reasoning}
        choice |= {"message": message} if self._chat else {"text": text}
        return {"id": self._id, "choices": [choice], "usage": self._usage}
