"""What a prompt holds, as immutable values: its text, its turns, and where each piece comes from.

Owns what appending does to a prompt. Runs nothing and knows no server; the interpreter keeps one
`Transcript` per stream and replaces it at every operation.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, TypeAlias

from sgl_vllm.lang.backends.base import (
    ChatPrompt,
    Content,
    Message,
    Prompt,
    TextPrompt,
    TokenLogprob,
    Usage,
)
from sgl_vllm.lang.ir import Expr, Role, RoleBegin, RoleEnd, Show, Text
from sgl_vllm.lang.media import Media

HINT_MIN_CHARS = 64
"""A prefix is worth a request of its own when the server has not seen at least this much of it.
Below that (about 16 tokens) the round trip costs more than the branches save."""


@dataclass(frozen=True)
class GenMeta:
    """What is known of a generation beside its text; one entry per text for `n` > 1. `with_text`
    says whether the tokens of log-probabilities are told as text."""

    finish_reason: tuple[str, ...]
    output_token_logprobs: tuple[tuple[TokenLogprob, ...], ...]
    usage: Usage
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    with_text: bool = True


@dataclass(frozen=True)
class SelectMeta:
    """How a select was decided: per choice its score and the logprobs of its tokens; both empty
    for a backend that chooses without scores."""

    choices: tuple[str, ...]
    scores: tuple[float, ...]
    token_logprobs: tuple[tuple[float, ...], ...]
    usage: Usage


@dataclass(frozen=True)
class Variable:
    """A value a program produced, its text in the prompt, and how it came about."""

    value: Any
    text: str
    meta: GenMeta | SelectMeta | None = None
    reasoning: Any = None

    @classmethod
    def of(cls, value: object) -> Variable:
        """A value of the program's own."""
        return cls(value, value if isinstance(value, str) else str(value))


def meta_info(variable: Variable) -> dict[str, Any]:
    """What `get_meta_info` returns for a variable: SGLang's names, as plain JSON-like values."""

    def entries(tokens: Sequence[TokenLogprob], with_text: bool) -> list[dict[str, Any]]:
        if with_text:
            return [asdict(token) for token in tokens]
        return [
            {"text": None, "logprob": t.logprob, "top": tuple((None, p) for _, p in t.top)}
            for t in tokens
        ]

    match variable.meta:
        case None:
            return {}
        case GenMeta(finish_reasons, logprobs, usage, prompt_logprobs, with_text):
            tokens = [entries(text, with_text) for text in logprobs]
            is_list = len(finish_reasons) > 1
            return {
                "finish_reason": list(finish_reasons) if is_list else finish_reasons[0],
                "output_token_logprobs": tokens if is_list else tokens[0],
                "prompt_token_logprobs": entries(prompt_logprobs, with_text),
                **asdict(usage),
            }
        case SelectMeta(choices, scores, token_logprobs, usage):
            return {
                "choices": list(choices),
                "scores": list(scores),
                "normalized_prompt_logprobs": list(scores),
                "token_logprobs": [list(logprobs) for logprobs in token_logprobs],
                **asdict(usage),
            }


SpanKind: TypeAlias = Literal["text", "variable", "gen", "select", "tool", "media"]


@dataclass(frozen=True)
class Span:
    """A piece of a prompt: ``text[start:end]`` of its transcript.

    `turn` counts the turns from 0; `role` is None in a program without roles. `forced` are the
    intervals of the text that a constraint left no choice about. `usage` is that of the request
    that made the piece, whose prompt was everything before `start`.
    """

    kind: SpanKind
    start: int
    end: int
    name: str | None = None
    role: Role | None = None
    turn: int = 0
    forced: tuple[tuple[int, int], ...] = ()
    usage: Usage | None = None
    media: Media | None = None


