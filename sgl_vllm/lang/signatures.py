"""What kind of file some bytes are, by how they begin.

Owns the table of signatures: of the images, videos and audio that programs exchange with services.
Reads no file and decodes nothing.
"""

from __future__ import annotations

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
