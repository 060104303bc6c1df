"""What the interpreter asks of a backend, and the values that pass between them.

Owns the `Backend` interface and its frozen request and answer types. Knows no protocol: HTTP is
in `vllm.py`. All calls run on the language's own event loop.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from sgl_vllm.lang.choices import ChoiceTokens
from sgl_vllm.lang.ir import Role, Sampling


@dataclass(frozen=True)
class Message:
    """One turn of a chat."""

    role: Role
    content: str

    def as_dict(self) -> dict[str, str]:
        return {"role": self.role, "content": self.content}


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
        return ChatPrompt((*before, replace(last, content=last.content + suffix)), "continue")


Prompt: TypeAlias = TextPrompt | ChatPrompt


@dataclass(frozen=True)
class Usage:
    """What was spent, in tokens and calls, as the server reports it; adds up with ``+``.

    `cached_prompt_tokens` is the part of `prompt_tokens` found in the server's prefix cache; a
    server that does not report it counts as 0. `calls` counts requests that ran the model, with
    prefix hints and selects among them.
    """

    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    completion_tokens: int = 0
    calls: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.prompt_tokens + other.prompt_tokens,
            self.cached_prompt_tokens + other.cached_prompt_tokens,
            self.completion_tokens + other.completion_tokens,
            self.calls + other.calls,
        )


@dataclass(frozen=True)
class GenRequest:
    """One generation: a prompt, complete sampling options, and at most one constraint."""

    prompt: Prompt
    sampling: Sampling
    regex: str | None = None
    json_schema: str | None = None


@dataclass(frozen=True)
class TokenLogprob:
    """A generated token, its log-probability, and the `top` alternatives at its position."""

    text: str
    logprob: float
    top: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class Generated:
    """One generated text. `logprobs` has an entry per token if they were asked for."""

    text: str
    finish_reason: str
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class GenAnswer:
    """The `n` texts of one generation and what they cost."""

    texts: tuple[Generated, ...]
    usage: Usage


@dataclass(frozen=True)
class ScoreAnswer:
    """The scored tokens of every choice, in order, and what scoring cost."""

    choices: tuple[ChoiceTokens, ...]
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
    """A model behind some protocol. Every method ends in bounded time or raises BackendError."""

    @property
    @abstractmethod
    def name(self) -> str:
        """What to call this backend in messages, with its address."""

    @abstractmethod
    async def generate(self, request: GenRequest) -> GenAnswer:
        """Generate."""

    @abstractmethod
    async def score(
        self, prompt: Prompt, choices: tuple[str, ...], *, unconditional: bool, warm: bool
    ) -> ScoreAnswer:
        """Score each of `choices` as the continuation of `prompt`.

        `unconditional` asks for the logprobs without the prompt too. `warm` says that the prompt
        is worth sending ahead, as the server has not seen it.
        """

    @abstractmethod
    async def warm(self, prompt: Prompt) -> Usage:
        """Make the server compute and cache `prompt` (the frontend hint); generates nothing."""

    @abstractmethod
    async def flush_cache(self) -> None:
        """Empty the server's prefix cache."""

    @abstractmethod
    async def server_info(self) -> ServerInfo:
        """Ask the server what it is."""
