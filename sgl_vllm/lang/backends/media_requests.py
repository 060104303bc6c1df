"""What a program asks of a service beside text: speech, spoken answers, pictures, transcriptions.

Owns these requests and their answer as values. `openai_media.py` sends them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar, TypeAlias

from sgl_vllm.lang.backends.base import ChatPrompt, Usage
from sgl_vllm.lang.media import Media
from sgl_vllm.lang.media_options import ServiceOptions, Voice
from sgl_vllm.lang.sampling import Sampling

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
