"""Images and videos in prompts.

Owns turning a file, a URL, bytes or a PIL image into a URL that can be sent: remote URLs stay as
they are, local data becomes a base64 ``data:`` URL. Downloading and decoding are the server's job.
"""

from __future__ import annotations

import base64
import io
import mimetypes
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal  # Any: an image of PIL has no type here

_SIGNATURES = (
    (b"\x89PNG", "image/png"),
    (b"\xff\xd8", "image/jpeg"),
    (b"GIF8", "image/gif"),
    (b"BM", "image/bmp"),
    (b"\x1a\x45\xdf\xa3", "video/webm"),
)


_PNG_MODES = ("1", "L", "LA", "I", "I;16", "P", "RGB", "RGBA")


@dataclass(frozen=True)
class Media:
    """An image, or a video of which the model sees `num_frames` frames (None: the server's
    default)."""

    kind: Literal["image", "video"]
    url: str
    num_frames: int | None = None

    def __repr__(self) -> str:
        shown = self.url if len(self.url) <= 60 else f"{self.url[:40]}... ({len(self.url):,} long)"
        return f"{self.kind}({shown})"


def read_image(source: Any) -> Media:  # a PIL image has no type here
    """An image from a path, an http(s) or data URL, bytes, or a PIL image.

    Raises FileNotFoundError for a path that does not exist, and ValueError for other types.
    """
    if hasattr(source, "save") and hasattr(source, "size"):  # a PIL image, without importing PIL
        buffer = io.BytesIO()
        (source if source.mode in _PNG_MODES else source.convert("RGB")).save(buffer, format="PNG")
        return Media("image", _data_url(buffer.getvalue(), "image/png"))
    return Media("image", _url(source, "image"))


def read_video(source: object, num_frames: int | None) -> Media:
    """A video from a path, an http(s) or data URL, or bytes. Errors as in `read_image`."""
    if num_frames is not None and num_frames < 1:
        raise ValueError(f"num_frames must be at least 1, not {num_frames}")
    return Media("video", _url(source, "video"), num_frames)


def _url(source: object, kind: Literal["image", "video"]) -> str:
    if isinstance(source, str) and source.startswith(("http://", "https://", "data:")):
        return source
    if isinstance(source, (bytes, bytearray)):
        return _data_url(bytes(source), _type_of(bytes(source), kind))
    if isinstance(source, (str, os.PathLike)):
        path = Path(source)
        data = path.read_bytes()
        guessed, _ = mimetypes.guess_type(path.name)
        known = guessed is not None and guessed.startswith(f"{kind}/")
        return _data_url(data, guessed if known and guessed else _type_of(data, kind))
    raise ValueError(
        f"{kind} takes a path, a URL or bytes"
        + (" or a PIL image" if kind == "image" else "")
        + f", not {type(source).__name__}"
    )


def _type_of(data: bytes, kind: str) -> str:
    found: str | None
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        found = "image/webp"
    elif data[4:8] == b"ftyp":
        found = "image/avif" if data[8:12] == b"avif" else "video/mp4"
    else:
        found = next((name for head, name in _SIGNATURES if data.startswith(head)), None)
    if found is None or not found.startswith(kind):
        a = "an" if kind == "image" else "a"
        raise ValueError(f"these {len(data):,} bytes are not {a} {kind} in a known format")
    return found


def _data_url(data: bytes, media_type: str) -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"
