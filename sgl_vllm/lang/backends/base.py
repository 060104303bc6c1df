"""What the interpreter asks of a backend, and the values that pass between them.

Owns the `Backend` interface and its frozen request and answer types. Knows no protocol: HTTP is
in `vllm.py`. All calls run on the language's own event loop.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, TypeAlias

from sgl_vllm.lang.choices import ChoicesMethod
from sgl_vllm.lang.errors import UnsupportedError
from sgl_vllm.lang.ir import Role, Sampling
from sgl_vllm.lang.media import Media
from sgl_vllm.protocol.scoring import ChoiceTokens

logger = logging.getLogger("sgl_vllm")

program_id: ContextVar[str] = ContextVar("sgl_vllm_program_id", default="")
"""Which program's run a call belongs to; set while its operations run, for backends to send."""

branch_name: ContextVar[str] = ContextVar("sgl_vllm_branch_name", default="")
"""Which branch of that run a call belongs to, such as ``fork[1]``; empty outside of forks."""

Watch: TypeAlias = Callable[[str, "int | None"], bool]
"""Gets each piece of text as it comes, and how many tokens have come so far if that is known.
Returns True when enough has come: the backend then ends the generation, as by its length. A backend
that cannot stream calls it once, with the whole text."""


Content: TypeAlias = "str | tuple[str | Media, ...]"


@dataclass(frozen=True)
class Message:
    """One turn of a chat: text, or texts and media in their order."""

    role: Role
    content: Content

    def as_dict(self) -> dict[str, Any]:
        """As the chat API of OpenAI, and of vLLM, takes it."""
        if isinstance(self.content, str):
            return {"role": self.role, "content": self.content}
        return {"role": self.role, "content": [_part(part) for part in self.content]}

    @property
    def text(self) -> str:
        """The text alone."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part for part in self.content if isinstance(part, str))

    def extended(self, suffix: str) -> Message:
        """With more text at the end."""
        if isinstance(self.content, str):
            return replace(self, content=self.content + suffix)
        if self.content and isinstance(self.content[-1], str):
            return replace(self, content=(*self.content[:-1], self.content[-1] + suffix))
        return replace(self, content=(*self.content, suffix))


def _part(part: str | Media) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    return {"type": f"{part.kind}_url", f"{part.kind}_url": {"url": part.url}}


@dataclass(frozen=True)
class TextPrompt:
    """A prompt without roles: the text itself."""

    text: str

    def extended(self, suffix: str) -> TextPrompt:
        return TextPrompt(self.text + suffix)


@dataclass(frozen=True)
class ChatPrompt:
    """A prompt with roles, to be rendered by the server's chat template.

    `ending` says how the rendered prompt ends: "closed" after the last turn's end, "generate"
    with the opening of an empty assistant turn, "continue" inside the last turn, after its text.
    """

    messages: tuple[Message, ...]
    ending: Literal["closed", "generate", "continue"]

    def extended(self, suffix: str) -> ChatPrompt:
        """The prompt with `suffix` added to its open turn."""
        if self.ending == "generate":
            return ChatPrompt((*self.messages, Message("assistant", suffix)), "continue")
        assert self.ending == "continue", "a closed turn cannot be extended"
        *before, last = self.messages
        return ChatPrompt((*before, last.extended(suffix)), "continue")

    @property
    def media(self) -> tuple[Media, ...]:
        """The images and videos in it, in their order."""
        contents = (m.content for m in self.messages if not isinstance(m.content, str))
        return tuple(part for content in contents for part in content if isinstance(part, Media))


Prompt: TypeAlias = TextPrompt | ChatPrompt


@dataclass(frozen=True)
class Usage:
    """What was spent, in tokens and calls, as the server reports it; adds up with ``+``.

    `cached_prompt_tokens` is the part of `prompt_tokens` found in the server's prefix cache, and
    `forced_tokens` the part of `completion_tokens` that a constraint left no choice about and
    that cost no decoding step; a server that does not report them counts as 0. `calls` counts
    requests that ran the model, with prefix hints and selects among them. `saved_calls` and
    `saved_prompt_tokens` are what API speculative execution made unnecessary.
    """

    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    completion_tokens: int = 0
    calls: int = 0
    forced_tokens: int = 0
    saved_calls: int = 0
    saved_prompt_tokens: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(*(getattr(self, n) + getattr(other, n) for n in _USAGE_FIELDS))

    def cost(
        self, *, prompt: float, completion: float, cached_prompt: float | None = None
    ) -> float:
        """The price, in whatever currency the prices per million tokens are given in.

        `cached_prompt` is the price of prompt tokens found in the cache, by default that of all.
        """
        cached = prompt if cached_prompt is None else cached_prompt
        computed_tokens = self.prompt_tokens - self.cached_prompt_tokens
        millionths = (
            computed_tokens * prompt
            + self.cached_prompt_tokens * cached
            + self.completion_tokens * completion
        )
        return millionths / 1_000_000


_USAGE_FIELDS = tuple(f.name for f in fields(Usage))


@dataclass(frozen=True)
class GenRequest:
    """One generation: a prompt, complete sampling options, and at most one constraint.

    With `watch` the text is streamed; only for one text (`n` = 1).
    """

    prompt: Prompt
    sampling: Sampling
    regex: str | None = None
    json_schema: str | None = None
    watch: Watch | None = field(default=None, compare=False)


@dataclass(frozen=True)
class TokenLogprob:
    """A generated token, its log-probability, and the `top` alternatives at its position."""

    text: str
    logprob: float
    top: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class Generated:
    """One generated text.

    `logprobs` has an entry per token if they were asked for. `forced` are the half-open intervals
    of the text, in characters, that the constraint left no choice about, if the server says so.
    `reasoning` is what the model thought, where the service has taken it out of the text.
    """

    text: str
    finish_reason: str
    logprobs: tuple[TokenLogprob, ...] = ()
    forced: tuple[tuple[int, int], ...] = ()
    reasoning: str | None = None


@dataclass(frozen=True)
class GenAnswer:
    """The `n` texts of one generation and what they cost. `prompt_logprobs` are those of the
    prompt's tokens from `logprob_start_len` on, if they were asked for."""

    texts: tuple[Generated, ...]
    usage: Usage
    prompt_logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class ScoreAnswer:
    """The scored tokens of every choice, in order, and what scoring cost."""

    choices: tuple[ChoiceTokens, ...]
    usage: Usage