@dataclass(frozen=True)
class Transcript:
    """What a stream has written so far; a fork copies it.

    `text` is everything in order, and `spans` cover it. In a program with roles, `messages` are the
    closed turns, and ``text[turn_start:]`` with `turn_media` (each at its place in the text) is the
    content of the open turn of `role`. The server has seen ``text[:seen_chars]`` of this prompt.
    """

    text: str = ""
    messages: tuple[Message, ...] = ()
    role: Role | None = None
    turn_start: int = 0
    turn_media: tuple[tuple[int, Media], ...] = ()
    seen_chars: int = 0
    spans: tuple[Span, ...] = ()

    @classmethod
    def of(cls, expressions: Iterable[Expr]) -> Transcript:
        """What a program has written that appended constants, turns and media."""
        transcript = cls()
        for expr in expressions:
            match expr:
                case Text(value):
                    transcript = transcript.appended(value)
                case RoleBegin(role):
                    transcript = transcript.turn_begun(role)
                case RoleEnd(role):
                    transcript = transcript.turn_ended(role)
                case Show(shown):
                    transcript = transcript.shown(shown)
                case _:
                    raise TypeError(f"{expr} is no constant")
        return transcript

    @property
    def turn_text(self) -> str:
        """The text of the open turn."""
        return self.text[self.turn_start :]

    @property
    def _turn_is_empty(self) -> bool:
        return self.turn_start == len(self.text) and not self.turn_media

    def _turn_content(self) -> Content:
        if not self.turn_media:
            return self.turn_text
        parts: list[str | Media] = []
        begin = self.turn_start
        for position, shown in self.turn_media:
            parts += [self.text[begin:position], shown]
            begin = position
        parts.append(self.text[begin:])
        return tuple(part for part in parts if part != "")

    def all_messages(self) -> tuple[Message, ...]:
        """The turns, the open one included if it holds anything."""
        if self.role is None or self._turn_is_empty:
            return self.messages
        return (*self.messages, Message(self.role, self._turn_content()))

    def prompt(self) -> Prompt:
        """This prompt as it stands."""
        if self.role is None and not self.messages:
            return TextPrompt(self.text)
        if self.role is not None and not self._turn_is_empty:
            return ChatPrompt(self.all_messages(), "continue")
        if self.role == "assistant":
            return ChatPrompt(self.messages, "generate")
        return ChatPrompt(self.messages, "closed")

    def appended(
        self,
        text: str,
        kind: SpanKind = "text",
        name: str | None = None,
        *,
        forced: tuple[tuple[int, int], ...] = (),
        usage: Usage | None = None,
    ) -> Transcript:
        """With `text` at the end; `forced` counts from its beginning."""
        if self.role is None and self.messages:
            raise ValueError("text outside of a turn: a program with roles has text only in turns")
        start = len(self.text)
        span = Span(
            kind,
            start,
            start + len(text),
            name,
            self.role,
            len(self.messages),
            tuple((start + a, start + b) for a, b in forced),
            usage,
        )
        return replace(self, text=self.text + text, spans=(*self.spans, span))

    def shown(self, media: Media) -> Transcript:
        """With an image or a video at the end of the open turn."""
        if self.role is None:
            raise ValueError(f"the {media.kind} is outside of a turn: put it in user(...)")
        here = len(self.text)
        span = Span("media", here, here, None, self.role, len(self.messages), media=media)
        return replace(
            self, turn_media=(*self.turn_media, (here, media)), spans=(*self.spans, span)
        )

    def turn_begun(self, role: Role) -> Transcript:
        if self.role is not None:
            raise ValueError(f"the {self.role} turn is still open")
        if self.text and not self.messages:
            raise ValueError("text before the first turn: a program with roles has text in turns")
        return replace(self, role=role, turn_start=len(self.text))

    def turn_ended(self, role: Role) -> Transcript:
        if self.role != role:
            raise ValueError(f"no {role} turn is open" + (f", {self.role}'s is" * bool(self.role)))
        message = Message(role, self._turn_content())
        return replace(self, messages=(*self.messages, message), role=None, turn_media=())

    def seen(self) -> Transcript:
        """After a request of everything in it."""
        return replace(self, seen_chars=len(self.text))

    @property
    def is_worth_a_hint(self) -> bool:
        return len(self.text) - self.seen_chars >= HINT_MIN_CHARS
