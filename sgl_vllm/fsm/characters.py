"""Sets of characters, and their UTF-8.

Owns the named classes (digits, word characters, spaces), and the bytes of a range. Does not own the
algebra of code points (`protocol/code_points.py`). Pure.
"""

from __future__ import annotations

from sgl_vllm.protocol.code_points import Ranges, complement

Bytes = tuple[tuple[int, int], ...]
"""A range for each byte of a text, both ends included."""

DIGITS: Ranges = ((0x30, 0x39),)
WORD: Ranges = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
SPACE: Ranges = ((9, 13), (0x20, 0x20), (0xA0, 0xA0))
ANY: Ranges = complement(())
ECMA_SPACE: Ranges = (
    *((9, 13), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A)),
    *((0x2028, 0x2029), (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF)),
)
ECMA_ANY: Ranges = complement(((10, 10), (13, 13), (0x2028, 0x2029)))
"""`\\s` and `.` of ECMA-262, 22.2.2.9 and 12.3."""


_FIRST_OF_LENGTH = (0, 0x80, 0x800, 0x10000, 0x110000)
"""The first code point of each length of UTF-8."""


def encodings(low: int, high: int) -> list[Bytes]:
    """The UTF-8 of a range of characters, as sequences of ranges of bytes."""
    found = []
    for length in range(1, 5):
        begin = max(low, _FIRST_OF_LENGTH[length - 1])
        end = min(high, _FIRST_OF_LENGTH[length] - 1)
        if begin <= end:
            found += _of_one_length(_utf8(begin), _utf8(end))
    return found


def _utf8(code: int) -> bytes:
    return chr(code).encode(errors="surrogatepass")


def _of_one_length(low: bytes, high: bytes) -> list[Bytes]:
    """The byte strings between two of the same length whose later bytes are 80 to BF."""
    if len(low) == 1:
        return [((low[0], high[0]),)]
    length = len(low) - 1
    least, most = b"\x80" * length, b"\xbf" * length
    if low[0] == high[0]:
        return [((low[0], low[0]), *rest) for rest in _of_one_length(low[1:], high[1:])]
    found = []
    first, last = low[0], high[0]
    if low[1:] != least:
        found += [((first, first), *rest) for rest in _of_one_length(low[1:], most)]
        first += 1
    if high[1:] != most:
        last -= 1
    if first <= last:
        found.append(((first, last), *[(0x80, 0xBF)] * length))
    if high[1:] != most:
        found += [((high[0], high[0]), *rest) for rest in _of_one_length(least, high[1:])]
    return found