@dataclass(frozen=True)
class ChoiceAnswer:
    """Which choice a backend that knows no scores has made, and what it cost."""

    index: int
    usage: Usage


@dataclass(frozen=True)
class ServerInfo:
    """What runs at the other end. `stats` is the plugin's own report, None on a stock server."""

    url: str
    model: str
    max_model_len: int | None
    vllm_version: str | None
    plugin: bool
    stats: dict[str, Any] | None


class Backend(ABC):
    """A model behind some protocol. Every method ends in bounded time or raises BackendError.

    What a backend cannot do raises UnsupportedError, which names it and the feature; where another
    way gives the same answer it takes that, and says so once in the log.
    """

    continues_turns: bool = True
    """Whether a chat whose last turn is unfinished can be continued in that turn."""

    tells_tokens: bool = False
    """Whether `watch` is told how many tokens have come, after each. The interpreter takes it back
    where it turns out otherwise."""

    scoreless_methods: tuple[ChoicesMethod, ...] | None = None
    """The methods that may be asked of a backend which chooses without scores; None if it gives
    scores, which serve every method."""

    @property
    @abstractmethod
    def name(self) -> str:
        """What to call this backend in messages, with its address."""

    @abstractmethod
    async def generate(self, request: GenRequest) -> GenAnswer:
        """Generate."""

    async def score(
        self, prompt: Prompt, choices: tuple[str, ...], *, unconditional: bool, warm: bool
    ) -> ScoreAnswer | ChoiceAnswer:
        """Score each of `choices` as the continuation of `prompt`, or just choose one.

        `unconditional` asks for the logprobs without the prompt too. `warm` says that the prompt
        is worth sending ahead, as the server has not seen it.
        """
        raise UnsupportedError(self.name, "select", "use gen with a regex or a list in the prompt")

    async def warm(self, prompt: Prompt) -> Usage:
        """Make the server compute and cache `prompt` (the frontend hint); generates nothing.

        Does nothing where there is no cache to fill.
        """
        return Usage()

    async def flush_cache(self) -> None:
        """Empty the server's prefix cache."""
        raise UnsupportedError(self.name, "flush_cache", "only a server of one's own has it")

    async def server_info(self) -> ServerInfo:
        """Ask the server what it is."""
        raise UnsupportedError(self.name, "get_server_info", "only a server of one's own has it")

    async def aclose(self) -> None:  # noqa: B027  # there may be nothing to close
        """Close connections. The backend may be used again afterwards."""


class SaidOnce:
    """Fall-backs that a backend has told of."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._said: set[str] = set()

    def say(self, what: str) -> None:
        """Log `what` as a warning, the first time only."""
        if what not in self._said:
            self._said.add(what)
            logger.warning("%s: %s", self._backend.name, what)
