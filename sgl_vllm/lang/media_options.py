"""Options of `speech`, `picture` and `transcribe`: how speech sounds, and what a service is asked.

Owns these options as values. How a service spells them is up to its backend.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, get_args

SpeechFormat: TypeAlias = Literal["wav", "mp3", "flac", "opus", "aac"]
"""Raw PCM is not among them: it does not say its rate, so that nothing could play it."""

SPEECH_FORMATS: tuple[str, ...] = get_args(SpeechFormat)


@dataclass(frozen=True)
class Voice:
    """`name` is the service's name of the voice (None: its default). `speed` is relative to the
    voice's own."""

    name: str | None = None
    format: SpeechFormat = "wav"
    instructions: str | None = None
    speed: float | None = None


@dataclass(frozen=True)
class ServiceOptions:
    """`model` is the one to ask (None: the backend's). `extra_body` has further fields of the
    request, as the service has them."""

    model: str | None = None
    extra_body: Mapping[str, object] = field(default_factory=dict)
