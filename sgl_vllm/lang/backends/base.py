"""The interface between programs and backends: requests, answers, and the `Backend` class.

Owns these types. Knows no protocol: HTTP is in `vllm.py` and the other backends. All calls run on
the language's own event loop.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, TypeAlias  # Any: JSON, counts

from sgl_vllm.lang.ahead_budget import AheadBudget
from sgl_vllm.lang.choices import ChoicesMethod
from sgl_vllm.lang.constraints import JSON_SCHEMA, REGEX, Constraint, ConstraintKind
from sgl_vllm.lang.errors import UnsupportedError
from sgl_vllm.lang.ir import Role
from sgl_vllm.lang.loop import background_loop
from sgl_vllm.lang.media import Media
from sgl_vllm.lang.planning import OrderMemory, SegmentId
from sgl_vllm.lang.sampling import Sampling
from sgl_vllm.protocol.hints import NO_HINTS, Hints
from sgl_vllm.protocol.scoring import ChoiceTokens

if TYPE_CHECKING:
    from sgl_vllm.lang.backends.media_requests import MediaAnswer, MediaRequest

logger = logging.getLogger("sgl_vllm")

Json: TypeAlias = dict[str, Any]
"""A JSON object. Values of answers are unchecked: read them where a wrong type or a missing key
becomes a BackendError (see `ServiceBackend.reading`)."""

program_id: ContextVar[str] = ContextVar("sgl_vllm_program_id", default="")
"""The program run that a call belongs to. Set while its operations run, for backends to send."""

branch_name: ContextVar[str] = ContextVar("sgl_vllm_branch_name", default="")
"""The branch of that run that a call belongs to, such as ``fork[1]``. Empty for the root."""

Watch: TypeAlias = Callable[[str, "int | None"], bool]
"""Receives each piece of text as it arrives, and the number of tokens so far if that is known.
Returns True to end the generation, as if its length limit had been reached. A backend that cannot
stream calls it once, with the whole text."""


# --- prompts -------------------------------------------------------------------------------------

Content: TypeAlias = "str | tuple[str | Media, ...]"


@dataclass(frozen=True)
class Message:
    """One turn of a chat: text, or texts and media in order."""

    role: Role
    content: Content

    def as_dict(self) -> Json:
        """The message in the form of OpenAI's chat API, which is also vLLM's."""
        if isinstance(self.content, str):
            return {"role": self.role, "content": self.content}
        return {"role": self.role, "content": [_part(part) for part in self.content]}

    @property
    def text(self) -> str:
        """The text without media."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part for part in self.content if isinstance(part, str))

    def extended(self, suffix: str) -> Message:
        """The message with more text at its end."""
        if isinstance(self.content, str):
            return replace(self, content=self.content + suffix)
        if self.content and isinstance(self.content[-1], str):
            return replace(self, content=(*self.content[:-1], self.content[-1] + suffix))
        return replace(self, content=(*self.content, suffix))


AUDIO_FORMATS = {"audio/wav": "wav", "audio/mpeg": "mp3", "audio/flac": "flac", "audio/ogg": "ogg"}
"""The names that the parts of messages have for formats of audio."""


def _part(part: str | Media) -> Json:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if part.kind == "audio" and part.media_type in AUDIO_FORMATS:
        sent = {"data": part.url.partition(",")[2], "format": AUDIO_FORMATS[part.media_type]}
        return {"type": "input_audio", "input_audio": sent}
    return {"type": f"{part.kind}_url", f"{part.kind}_url": {"url": part.url}}


@dataclass(frozen=True)
class TextPrompt:
    """A prompt without roles: the text itself.

    `reusable` are the intervals of characters of segments whose KV the server may reuse from
    another place, which is not exact.
    """

    text: str
    reusable: tuple[tuple[int, int], ...] = ()

    def extended(self, suffix: str) -> TextPrompt:
        return replace(self, text=self.text + suffix)


