"""Images, videos and audio, in prompts and as values.

Owns what `speech` and `picture` ask of a service, and turning a file, a URL, bytes or a PIL image
into a URL that can be sent: remote URLs stay as they are, local data becomes a base64 ``data:``
URL. Downloading and decoding are the server's job.
"""

from __future__ import annotations

import base64
import html
import io
import mimetypes
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args  # Any: an image of PIL has no type here

MediaKind: TypeAlias = Literal["image", "video", "audio"]

_IN_WORDS = {
    "image": "an image in a known format",
    "video": "a video in a known format",
    "audio": "audio in a known format: convert them to WAV, MP3, FLAC or Ogg",
}

_PNG_MODES = ("1", "L", "LA", "I", "I;16", "P", "RGB", "RGBA")


@dataclass(frozen=True)
class Media:
    """An image, a video or audio at `url`: what a program shows to a model, and what `picture` and
    `speech` store.

    `url` is an http(s) URL, or a ``data:`` URL with the bytes in it. The model sees `num_frames`
    frames of a video (None: the server's default). In a notebook, it is shown or can be played.
    """

    kind: MediaKind
    url: str
    num_frames: int | None = None

    @classmethod
    def of(cls, data: bytes, kind: MediaKind) -> Media:
        """The file `data`. ValueError unless it is of this kind, in a known format."""
        return cls(kind, _data_url(data, _type_of(data, kind)))

    @property
    def media_type(self) -> str | None:
        """Such as "audio/wav"; None for an http(s) URL."""
        if not self.url.startswith("data:"):
            return None
        return self.url.removeprefix("data:").partition(",")[0].partition(";")[0]

    @property
    def data(self) -> bytes:
        """The bytes of the file. ValueError for an http(s) URL: nothing is downloaded."""
        header, comma, data = self.url.partition(",")
        if not (header.startswith("data:") and header.endswith(";base64") and comma):
            raise ValueError(f"the bytes of {self!r} are not here: download it, or pass its bytes")
        try:
            return base64.b64decode(data, validate=True)
        except ValueError:
            raise ValueError(f"the data in {self!r} is not base64: pass the bytes") from None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the bytes to the file at `path`. ValueError as for `data`."""
        Path(path).write_bytes(self.data)

    def __repr__(self) -> str:
        shown = self.url if len(self.url) <= 60 else f"{self.url[:40]}... ({len(self.url):,} long)"
        return f"{self.kind}({shown})"

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        source = html.escape(self.url, quote=True)
        if self.kind == "image":
            return f'<img src="{source}" alt="image" style="max-width: 100%">'
        return f'<{self.kind} src="{source}" controls preload="metadata"></{self.kind}>'


def read_image(source: Any) -> Media:  # a PIL image has no type here
    """An image from a path, an http(s) or data URL, bytes, a PIL image, or a `Media` with one.

    The type is that of the bytes, whatever the file's name. Raises FileNotFoundError for a path
    that does not exist, and ValueError for other types and for bytes that are no image.
    """
    if hasattr(source, "save") and hasattr(source, "size"):  # a PIL image, without importing PIL
        buffer = io.BytesIO()
        (source if source.mode in _PNG_MODES else source.convert("RGB")).save(buffer, format="PNG")
        return Media("image", _data_url(buffer.getvalue(), "image/png"))
    return Media("image", _url(source, "image"))


def read_video(source: object, num_frames: int | None) -> Media:
    """A video from a path, an http(s) or data URL, bytes, or a `Media` with one. Errors as in
    `read_image`."""
    if num_frames is not None and num_frames < 1:
        raise ValueError(f"num_frames must be at least 1, not {num_frames}")
    return Media("video", _url(source, "video"), num_frames)


def read_audio(source: object) -> Media:
    """Audio from a path, an http(s) or data URL, bytes, or a `Media` with some.

    Its format is that of the bytes, whatever a name or a data URL says. Errors as in `read_image`.
    """
    audio = Media("audio", _url(source, "audio"))
    return audio if audio.media_type is None else Media.of(audio.data, "audio")


def recording_of(source: object) -> Media:
    """As `read_audio`, with the bytes at hand: ValueError for an http(s) URL."""
    audio = read_audio(source)
    if audio.media_type is None:
        raise ValueError(f"{audio.url} is not downloaded: pass the bytes of the recording")
    return audio


def _url(source: object, kind: MediaKind) -> str:
    if isinstance(source, Media) and source.kind == kind:
        return source.url
    if isinstance(source, str) and source.startswith(("http://", "https://", "data:")):
        return source
    if isinstance(source, (bytes, bytearray)):
        return _data_url(bytes(source), _type_of(bytes(source), kind))
    if isinstance(source, (str, os.PathLike)):
        path = Path(source)
        data = path.read_bytes()
        return _data_url(data, _type_of(data, kind, path.name))
    given = repr(source) if isinstance(source, Media) else type(source).__name__
    raise ValueError(
        f"{kind} takes a path, a URL or bytes"
        + (" or a PIL image" if kind == "image" else "")
        + f", not {given}"
    )


def _type_of(data: bytes, kind: MediaKind, name: str = "") -> str:
    """The media type of `data`, by its first bytes, and only if they are of no known format by the
    file's `name`."""
    found = media_type_of(data) or mimetypes.guess_type(name)[0]
    if found is None or not found.startswith(f"{kind}/"):
        what = f"the {len(data):,} bytes of {name}" if name else f"these {len(data):,} bytes"
        raise ValueError(f"{what} are not {_IN_WORDS[kind]}")
    return found


def _data_url(data: bytes, media_type: str) -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


# --- the type of a file -------------------------------------------------------------------------

_HEADS = (
    (b"\x89PNG", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF8", "image/gif"),
    (b"BM", "image/bmp"),
    (b"II*\x00", "image/tiff"),
    (b"MM\x00*", "image/tiff"),
    (b"\x1a\x45\xdf\xa3", "video/webm"),
    (b"ID3", "audio/mpeg"),
    (b"fLaC", "audio/flac"),
    (b"OggS", "audio/ogg"),
)

_IN_RIFF = {b"WAVE": "audio/wav", b"WEBP": "image/webp", b"AVI ": "video/x-msvideo"}

_BRANDS = {
    b"avif": "image/avif",
    b"heic": "image/heic",
    b"heix": "image/heic",
    b"mif1": "image/heif",
    b"qt  ": "video/quicktime",
    b"M4A ": "audio/mp4",
}
"""By the brand after ``ftyp``; all others are MP4."""


def media_type_of(data: bytes) -> str | None:
    """The media type of a file, such as "audio/wav"; None if its beginning is not known."""
    if data[:4] == b"RIFF":
        return _IN_RIFF.get(data[8:12])
    if data[4:8] == b"ftyp":
        return _BRANDS.get(data[8:12], "video/mp4")
    if len(data) > 1 and data[0] == 0xFF and data[1] & 0xE0 == 0xE0:  # a frame of MPEG audio
        layer = data[1] >> 1 & 0b11
        return "audio/mpeg" if layer else "audio/aac"
    return next((name for head, name in _HEADS if data.startswith(head)), None)


# --- options of what services make --------------------------------------------------------------

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
