"""What a prompt contains, as immutable values: text, turns, and where each piece comes from.

Owns what appending does to a prompt, and the description of a variable. Runs nothing and knows no
server. Each stream has one `Transcript` and replaces it with every operation.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Literal, TypeAlias

from sgl_vllm.lang.backends.requests import TokenLogprob
from sgl_vllm.lang.ir import Expr, Role, RoleBegin, RoleEnd, Show, Text, Value
from sgl_vllm.lang.media import Media
from sgl_vllm.lang.prompts import ChatPrompt, Content, Message, Prompt, TextPrompt
from sgl_vllm.lang.usage import Usage

WARM_MIN_CHARS = 64
"""How much of a prefix the server must not have seen yet for a hint to be worth its request. Below
that (about 16 tokens), the round trip costs more than the branches save."""


@dataclass(frozen=True)
class GenMeta:
    """How a generation came about. The tuples have an entry per text (`n` of them). `with_text`
    says whether `get_meta_info` shows the tokens of log-probabilities as text. `request_id` is by
    what the server knows the request."""

    finish_reason: tuple[str, ...]
    output_token_logprobs: tuple[tuple[TokenLogprob, ...], ...]
    usage: Usage
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    with_text: bool = True
    request_id: str | None = None


@dataclass(frozen=True)
class SelectMeta:
    """How a select was decided: each choice's score and token log-probabilities. Both are empty
    for a backend that chooses without scores. `details` are what a method of the program's own
    adds."""

    choices: tuple[str, ...]
    scores: tuple[float, ...]
    token_logprobs: tuple[tuple[float, ...], ...]
    usage: Usage
    details: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Report:
    """How a primitive came to its answer, as `get_meta_info` returns it."""

    details: Mapping[str, Value]


@dataclass(frozen=True)
class MediaMeta:
    """How speech, a picture or a transcription came about."""

    finish_reason: str
    usage: Usage


@dataclass(frozen=True)
class Variable:
    """A value that a program produced, its text in the prompt, and how it came about. With
    `is_joined`, it is the list of the values that the branches of a fork produced."""

    value: Value  # of the user's types
    text: str
    meta: GenMeta | SelectMeta | MediaMeta | Report | None = None
    reasoning: str | list[str | None] | None = None
    is_joined: bool = False

    @classmethod
    def of(cls, value: object) -> Variable:
        """A value of the program's own."""
        return cls(value, value if isinstance(value, str) else str(value))


def meta_info(variable: Variable) -> dict[str, Value]:
    """What `get_meta_info` returns for a variable: SGLang's names, as plain JSON-like values."""

    def entries(tokens: Sequence[TokenLogprob], with_text: bool) -> list[dict[str, Value]]:
        if with_text:
            return [asdict(token) for token in tokens]
        return [
            {"text": None, "logprob": t.logprob, "top": tuple((None, p) for _, p in t.top)}
            for t in tokens
        ]

    match variable.meta:
        case None:
            return {}
        case Report(details):
            return dict(details)
        case GenMeta(finish_reasons, logprobs, usage, prompt_logprobs, with_text, request_id):
            tokens = [entries(text, with_text) for text in logprobs]
            is_list = len(finish_reasons) > 1
            return {
                "id": request_id,
                "finish_reason": list(finish_reasons) if is_list else finish_reasons[0],
                "output_token_logprobs": tokens if is_list else tokens[0],
                "prompt_token_logprobs": entries(prompt_logprobs, with_text),
                **asdict(usage),
            }
        case SelectMeta(choices, scores, token_logprobs, usage, details):
            return {
                "choices": list(choices),
                "scores": list(scores),
                "normalized_prompt_logprobs": list(scores),
                "token_logprobs": [list(logprobs) for logprobs in token_logprobs],
                **asdict(usage),
                **details,
            }
        case MediaMeta(finish_reason, usage):
            return {"finish_reason": finish_reason, **asdict(usage)}


SpanKind: TypeAlias = Literal["text", "variable", "gen", "select", "tool", "media"]


