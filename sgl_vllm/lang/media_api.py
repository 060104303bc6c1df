"""The functions that make expressions of media: shown ones, and those that a service makes.

Owns their arguments and the checks on them. The expressions themselves are in `ir.py`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any  # Any: images of PIL, and fields of a service's requests

from sgl_vllm.lang import media
from sgl_vllm.lang.ir import Picture, Show, Speech, SpokenGen, Transcription, Var
from sgl_vllm.lang.keywords import suggests
from sgl_vllm.lang.media import SPEECH_FORMATS, Media, ServiceOptions, SpeechFormat, Voice
from sgl_vllm.lang.sampling import sampling_of
from sgl_vllm.lang.tracing.standin import deferrable


@deferrable
def image(path: Any) -> Show:  # SGLang's untyped argument: see read_image
    """Show an image: a path, an http(s) or data URL, bytes, a PIL image, or a `Media` such as the
    value of `picture`. Belongs in a turn."""
    return Show(media.read_image(path))


@deferrable
@suggests
def video(path: Any, num_frames: int | None = None) -> Show:  # as image's
    """Show a video: a path, an http(s) or data URL, or bytes. Belongs in a turn. The model sees
    `num_frames` frames of it (None: the server's default), which a vLLM server must allow with
    ``--trust-request-mm-kwargs``."""
    return Show(media.read_video(path, num_frames))


@deferrable
def audio(source: str | bytes | os.PathLike[str] | Media) -> Show:
    """Let the model hear audio: a path, an http(s) or data URL, bytes, or a `Media` such as the
    value of `speech`. Belongs in a turn.

    The format is that of the bytes: WAV, MP3, FLAC or Ogg. An http(s) URL is sent as it is, for the
    server to download. Raises FileNotFoundError for a path that does not exist, and ValueError for
    other bytes.
    """
    return Show(media.read_audio(source))


@deferrable
@suggests
def speech(
    name: str | None = None,
    text: str | Var | None = None,
    *,
    voice: str | None = None,
    format: SpeechFormat = "wav",
    instructions: str | None = None,
    speed: float | None = None,
    max_tokens: int | None = None,
    temperature: float | None = None,
    model: str | None = None,
    extra_body: Mapping[str, Any] | None = None,
) -> Speech | SpokenGen:
    """Have `text` spoken, or let the model answer aloud, and store the audio as a `Media` in the
    variable `name`.

    With `text`, which may be ``var("x")``, nothing is appended. It goes to ``/v1/audio/speech``.
    Without it, the model answers the chat here, in an assistant turn, and what it says is appended
    as text. That is a chat with ``modalities=["text", "audio"]``. In a streamed run, `s.audio_iter`
    gives the audio piece by piece.

    - `voice` is a name of the service's (None: its default; OpenAI has none and needs one).
    - `format` is the file's: "wav", "mp3", "flac", "opus" or "aac".
    - `instructions` on how to speak, and `speed` (1.0 is normal), are for a given text only;
      `max_tokens` and `temperature`, inherited from `run()` if None, for an answer only.
    - `model` for this request, by default the backend's. `extra_body`: further fields of the
      request's body, as the service has them.

    Raises ValueError for another format, and for options of the other kind.
    """
    if format not in SPEECH_FORMATS:
        raise ValueError(f"format is one of {', '.join(SPEECH_FORMATS)}, not {format!r}")
    as_spoken = Voice(voice, format, instructions, speed)
    options = ServiceOptions(model, extra_body or {})
    if text is not None:
        if max_tokens is not None or temperature is not None:
            raise ValueError("max_tokens and temperature are for an answer: leave out the text")
        return Speech(name, options, text, as_spoken)
    if instructions is not None or speed is not None:
        raise ValueError("instructions and speed are for a text: say it in the chat instead")
    sampling = sampling_of({"max_new_tokens": max_tokens, "temperature": temperature})
    return SpokenGen(name, options, sampling, as_spoken)


@deferrable
@suggests
def picture(
    name: str | None = None,
    description: str | Var | None = None,
    *,
    size: str | None = None,
    model: str | None = None,
    extra_body: Mapping[str, Any] | None = None,
) -> Picture:
    """Have a picture drawn and store it in the variable `name`, a `Media`. Appends nothing.

    It goes to ``/v1/images/generations``. To show it to the model, append ``image(s[name])`` to a
    user turn.

    - `description`: a text or ``var("x")``; by default the last turn, or all text so far in a
      program without turns.
    - `size`: width and height in pixels, such as "1024x1024" (None: the service's default).
    - `model` for this request, by default the backend's. `extra_body`: further fields of the
      request's body, as the service has them, such as ``{"quality": "low"}`` or ``{"seed": 7}``.
    """
    return Picture(name, ServiceOptions(model, extra_body or {}), description, size)


@deferrable
@suggests
def transcribe(
    name: str | None,
    source: str | bytes | os.PathLike[str] | Media | Var,
    *,
    language: str | None = None,
    hint: str | None = None,
    model: str | None = None,
    extra_body: Mapping[str, Any] | None = None,
) -> Transcription:
    """Append what is said in a recording as text, and store it in the variable `name`.

    It goes to ``/v1/audio/transcriptions``.

    - `source`: a path, bytes, a data URL, a `Media`, or ``var("x")`` of a variable with one of
      these. An http(s) URL is refused, because the route takes no URLs.
    - `language`: a code such as "en" (None: the service finds it out). `hint`: a text that names or
      spells what may be said.
    - `model` and `extra_body` as in `picture`.

    Raises FileNotFoundError for a path that does not exist, and ValueError for bytes that are no
    audio in a known format.
    """
    recording = source if isinstance(source, Var) else media.recording_of(source)
    options = ServiceOptions(model, extra_body or {})
    return Transcription(name, options, recording, language, hint)
