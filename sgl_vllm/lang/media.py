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
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF8", "image/gif"),
    (b"BM", "image/bmp"),
    (b"II*\x00", "image/tiff"),
    (b"MM\x00*", "image/tiff"),
    (b"\x1a\x45\xdf\xa3", "video/webm"),
)
"""What files of a format begin with."""

_BRANDS = {
    b"avif": "image/avif",
    b"heic": "image/heic",
    b"heix": "image/heic",
    b"mif1": "image/heif",
    b"qt  ": "video/quicktime",
}
"""By the brand after ``ftyp``; all others are MP4."""

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

    The type is that of the bytes, whatever the file's name. Raises FileNotFoundError for a path
    that does not exist, and ValueError for other types and for bytes that are no image.
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
        return _data_url(data, _type_of(data, kind, path.name))
    raise ValueError(
        f"{kind} takes a path, a URL or bytes"
        + (" or a PIL image" if kind == "image" else "")
        + f", not {type(source).__name__}"
    )


def _type_of(data: bytes, kind: str, name: str = "") -> str:
    """The media type of `data`, by its first bytes, and only if they are of no known format by the
    file's `name`."""
    found = _type_by_bytes(data) or mimetypes.guess_type(name)[0]
    if found is None or not found.startswith(f"{kind}/"):
        a = "an" if kind == "image" else "a"
        what = f"the {len(data):,} bytes of {name}" if name else f"these {len(data):,} bytes"
        raise ValueError(f"{what} are not {a} {kind} in a known format")
    return found


def _type_by_bytes(data: bytes) -> str | None:
    if data[:4] == b"RIFF":
        return {b"WEBP": "image/webp", b"AVI ": "video/x-msvideo"}.get(data[8:12])
    if data[4:8] == b"ftyp":
        return _BRANDS.get(data[8:12], "video/mp4")
    return next((name for head, name in _SIGNATURES if data.startswith(head)), None)


def _data_url(data: bytes, media_type: str) -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"