@dataclass(frozen=True)
class Span:
    """A piece of a prompt: ``text[start:end]`` of its transcript.

    `turn` counts turns from 0, and `role` is None in a program without roles. `forced` are the
    intervals of the text that a constraint determined. `usage` belongs to the request that
    generated the piece, whose prompt was everything before `start`. `media` was shown here, or made
    by a request, or is what the text was transcribed from.
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


OrderSource: TypeAlias = Literal["batch", "memory", "key", "given"]
"""What an order was chosen from."""


@dataclass(frozen=True)
class Order:
    """The order of one `any_order`.

    - `segments`: their texts, as given. `order`: their numbers, from 0, in the order used. A
      `repeated` segment was already in the prompt and is not in it.
    - `source`: "batch" for an order planned for all programs of a `run_batch`, "memory" for what
      this process had sent, "key" as asked for, "given" where nothing was known.
    - `shared_chars`: of the segments, how many characters this process had sent before after the
      same prompt in this order. `shared_chars_as_given`: the same for the order given. What the
      server did read from its cache is in `usage`.
    """

    segments: tuple[str, ...]
    order: tuple[int, ...]
    source: OrderSource
    shared_chars: int
    shared_chars_as_given: int
    repeated: tuple[int, ...] = ()

    @property
    def saved_chars(self) -> int:
        """How many more characters are shared than in the order given. Below 0 only if a key
        or the plan of a batch decided."""
        return self.shared_chars - self.shared_chars_as_given


@dataclass(frozen=True)
class Transcript:
    """What a stream has written so far. A fork copies it.

    Invariant: `spans` cover `text` in order. In a program with roles, `messages` are the closed
    turns, and ``text[turn_start:]`` with `turn_media` (each with its position in the text) is the
    content of the open turn, which belongs to `role`. The server has seen ``text[:seen_chars]``.
    `orders` are those of `any_order`, in the order of the text, and `reusable` the places in the
    text of the segments whose KV may be reused from elsewhere.
    """

    text: str = ""
    messages: tuple[Message, ...] = ()
    role: Role | None = None
    turn_start: int = 0
    turn_media: tuple[tuple[int, Media], ...] = ()
    seen_chars: int = 0
    spans: tuple[Span, ...] = ()
    orders: tuple[Order, ...] = ()
    reusable: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, expressions: Iterable[Expr]) -> Transcript:
        """The transcript of a program that appends only constant text, turns and media."""
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
                    raise TypeError(f"{expr!s} is not constant")
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
        """The turns, including an open one that is not empty."""
        if self.role is None or self._turn_is_empty:
            return self.messages
        return (*self.messages, Message(self.role, self._turn_content()))

    @property
    def last_text(self) -> str:
        """The text of the last turn, or all text if there are no turns."""
        messages = self.all_messages()
        return messages[-1].text if messages else self.text

    def prompt(self) -> Prompt:
        """The prompt so far."""
        if self.role is None and not self.messages:
            return TextPrompt(self.text, self.reusable)
        if self.role is not None and not self._turn_is_empty:
            return ChatPrompt(self.all_messages(), "continue", self.reusable)
        if self.role == "assistant":
            return ChatPrompt(self.messages, "generate", self.reusable)
        return ChatPrompt(self.messages, "closed", self.reusable)

    def appended(
        self,
        text: str,
        kind: SpanKind = "text",
        name: str | None = None,
        *,
        forced: tuple[tuple[int, int], ...] = (),
        usage: Usage | None = None,
        media: Media | None = None,
    ) -> Transcript:
        """With `text` at the end. `forced` is relative to the beginning of `text`. Without text,
        `media` is only recorded, which it can be outside of a turn."""
        if self.role is None and self.messages and not (media and not text):
            raise ValueError("text outside of a turn: with roles, put it into a turn")
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
            media,
        )
        return replace(self, text=self.text + text, spans=(*self.spans, span))

    def shown(self, media: Media) -> Transcript:
        """With an image, a video or audio at the end of the open turn."""
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
            raise ValueError("text before the first turn: with roles, put it into a turn")
        return replace(self, role=role, turn_start=len(self.text))

    def turn_ended(self, role: Role) -> Transcript:
        if self.role != role:
            opened = f"the open turn is {self.role}'s" if self.role else "no turn is open"
            raise ValueError(f"{role}_end: {opened}")
        message = Message(role, self._turn_content())
        return replace(self, messages=(*self.messages, message), role=None, turn_media=())

    def seen(self) -> Transcript:
        """After a request with this prompt: the server has seen all of it."""
        return replace(self, seen_chars=len(self.text))

    @property
    def is_worth_warming(self) -> bool:
        """Whether to send the prompt ahead. Not where that would compute exactly what may be
        reused approximately."""
        return len(self.text) - self.seen_chars >= WARM_MIN_CHARS and not self.reusable
