"""The client of services with OpenAI's API, and its routes for audio and pictures, as vLLM-Omni and
others have them too.

Owns the requests and answers of these routes, which go through the official client's own methods,
and reading audio that arrives in pieces. Chats that are answered aloud are ordinary chats with two
more fields; their prompt and options are the backends'.
"""

from __future__ import annotations

import base64
import json
from abc import abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any  # Any: responses of the client, whose module is late

from sgl_vllm.lang.backends.base import Json, without_none
from sgl_vllm.lang.backends.openai_api import AssembledAnswer, path_of, read_usage, streamed
from sgl_vllm.lang.backends.requests import (
    MediaAnswer,
    MediaRequest,
    PictureRequest,
    SpeechRequest,
    SpokenRequest,
    TranscriptionRequest,
    Watch,
    WatchMedia,
)
from sgl_vllm.lang.backends.service import Client, ClientBackend, ServiceBackend
from sgl_vllm.lang.errors import BackendError, UnsupportedError
from sgl_vllm.lang.media import Media, MediaKind, media_type_of
from sgl_vllm.lang.usage import Usage
from sgl_vllm.lang.wav import OPEN_HEADER, samples_of, with_length

if TYPE_CHECKING:
    from openai import AsyncOpenAI

_ENDINGS = {"mpeg": "mp3"}
"""Of files' names, where they differ from the media type."""

_NOT_THERE = (404, 405, 501)
"""The statuses of servers without a route, or with a model that does not serve it."""


class OpenAIBackend(ClientBackend):
    """A service with OpenAI's API at `base_url`, which usually ends in ``/v1``: completions, chats,
    and its routes for audio and pictures, or some of them."""

    def __init__(
        self, base_url: str, api_key: str | None, timeout_s: float, max_retries: int
    ) -> None:
        if not base_url.startswith(("http://", "https://")):
            raise ValueError(f"base_url must start with http:// or https://, not {base_url!r}")
        super().__init__(api_key, timeout_s, max_retries)
        self.base_url = base_url.rstrip("/")

    def new_client(self) -> AsyncOpenAI:
        import openai

        return openai.AsyncOpenAI(
            base_url=self.base_url,
            api_key=self._api_key or "EMPTY",
            timeout=self.timeout_s,
            max_retries=self.max_retries,
        )

    @abstractmethod
    async def model_name(self) -> str:
        """The model that requests name which do not say another."""

    @abstractmethod
    async def chat_body(self, request: SpokenRequest) -> Json:
        """The chat of a spoken answer, as for a text."""

    async def post(self, body: Json, watch: Watch | None = None) -> Json:
        """One request. With `watch`, it is for one text, which is streamed there, and the answer
        has the form of one that was not streamed."""
        url = f"{self.base_url}/{path_of(body)}"
        if watch is None:
            return await self.call(url, body)
        assembled = AssembledAnswer(chat="messages" in body)
        await self.drive(self.chunks(url, streamed(body)), assembled, watch)
        return assembled.answer()

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
            "extra_body": without_none(
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
        body["audio"] = without_none(voice=voice.name, format=file_format)
        body |= request.options.extra_body
        url = f"{self.base_url}/chat/completions"
        if streamed_to is None:
            answer = await self.call(url, body)
        else:
            spoken = AssembledSpeech(streamed_to)

            def show(text: str, _: int | None) -> bool:
                streamed_to(text, b"")
                return False

            await self.drive(self.chunks(url, streamed(body)), spoken, show)
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
            "extra_body": without_none(size=request.size) | dict(request.options.extra_body),
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
            "extra_body": without_none(language=request.language, prompt=request.hint)
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


# --- answers -------------------------------------------------------------------------------------


def read_token_usage(usage: Json | None) -> Usage:
    """The cost of one call as these routes report it: in tokens, or in seconds of audio."""
    reported = usage or {}
    return Usage(
        prompt_tokens=int(reported.get("input_tokens") or 0),
        completion_tokens=int(reported.get("output_tokens") or 0),
        calls=1,
        audio_seconds=float(reported.get("seconds") or 0.0),
    )


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


class AssembledSpeech(AssembledAnswer):
    """The chunks of a spoken answer, collected into the form of an answer that was not streamed.

    They have samples, which become a WAV file. OpenAI's have them in ``delta.audio`` beside the
    transcript. vLLM-Omni's have them in ``delta.content`` if their modality is audio, and older
    versions send a WAV file in each.
    """

    def __init__(self, watch: WatchMedia) -> None:
        super().__init__(chat=True)
        self._watch = watch
        self._file: list[bytes] = []

    def add(self, chunk: Json) -> str:
        for choice in chunk["choices"][:1]:
            delta = choice["delta"]
            audio = delta.get("audio") or {}
            if chunk.get("modality") == "audio":
                audio = {"data": delta.pop("content", None)}
            if data := audio.get("data"):
                samples = samples_of(base64.b64decode(data))
                pieces = [samples] if self._file else [OPEN_HEADER, samples]
                self._file += pieces
                self._watch("", b"".join(pieces))
            if transcript := audio.get("transcript"):
                delta["content"] = transcript
        return super().add(chunk)

    def answer(self) -> Json:
        answer = super().answer()
        if self._file:
            data = base64.b64encode(b"".join(self._file)).decode()
            answer["choices"][0]["message"]["audio"] = {"data": data}
        return answer
