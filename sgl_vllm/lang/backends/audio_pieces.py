"""Audio that a service sends in pieces: events, chunks of a chat, or the bytes of a file.

Owns reading them. Which route they come from is in `openai_media.py`.
"""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator
from typing import Any  # Any: a response of the client, whose module is imported late

from sgl_vllm.lang.backends.base import Json
from sgl_vllm.lang.backends.requests import WatchMedia
from sgl_vllm.lang.backends.service import ServiceBackend
from sgl_vllm.lang.errors import BackendError
from sgl_vllm.lang.usage import Usage
from sgl_vllm.lang.wav import OPEN_HEADER, samples_of


class ReceivedAudio:
    """A file as it arrives: as the bytes of a file, or as events that have them in base64. A server
    that does not know the events sends the bytes although it was asked for events."""

    def __init__(self, backend: ServiceBackend) -> None:
        self._backend = backend
        self._pieces: list[bytes] = []
        self.usage = Usage(calls=1)
        self.is_complete = False

    @property
    def data(self) -> bytes:
        return b"".join(self._pieces)

    async def pieces_of(self, response: Any) -> AsyncIterator[bytes]:
        """The pieces of a response of the client."""
        self.usage = read_token_usage(
            {
                "input_tokens": response.headers.get("x-vllm-omni-input-tokens"),
                "output_tokens": response.headers.get("x-vllm-omni-output-tokens"),
            }
        )
        if response.headers.get("content-type", "").startswith("text/event-stream"):
            pieces = self._pieces_of_events(response.iter_lines())
        else:
            pieces = response.iter_bytes()
            self.is_complete = True  # the client raises an error if the bytes end early
        async for piece in pieces:
            self._pieces.append(piece)
            yield piece

    async def _pieces_of_events(self, lines: AsyncIterator[str]) -> AsyncIterator[bytes]:
        async for line in lines:
            name, _, text = line.partition(":")
            if name == "data" and text.strip() != "[DONE]":
                with self._backend.reading():
                    piece = self._read(json.loads(text))
                if piece:
                    yield piece

    def _read(self, event: Json) -> bytes:
        """The part of the file that an event has."""
        match event["type"]:
            case "speech.audio.delta":
                return base64.b64decode(event["audio"])
            case "speech.audio.done":
                self.usage = read_token_usage(event.get("usage"))
                self.is_complete = True
            case "speech.audio.error":
                reason = event["error"]["message"]
                raise BackendError(f"{self._backend.name} ended its answer with an error: {reason}")
        return b""


class AssembledSpeech:
    """The chunks of a spoken answer, collected into the form of an answer that was not streamed.

    They have samples, which become a WAV file. OpenAI's have them in ``delta.audio`` beside the
    transcript. vLLM-Omni's have them in ``delta.content`` if their modality is audio, and older
    versions send a WAV file in each.
    """

    num_tokens: int | None = None

    def __init__(self, watch: WatchMedia) -> None:
        self._watch = watch
        self._text = ""
        self._file: list[bytes] = []
        self._usage: Json | None = None
        self.finish_reason: str | None = None

    def watch_text(self, piece: str, _: int | None) -> bool:
        self._watch(piece, b"")
        return False

    def add(self, chunk: Json) -> str:
        """Add a chunk and return its text."""
        self._usage = chunk.get("usage") or self._usage
        if not chunk["choices"]:
            return ""
        choice = chunk["choices"][0]
        self.finish_reason = choice.get("finish_reason") or self.finish_reason
        delta = choice["delta"]
        audio, text = delta.get("audio") or {}, delta.get("content") or ""
        if chunk.get("modality") == "audio":
            audio, text = {"data": text}, ""
        if data := audio.get("data"):
            self._add_samples(samples_of(base64.b64decode(data)))
        piece = str(audio.get("transcript") or text)
        self._text += piece
        return piece

    def _add_samples(self, samples: bytes) -> None:
        pieces = [samples] if self._file else [OPEN_HEADER, samples]
        self._file += pieces
        self._watch("", b"".join(pieces))

    def answer(self) -> Json:
        data = base64.b64encode(b"".join(self._file)).decode()
        message = {"content": self._text, "audio": {"data": data} if self._file else None}
        choice = {"finish_reason": self.finish_reason, "message": message}
        return {"choices": [choice], "usage": self._usage}


def read_token_usage(usage: Json | None) -> Usage:
    """The cost of one call as these routes report it: in tokens, or in seconds of audio."""
    reported = usage or {}
    return Usage(
        prompt_tokens=int(reported.get("input_tokens") or 0),
        completion_tokens=int(reported.get("output_tokens") or 0),
        calls=1,
        audio_seconds=float(reported.get("seconds") or 0.0),
    )
