"""A strict local service with OpenAI's routes for audio and pictures: unknown fields get a 400.

It makes real files. Its speech is a WAV file whose samples are the code points of the text, so that
its transcriptions are exact. Its pictures are PNG files of the size that was asked for. A chat with
`modalities` is answered aloud. Every request that was accepted is in `requests`.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import struct
import threading
import wave
import zlib
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field

from tests.unit.lang.http_server import serving_app

RATE = 24_000


# --- files -------------------------------------------------------------------------------------


def spoken(text: str) -> bytes:
    """A WAV file, 10 ms for each character: the same sample 240 times."""
    file = io.BytesIO()
    with wave.open(file, "wb") as written:
        written.setnchannels(1)
        written.setsampwidth(2)
        written.setframerate(RATE)
        written.writeframes(b"".join(struct.pack("<h", ord(c)) * 240 for c in text))
    return file.getvalue()


def heard(data: bytes) -> tuple[str, float]:
    """The text of a file of `spoken`, and its length in seconds. wave.Error for other files."""
    with wave.open(io.BytesIO(data)) as read:
        samples = struct.unpack(f"<{read.getnframes()}h", read.readframes(read.getnframes()))
        return "".join(map(chr, samples[::240])), len(samples) / read.getframerate()


def drawn(description: str, width: int, height: int) -> bytes:
    """A PNG file: a gradient in a color that depends on the description."""
    red, green, blue = zlib.crc32(description.encode()).to_bytes(4, "big")[:3]
    rows = b"".join(
        b"\0" + b"".join(bytes((red, green * x // width, blue * y // height)) for x in range(width))
        for y in range(height)
    )

    def chunk(kind: bytes, content: bytes) -> bytes:
        checked = kind + content
        return struct.pack(">I", len(content)) + checked + struct.pack(">I", zlib.crc32(checked))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    packed = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + packed


# --- requests ----------------------------------------------------------------------------------


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class SpeechBody(Strict):
    model: str = Field(min_length=1)
    input: str = Field(min_length=1, max_length=4096)
    voice: str
    response_format: Literal["wav"]
    instructions: str | None = None
    speed: float | None = Field(default=None, ge=0.25, le=4.0)
    stream_format: Literal["sse", "audio"] | None = None


class PictureBody(Strict):
    model: str = Field(min_length=1)
    prompt: str = Field(min_length=1, max_length=32_000)
    size: str = Field(default="32x32", pattern=r"^\d+x\d+$")
    quality: Literal["low", "medium", "high"] = "low"


class ChatBody(Strict):
    model: str
    messages: list[dict[str, Any]] = Field(min_length=1)
    max_tokens: int | None = None
    n: Literal[1] = 1
    temperature: float | None = None
    top_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    stop: str | list[str] | None = None
    modalities: list[Literal["text", "audio"]] = ["text"]
    audio: dict[str, str] | None = None
    stream: bool = False
    stream_options: dict[str, bool] | None = None


@dataclass
class MediaService:
    """The service and its records. `answer` is what a chat says, where ``{said}`` is what it was
    told. `lacks` are routes that it does not have. `reports_tokens` says whether a transcription is
    counted in tokens or in seconds.

    Speech that is streamed comes in pieces of `piece` characters. With a `gate`, each is sent only
    once it has let it pass; `num_sent` counts them. It can `break_off_after` so many, without a
    word or with an event that gives the `reason`. Its form may be OpenAI's, the bytes alone as
    from a server that does not know events ("bytes"), or that of vLLM-Omni's chats ("omni").
    """

    url: str = ""
    answer: str = "It is a hare."
    lacks: tuple[str, ...] = ()
    reports_tokens: bool = False
    piece: int = 4
    gate: threading.Semaphore | None = None
    num_sent: int = 0
    break_off_after: int | None = None
    reason: str = ""
    form: Literal["openai", "bytes", "omni"] = "openai"
    requests: list[tuple[str, Any]] = field(default_factory=list)

    async def pieces(self, data: bytes) -> AsyncIterator[bytes]:
        """A file in pieces: its header with the first samples, and so on."""
        ends = range(44 + 480 * self.piece, len(data) + 480 * self.piece, 480 * self.piece)
        begin = 0
        for end in list(ends)[: self.break_off_after]:
            if self.gate is not None:
                await asyncio.to_thread(self.gate.acquire)
            self.num_sent += 1
            yield data[begin:end]
            begin = end

    def bodies(self, route: str) -> list[Any]:
        """The bodies of the requests to a route, in order."""
        return [body for path, body in self.requests if path == route]


def _usage(given: int, made: int) -> dict[str, int]:
    return {"input_tokens": given, "output_tokens": made, "total_tokens": given + made}


def _said(body: ChatBody) -> str:
    """What a chat is about: its texts, and what can be heard. KeyError for other parts."""
    words = []
    for turn in body.messages:
        assert turn.keys() == {"role", "content"}
        parts = turn["content"]
        for part in [{"type": "text", "text": parts}] if isinstance(parts, str) else parts:
            match part:
                case {"type": "text", "text": str(text)}:
                    words.append(text)
                case {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}:
                    words.append(heard(base64.b64decode(data, validate=True))[0])
                case {"type": "image_url", "image_url": {"url": url}}:
                    assert url.startswith(("http://", "https://", "data:image/"))
                case _:
                    raise KeyError(part)
    return " ".join(words)


def make_app(service: MediaService) -> FastAPI:
    app = FastAPI()

    @app.exception_handler(RequestValidationError)
    async def refuse(request: Request, problem: RequestValidationError) -> JSONResponse:
        first = problem.errors()[0]
        return _error(400, f"{'.'.join(map(str, first['loc']))}: {first['msg']}")

    @app.middleware("http")
    async def check_route(request: Request, go_on: Any) -> Response:
        if request.url.path in service.lacks:
            return JSONResponse({"detail": "Not Found"}, 404)
        response: Response = await go_on(request)
        return response

    @app.post("/v1/audio/speech")
    async def speak(body: SpeechBody) -> Response:
        service.requests.append(("/v1/audio/speech", body.model_dump(exclude_unset=True)))
        if body.stream_format == "sse":
            pieces = service.pieces(_endless(spoken(body.input)))
            if service.form == "bytes":
                return StreamingResponse(pieces, media_type="audio/wav")
            events = _speech_events(service, pieces)
            return StreamingResponse(events, media_type="text/event-stream")
        return Response(
            spoken(body.input),
            media_type="audio/wav",
            headers={"x-vllm-omni-input-tokens": "7", "x-vllm-omni-output-tokens": "30"},
        )

    @app.post("/v1/images/generations")
    async def draw(body: PictureBody) -> dict[str, Any]:
        service.requests.append(("/v1/images/generations", body.model_dump(exclude_unset=True)))
        width, height = map(int, body.size.split("x"))
        file = base64.b64encode(drawn(body.prompt, width, height)).decode()
        return {"created": 1, "data": [{"b64_json": file}], "usage": _usage(9, 64)}

    @app.post("/v1/audio/transcriptions", response_model=None)
    async def transcribe(request: Request) -> dict[str, Any] | Response:
        async with request.form() as form:
            unknown = form.keys() - {"file", "model", "language", "prompt", "response_format"}
            file = form["file"]
            if unknown or isinstance(file, str) or not form["model"]:
                return _error(400, f"unknown fields {sorted(unknown)}, or no file or model")
            data = await file.read()
            named = file.filename, file.content_type
            if named != ("audio.wav", "audio/wav"):
                return _error(400, f"a WAV file is called audio.wav, not {named}")
            given = {name: value for name, value in form.items() if isinstance(value, str)}
        service.requests.append(("/v1/audio/transcriptions", {**given, "file": data}))
        text, seconds = heard(data)
        by_length = {"type": "duration", "seconds": seconds}
        tokens = {"type": "tokens", **_usage(20, len(text))}
        return {"text": text, "usage": tokens if service.reports_tokens else by_length}

    @app.post("/v1/chat/completions", response_model=None)
    async def chat(body: ChatBody) -> dict[str, Any] | Response:
        if ("audio" in body.modalities) != (body.audio is not None):
            return _error(400, "audio: needed for the modality audio, and only for it")
        service.requests.append(("/v1/chat/completions", body.model_dump(exclude_unset=True)))
        text = service.answer.format(said=_said(body))
        if body.stream:
            if body.audio is None or body.audio["format"] != "pcm16":
                return _error(400, "audio.format: must be pcm16 in a stream")
            events = _chat_events(service, text)
            return StreamingResponse(events, media_type="text/event-stream")
        if body.audio is not None and body.audio["format"] != "wav":
            return _error(400, "audio.format: this service has only wav")
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if body.audio is not None:
            file = base64.b64encode(spoken(text)).decode()
            sound = {"id": "audio_1", "data": file, "expires_at": 1, "transcript": text}
            message |= {"content": None, "audio": sound}
        num_tokens = {"prompt_tokens": 11, "completion_tokens": len(text)}
        return {
            "id": "chat_1",
            "object": "chat.completion",
            "created": 1,
            "model": body.model,
            "choices": [{"index": 0, "finish_reason": "stop", "message": message}],
            "usage": {**num_tokens, "total_tokens": 11 + len(text)},
        }

    return app


def _endless(data: bytes) -> bytes:
    """A WAV file as it begins before its length is known."""
    unknown = b"\xff\xff\xff\xff"
    return data[:4] + unknown + data[8:40] + unknown + data[44:]


async def _speech_events(service: MediaService, pieces: AsyncIterator[bytes]) -> AsyncIterator[str]:
    def event(kind: str, **content: Any) -> str:
        return f"event: {kind}\ndata: {json.dumps({'type': kind, **content})}\n\n"

    async for piece in pieces:
        yield event("speech.audio.delta", audio=base64.b64encode(piece).decode())
    if service.break_off_after is None:
        yield event("speech.audio.done", usage=_usage(8, 31))
        yield "data: [DONE]\n\n"
    elif service.reason:
        yield event("speech.audio.error", error={"message": service.reason})


async def _chat_events(service: MediaService, text: str) -> AsyncIterator[str]:
    """The transcript in front of its samples, piece by piece."""

    def event(delta: dict[str, Any] | None, **more: Any) -> str:
        choices = [] if delta is None else [{"index": 0, "finish_reason": None, "delta": delta}]
        return f"data: {json.dumps({'id': 'chat_1', 'choices': choices, **more})}\n\n"

    begin = 0
    async for piece in service.pieces(spoken(text)):
        said = text[begin : begin + service.piece]
        samples = piece.removeprefix(spoken(text)[:44])
        begin += service.piece
        if service.form == "omni":  # each piece is a file of its own, in the content
            yield event({"content": said}, modality="text")
            yield event({"content": base64.b64encode(spoken(said)).decode()}, modality="audio")
        else:
            yield event({"audio": {"id": "audio_1", "transcript": said}})
            yield event({"audio": {"data": base64.b64encode(samples).decode()}})
    if service.break_off_after is None:
        yield event({}, choices=[{"index": 0, "finish_reason": "stop", "delta": {}}])
        num_tokens = {"prompt_tokens": 11, "completion_tokens": len(text)}
        yield event(None, usage={**num_tokens, "total_tokens": 11 + len(text)})
        yield "data: [DONE]\n\n"


def _error(status: int, message: str) -> JSONResponse:
    return JSONResponse({"error": {"type": "invalid_request_error", "message": message}}, status)


@contextmanager
def serving(service: MediaService) -> Iterator[MediaService]:
    """`service`, running in a thread on a free loopback port."""
    with serving_app(make_app(service)) as service.url:
        yield service
