"""WAV files that arrive in pieces, and so begin before their length is known.

Owns their header. Nothing else of a file is read or changed.
"""

from __future__ import annotations

import struct

_UNKNOWN = 0xFFFFFFFF
_RATE_HZ, _BYTES_PER_SAMPLE = 24_000, 2

OPEN_HEADER = struct.pack(
    "<4sI4s4sIHHIIHH4sI",
    *(b"RIFF", _UNKNOWN, b"WAVE"),
    *(b"fmt ", 16, 1, 1, _RATE_HZ, _RATE_HZ * _BYTES_PER_SAMPLE, _BYTES_PER_SAMPLE, 16),
    *(b"data", _UNKNOWN),
)
"""The beginning of a file of unknown length with what OpenAI calls "pcm16": one channel of signed
16-bit samples, 24,000 a second."""


def samples_of(data: bytes) -> bytes:
    """The samples of a WAV file. Other bytes are samples already."""
    return data[_samples_begin(data) :]


def with_length(data: bytes) -> bytes:
    """A complete file, with its length in the header if the header says that more would follow.
    Files of other formats stay as they are."""
    begin = _samples_begin(data)
    if not begin or int.from_bytes(data[begin - 4 : begin], "little") <= len(data) - begin:
        return data
    riff, samples = struct.pack("<I", len(data) - 8), struct.pack("<I", len(data) - begin)
    return b"".join((data[:4], riff, data[8 : begin - 4], samples, data[begin:]))


def _samples_begin(data: bytes) -> int:
    """Where the samples of a WAV file begin; 0 for other bytes, and for a file without samples."""
    if data[:4] != b"RIFF" or data[8:12] != b"WAVE":
        return 0
    position = 12  # each chunk has a name, a length, and content that begins at an even place
    while position + 8 <= len(data):
        name, length = struct.unpack_from("<4sI", data, position)
        position += 8
        if name == b"data":
            return position
        position += length + length % 2
    return 0