@dataclass(frozen=True)
class ChatPrompt:
    """A prompt with roles, which the server renders with its chat template.

    `ending` says how the rendered prompt ends: "closed" after the end of the last turn, "generate"
    with the opening of an empty assistant turn, "continue" inside the last turn, after its text.
    `reusable` counts through the texts of all messages. With media, servers reuse nothing.
    """

    messages: tuple[Message, ...]
    ending: Literal["closed", "generate", "continue"]
    reusable: tuple[tuple[int, int], ...] = ()

    def extended(self, suffix: str) -> ChatPrompt:
        """The prompt with `suffix` added to its open turn."""
        if self.ending == "generate":
            messages = (*self.messages, Message("assistant", suffix))
            return replace(self, messages=messages, ending="continue")
        assert self.ending == "continue", "a closed turn cannot be extended"
        *before, last = self.messages
        return replace(self, messages=(*before, last.extended(suffix)))

    @property
    def media(self) -> tuple[Media, ...]:
        """The images, videos and audio, in order."""
        contents = (m.content for m in self.messages if not isinstance(m.content, str))
        return tuple(part for content in contents for part in content if isinstance(part, Media))


Prompt: TypeAlias = TextPrompt | ChatPrompt


# --- requests and answers ------------------------------------------------------------------------


@dataclass(frozen=True)
class Usage:
    """What a run or a request has cost, as the server reports it. Usages add up with ``+``.

    - `prompt_tokens`, and `cached_prompt_tokens`, the part of them found in the prefix cache.
    - `cached_block_size`: the cached tokens of each request are counted in whole blocks of this
      many tokens, so that clients of one server cannot guess each other's prompts token by token.
      1 if every token is counted.
    - `completion_tokens`, and `forced_tokens`, the part of them that a constraint determined and
      that needed no decoding step.
    - `calls`: requests that ran the model, including prefix hints and selects.
    - `saved_calls` and `saved_prompt_tokens`: what API speculative execution avoided, and the calls
      of branches that a `vote` did not start.
    - `audio_seconds`: the audio of transcriptions that the server counts by its length.
    - `reused_tokens`: the part of `prompt_tokens` whose KV was reused from another place, so that
      the answer is not exact (`any_order` with `reuse`).

    A number that the server does not report is 0, except `cached_prompt_tokens`, which is None: not
    known. A sum is not known if one of its parts is not. ``str(usage)`` has all that is known in
    words.
    """

    prompt_tokens: int = 0
    cached_prompt_tokens: int | None = 0
    completion_tokens: int = 0
    calls: int = 0
    forced_tokens: int = 0
    saved_calls: int = 0
    saved_prompt_tokens: int = 0
    audio_seconds: float = 0.0
    reused_tokens: int = 0
    cached_block_size: int = 1

    def __add__(self, other: Usage) -> Usage:
        pairs = {n: (getattr(self, n), getattr(other, n)) for n in _COUNTS}
        sums: dict[str, Any] = {n: None if None in p else sum(p) for n, p in pairs.items()}
        return Usage(**sums, cached_block_size=max(self.cached_block_size, other.cached_block_size))

    def __str__(self) -> str:
        return " · ".join(f"{number:,} {name}" for name, number in usage_facts(self))

    def cost(
        self, *, prompt: float, completion: float, cached_prompt: float | None = None
    ) -> float:
        """The price, given prices per million tokens, in their currency.

        `cached_prompt` is the price of prompt tokens found in the cache, by default `prompt`. Where
        their number is not known, all prompt tokens count as computed.
        """
        cached = prompt if cached_prompt is None else cached_prompt
        cached_tokens = self.cached_prompt_tokens or 0
        millionths = (
            (self.prompt_tokens - cached_tokens) * prompt
            + cached_tokens * cached
            + self.completion_tokens * completion
        )
        return millionths / 1_000_000


_COUNTS = tuple(f.name for f in fields(Usage) if f.name != "cached_block_size")


