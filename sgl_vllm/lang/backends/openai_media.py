"""OpenAI's routes for audio and pictures, as vLLM-Omni and others have them too.

Owns their requests and answers, which go through the official client's own methods. Chats that are
answered aloud are ordinary chats with two more fields; their prompt and options are the backends'.
"""

from __future__ import annotations

import base64
from abc import abstractmethod
from collections.abc import Awaitable, Callable
from typing import Any  # Any: responses of the client, whose module is imported late

from sgl_vllm.lang.backends.audio_pieces import AssembledSpeech, ReceivedAudio, read_token_usage
from sgl_vllm.lang.backends.base import Json
from sgl_vllm.lang.backends.clients import Client
from sgl_vllm.lang.backends.openai_api import OpenAIBackend, read_usage, streamed
from sgl_vllm.lang.backends.requests import (
    MediaAnswer,
    MediaRequest,
    PictureRequest,
    SpeechRequest,
    SpokenRequest,
    TranscriptionRequest,
)
from sgl_vllm.lang.errors import BackendError, UnsupportedError
from sgl_vllm.lang.media import Media, MediaKind
from sgl_vllm.lang.signatures import media_type_of
from sgl_vllm.lang.wav import with_length

_NOT_THERE = (404, 405, 501)
"""The statuses of servers without a route, or with a model that does not serve it."""


class OpenAIMedia(OpenAIBackend):
    """A service with OpenAI's routes for audio and pictures, or some of them."""

    @abstractmethod
    async def model_name(self) -> str:
        """The model that requests name which do not say another."""

    @abstractmethod
    async def chat_body(self, request: SpokenRequest) -> Json:
        """The chat of a spoken answer, as for a text."""

    async def media(self, request: MediaRequest) -> MediaAnswer:
        try:
            match request:
                case SpeechRequest():
                    return await self._speak(request)
                case SpokenRequest():
                    return await self._answer_aloud(request)
                case PictureRequest():
                    return await self._draw(request)
                case TranscriptionRequest():
                    return await self._transcribe(request)
        except BackendError as error:
            if error.status not in _NOT_THERE:
                raise
            advice = f"{error}; use a server with {request.route} and a model that serves it"
            raise UnsupportedError(self.name, request.feature, advice) from error

    # --- the routes ------------------------------------------------------------------------------

    async def _speak(self, request: SpeechRequest) -> MediaAnswer:
        voice = request.voice
        given: Json = {
            "model": request.options.model or await self.model_name(),
            "input": request.text,
            "voice": self.library().NOT_GIVEN if voice.name is None else voice.name,
            "response_format": voice.format,
            "extra_body": _given(
                instructions=voice.instructions,
                speed=voice.speed,
                stream_format=None if request.watch is None else "sse",
            )
            | dict(request.options.extra_body),
        }

        async def speak(client: Client) -> ReceivedAudio:
            audio = ReceivedAudio(self)
            opening = client.audio.speech.with_streaming_response.create(**given)
            async with opening as response:
                async for piece in audio.pieces_of(response):
                    if request.watch is not None:
                        request.watch("", piece)
            return audio

        audio = await self.through_client(speak)
        if not audio.is_complete:
            raise self.interrupted("")
        return MediaAnswer(request.text, audio.usage, self._checked(audio.data, "audio"))

    async def _answer_aloud(self, request: SpokenRequest) -> MediaAnswer:
        voice, watch = request.voice, request.watch
        streamed_to = watch if voice.format == "wav" else None  # OpenAI streams samples only
        file_format = voice.format if streamed_to is None else "pcm16"
        body = await self.chat_body(request)
        if request.options.model is not None:
            body["model"] = request.options.model
        body["modalities"] = ["text", "audio"]
        body["audio"] = _given(voice=voice.name, format=file_format)
        body |= request.options.extra_body
        url = f"{self.base_url}/chat/completions"
        if streamed_to is None:
            answer = await self.call(url, body)
        else:
            spoken = AssembledSpeech(streamed_to)
            await self.drive(self.chunks(url, streamed(body)), spoken, spoken.watch_text)
            answer = spoken.answer()
        with self.reading():
            # vLLM-Omni may give the text and the audio in a choice each.
            messages = [choice["message"] for choice in answer["choices"]]
            audio = next((m["audio"] for m in messages if m.get("audio")), None)
            if audio is None:
                advice = "it answered without audio: use a model that speaks"
                raise UnsupportedError(self.name, request.feature, advice)
            text = next((m["content"] for m in messages if m.get("content")), "")
            return MediaAnswer(
                audio.get("transcript") or text,
                read_usage(answer),
                self._checked(base64.b64decode(audio["data"]), "audio"),
                str(answer["choices"][0]["finish_reason"]),
            )

    async def _draw(self, request: PictureRequest) -> MediaAnswer:
        given: Json = {
            "model": request.options.model or await self.model_name(),
            "prompt": request.description,
            "extra_body": _given(size=request.size) | dict(request.options.extra_body),
        }
        answer = await self._json(lambda client: client.images.generate(**given))
        with self.reading():
            drawn = answer["data"][0]
            if drawn.get("b64_json"):
                picture = self._checked(base64.b64decode(drawn["b64_json"]), "image")
            else:
                picture = Media("image", str(drawn["url"]))
            description = drawn.get("revised_prompt") or request.description
            return MediaAnswer(description, read_token_usage(answer.get("usage")), picture)

    async def _transcribe(self, request: TranscriptionRequest) -> MediaAnswer:
        audio = request.audio
        ending = str(audio.media_type).partition("/")[2]  # services tell the format by it
        given: Json = {
            "model": request.options.model or await self.model_name(),
            "file": (f"audio.{_ENDINGS.get(ending, ending)}", audio.data, audio.media_type),
            "extra_body": _given(language=request.language, prompt=request.hint)
            | dict(request.options.extra_body),
        }
        answer = await self._json(lambda client: client.audio.transcriptions.create(**given))
        with self.reading():
            if not isinstance(answer["text"], str):
                raise TypeError("the text of a transcription is not a string")
            return MediaAnswer(answer["text"], read_token_usage(answer.get("usage")), audio)

    # --- the client ------------------------------------------------------------------------------

    async def _json(self, call: Callable[[Client], Awaitable[Any]]) -> Json:
        answer = await self.through_client(call)
        with self.reading():
            return dict(answer.model_dump())

    def _checked(self, data: bytes, kind: MediaKind) -> Media:
        """The file that a service sent."""
        data = with_length(data)
        if not (media_type_of(data) or "").startswith(kind):
            raise BackendError(
                f"{self.name} sent {len(data):,} bytes that are not {kind} in a known format: "
                f"ask for another format"
            )
        return Media.of(data, kind)


_ENDINGS = {"mpeg": "mp3"}
"""Of files' names, where they differ from the media type."""


def _given(**options: object) -> Json:
    """The options that are not None."""
    return {name: value for name, value in options.items() if value is not None}
