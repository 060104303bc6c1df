"""What programs ask of backends, and the answers, as values.

Owns generations, scores of choices, and what is asked of a service beside text: speech, spoken
answers, pictures and transcriptions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeAlias  # Any: the plugin's report

from sgl_vllm.lang.constraints import Constraint
from sgl_vllm.lang.media import Media, ServiceOptions, Voice
from sgl_vllm.lang.prompts import ChatPrompt, Prompt
from sgl_vllm.lang.sampling import Sampling
from sgl_vllm.lang.usage import Usage
from sgl_vllm.protocol.hints import NO_HINTS, Hints
from sgl_vllm.protocol.scoring import ChoiceTokens

Watch: TypeAlias = Callable[[str, "int | None"], bool]
"""Receives each piece of text as it arrives, and the number of tokens so far if that is known.
Returns True to end the generation, as if its length limit had been reached. A backend that cannot
stream calls it once, with the whole text."""


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
class ServerInfo:
    """What runs on the server. `stats` is the plugin's report, None on a stock server."""

    url: str
    model: str
    max_model_len: int | None
    vllm_version: str | None
    plugin: bool
    stats: dict[str, Any] | None


# --- beside text ---------------------------------------------------------------------------------

WatchMedia: TypeAlias = Callable[[str, bytes], None]
"""Receives each piece of the text and of the file as it arrives. Together the pieces are the text
and the file, but for the length in the header of a WAV file."""


@dataclass(frozen=True)
class _MediaRequest:
    """`feature` and `route` name it in messages."""

    feature: ClassVar[str]
    route: ClassVar[str]

    options: ServiceOptions


@dataclass(frozen=True)
class SpeechRequest(_MediaRequest):
    """Speak `text`. With `watch`, the audio may arrive in pieces."""

    feature = "speech"
    route = "/v1/audio/speech"

    text: str
    voice: Voice
    watch: WatchMedia | None = field(default=None, compare=False)


@dataclass(frozen=True)
class SpokenRequest(_MediaRequest):
    """Answer a chat aloud. The answer's text is the transcript. With `watch`, both may arrive in
    pieces."""

    feature = "a spoken answer"
    route = "/v1/chat/completions"

    prompt: ChatPrompt
    sampling: Sampling
    voice: Voice
    watch: WatchMedia | None = field(default=None, compare=False)


@dataclass(frozen=True)
class PictureRequest(_MediaRequest):
    """Draw what `description` says, `size` pixels large, such as "1024x1024"."""

    feature = "picture"
    route = "/v1/images/generations"

    description: str
    size: str | None = None


@dataclass(frozen=True)
class TranscriptionRequest(_MediaRequest):
    """Write down what is said in `audio`. `language` is a code such as "en", and `hint` a text that
    names or spells what may be said."""

    feature = "transcribe"
    route = "/v1/audio/transcriptions"

    audio: Media
    language: str | None = None
    hint: str | None = None


MediaRequest: TypeAlias = SpeechRequest | SpokenRequest | PictureRequest | TranscriptionRequest


@dataclass(frozen=True)
class MediaAnswer:
    """The text and the cost of an answer, and what it made beside text.

    `text` is what is said, or the description that a picture was drawn from.
    """

    text: str
    usage: Usage
    media: Media | None = None
    finish_reason: str = "stop"