def usage_facts(usage: Usage) -> list[tuple[str, int]]:
    """The names and numbers of a usage in words, without those that are not known or rare ones that
    are 0."""
    cached = usage.cached_prompt_tokens
    always = [
        ("call" if usage.calls == 1 else "calls", usage.calls),
        ("prompt tokens", usage.prompt_tokens),
        *([] if cached is None else [(cached_in_words(usage), cached)]),
        ("generated tokens", usage.completion_tokens),
    ]
    sometimes = [
        ("forced", usage.forced_tokens),
        ("calls saved", usage.saved_calls),
        ("prompt tokens saved", usage.saved_prompt_tokens),
        ("seconds of audio", round(usage.audio_seconds)),
        ("prompt tokens reused, not exactly", usage.reused_tokens),
    ]
    return always + [(name, number) for name, number in sometimes if number]


def cached_in_words(usage: Usage) -> str:
    """What its number of cached tokens counts."""
    size = usage.cached_block_size
    return f"cached in whole blocks of {size:,} tokens" if size > 1 else "cached"


def no_hints() -> Hints:
    """Nothing is known."""
    return NO_HINTS


@dataclass(frozen=True)
class GenRequest:
    """One generation: a prompt, complete sampling options, and at most one constraint.

    With `watch`, the text is streamed; `n` is then 1. `hints` returns what is known to follow. A
    backend that sends hints calls it at the last moment, on the language's own loop.
    """

    prompt: Prompt
    sampling: Sampling
    constraint: Constraint | None = None
    watch: Watch | None = field(default=None, compare=False)
    hints: Callable[[], Hints] = field(default=no_hints, compare=False, repr=False)

    @property
    def regex(self) -> str | None:
        """The constraint if it is a pattern."""
        return self._constraint_text(REGEX)

    @property
    def json_schema(self) -> str | None:
        """The constraint if it is a JSON schema, as JSON text."""
        return self._constraint_text(JSON_SCHEMA)

    def _constraint_text(self, kind: ConstraintKind) -> str | None:
        is_one = self.constraint is not None and self.constraint.kind == kind
        return self.constraint.text if self.constraint is not None and is_one else None


@dataclass(frozen=True)
class TokenLogprob:
    """A token, its log-probability, and the `top` alternatives at its position."""

    text: str
    logprob: float
    top: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class Generated:
    """One generated text.

    `logprobs` has an entry per token if they were requested. `forced` are the half-open intervals
    of the text, in characters, that the constraint determined, if the server reports them.
    `reasoning` is the model's reasoning, if the service has removed it from the text.
    """

    text: str
    finish_reason: str
    logprobs: tuple[TokenLogprob, ...] = ()
    forced: tuple[tuple[int, int], ...] = ()
    reasoning: str | None = None

    def cut(self, position: int) -> Generated:
        """The same, as if it had stopped before character `position`."""
        tokens, num_chars = [], 0
        for token in self.logprobs:
            if num_chars >= position:
                break
            tokens.append(token)
            num_chars += len(token.text)
        return replace(
            self,
            text=self.text[:position],
            finish_reason="stop",
            logprobs=tuple(tokens),
            forced=tuple((a, min(b, position)) for a, b in self.forced if a < position),
        )


@dataclass(frozen=True)
class GenAnswer:
    """The `n` texts of one generation and their cost. `prompt_logprobs` belong to the prompt's
    tokens from `logprob_start_len` on, if requested. The server knows it by `request_id`."""

    texts: tuple[Generated, ...]
    usage: Usage
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    request_id: str | None = None


@dataclass(frozen=True)
class ScoreAnswer:
    """The scored tokens of every choice, in order, and the cost of scoring."""

    choices: tuple[ChoiceTokens, ...]
    usage: Usage


@dataclass(frozen=True)
class ChoiceAnswer:
    """The choice made by a backend that has no scores, and its cost."""

    index: int
    usage: Usage


@dataclass(frozen=True)
class Matched:
    """The tokens of a prompt, and how many of them are cached, from the first on."""

    num_tokens: int
    cached_tokens: int


@dataclass(frozen=True)
class ServerInfo:
    """What runs on the server. `stats` is the plugin's report, None on a stock server."""

    url: str
    model: str
    max_model_len: int | None
    vllm_version: str | None
    plugin: bool
    stats: dict[str, Any] | None


# --- the interface -------------------------------------------------------------------------------


