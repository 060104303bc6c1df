"""What programs import of `sglang.srt.utils`: images."""

from __future__ import annotations

import base64
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

import httpx

if TYPE_CHECKING:
    from PIL.Image import Image


def load_image(source: str | bytes) -> tuple[Image, tuple[int, int]]:
    """An image and its size (width, height) in pixels, given by a path, a URL or its bytes. Needs
    the package pillow."""
    from PIL import Image

    image = Image.open(BytesIO(_content_of(source)))
    return image, image.size


def _content_of(source: str | bytes) -> bytes:
    if isinstance(source, bytes):
        return source
    if source.startswith(("http://", "https://")):
        return httpx.get(source, follow_redirects=True, timeout=60).raise_for_status().content
    if source.startswith("data:"):
        return base64.b64decode(source.partition(",")[2])
    return Path(source).read_bytes()