class Backend(ABC):
    """A model behind some protocol. Every method ends in bounded time or raises BackendError.

    A feature that a backend does not have raises UnsupportedError, which names both. If there is
    another way to the same answer, the backend uses that and logs a warning once.
    """

    continues_turns: bool = True
    """Whether the model can continue an unfinished last turn of a chat."""

    tells_tokens: bool = False
    """Whether `watch` receives the number of tokens so far with each piece of text. Set to False
    during a run if that turns out to be wrong."""

    @cached_property
    def ahead_budget(self) -> AheadBudget:
        """How far API speculative execution has paid with this backend."""
        return AheadBudget()

    scoreless_methods: tuple[ChoicesMethod, ...] | None = None
    """The choices methods allowed for a backend that chooses without scores; None for a backend
    that has scores, which support every method."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The backend's name in messages, with its address."""

    @property
    def secrets(self) -> tuple[str, ...]:
        """What no record may contain, such as API keys."""
        return ()

    @abstractmethod
    async def generate(self, request: GenRequest) -> GenAnswer:
        """Generate `request.sampling.n` texts after the prompt."""

    async def score(
        self, prompt: Prompt, choices: tuple[str, ...], *, unconditional: bool, warm: bool
    ) -> ScoreAnswer | ChoiceAnswer:
        """Score each of `choices` as the continuation of `prompt`, or choose one without scores.

        `unconditional` requests the log-probabilities without the prompt as well. `warm` says that
        the server has not seen the prompt, so that sending it ahead may save time.
        """
        raise UnsupportedError(self.name, "select", "use gen with a regex or a list in the prompt")

    async def media(self, request: MediaRequest) -> MediaAnswer:
        """Speak, answer aloud, draw or transcribe."""
        raise UnsupportedError(
            self.name, request.feature, f"use a backend for a server that has {request.route}"
        )

    async def warm(self, prompt: Prompt) -> Usage:
        """Have the server compute and cache `prompt` (the frontend hint) without generating text.

        Does nothing for a backend without a cache to fill.
        """
        return Usage()

    async def warm_ahead(self, prompt: Prompt) -> Usage:
        """`warm`, for a prompt that is not needed yet. May be canceled when it is.

        A server with the plugin computes it when no other request waits.
        """
        return await self.warm(prompt)

    @cached_property
    def orders(self) -> OrderMemory[SegmentId]:
        """The orders of segments that were sent to it, for `any_order`."""
        return OrderMemory()

    async def match(self, prompt: Prompt, candidates: Sequence[str]) -> list[Matched] | None:
        """How much of `prompt` with each of `candidates` after it is in the server's cache.

        `prompt` has no media. A chat's last turn is open. None if the backend cannot know.
        """
        return None

    async def missed_tokens(self, request_id: str) -> Mapping[str, int]:
        """The prompt tokens of an earlier generation that were not read from the server's cache, by
        cause (`protocol/causes.py`). Empty if the backend cannot know, or the server has forgotten.
        """
        return {}

    def flush_cache(self) -> None:
        """Empty the server's prefix cache and wait until that is done."""
        background_loop().call(self.aflush_cache)

    async def aflush_cache(self) -> None:
        """What `flush_cache` runs on the language's own event loop."""
        raise UnsupportedError(self.name, "flush_cache", "use a vLLM server of your own")

    async def server_info(self) -> ServerInfo:
        """Ask the server for its model and versions."""
        raise UnsupportedError(self.name, "get_server_info", "use a vLLM server of your own")

    async def aclose(self) -> None:  # noqa: B027  # a backend without connections needs no override
        """Close connections. The backend can be used again afterwards."""


class BackendHandle:
    """Stands for a backend wherever a program takes one, and has other methods than it, such as
    those of SGLang's backends (`sgl_vllm.sglang`)."""

    @property
    def backend(self) -> Backend:
        """The backend that runs programs."""
        raise NotImplementedError(f"{type(self).__name__} has no backend")


class WarnOnce:
    """Logs each warning of one backend a single time."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._logged: set[str] = set()

    def __call__(self, message: str) -> None:
        if message not in self._logged:
            self._logged.add(message)
            logger.warning("%s: %s", self._backend.name, message)
