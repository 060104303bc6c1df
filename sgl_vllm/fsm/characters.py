"""Sets of characters, and their spelling in patterns.

Owns the algebra of code-point ranges, the named classes (digits, word characters, spaces), and how
a set is written in the syntax of Rust's regex: as it is, or as it appears inside a JSON string.
Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

Ranges = tuple[tuple[int, int], ...]
"""Code points, both ends included, sorted, not touching each other; no surrogates."""

MARK = "\U0010ffff"
"""A noncharacter that no set contains: `rust_regex.build` puts it before every pattern."""

NOTHING = "[a&&b]"
"""A pattern that matches nothing."""

_LAST = ord(MARK) - 1
_SURROGATES = (0xD800, 0xDFFF)


def normalized(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """The same code points, sorted, with touching ranges joined."""
    merged: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = merged[-1][0], max(high, merged[-1][1])
        else:
            merged.append((low, high))
    return tuple(merged)


def complement(ranges: Ranges) -> Ranges:
    """All other characters."""
    found, begin = [], 0
    for low, high in normalized((*ranges, _SURROGATES)):
        if begin < low:
            found.append((begin, low - 1))
        begin = high + 1
    if begin <= _LAST:
        found.append((begin, _LAST))
    return tuple(found)


def intersection(a: Ranges, b: Ranges) -> Ranges:
    return complement(normalized((*complement(a), *complement(b))))


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


def bracketed(ranges: Ranges) -> str:
    """A pattern for any of these characters."""
    if not ranges:
        return NOTHING
    return "[" + "".join([f"\\x{{{low:x}}}-\\x{{{high:x}}}" for low, high in ranges]) + "]"


_JSON_PLAIN: Ranges = ((0x20, 0x21), (0x23, 0x5B), (0x5D, _LAST))


def bracketed_plain_in_json(ranges: Ranges) -> str:
    """A pattern for those of these characters that a JSON string can contain as they are."""
    return bracketed(intersection(ranges, _JSON_PLAIN))


_JSON_SHORT = {0x22: '"', 0x5C: "\\", 8: "b", 9: "t", 10: "n", 12: "f", 13: "r"}


@lru_cache(maxsize=1024)
def bracketed_in_json(ranges: Ranges) -> str:
    r"""A pattern for any of these characters as they are written inside a JSON string: control
    characters are `\n` or `\u000a`, everything else is written as it is."""
    options = []
    if plain := intersection(ranges, _JSON_PLAIN):
        options.append(bracketed(plain))
    members = {c for low, high in ranges for c in range(low, min(high, 0x5C) + 1)}
    if short := [s for c, s in _JSON_SHORT.items() if c in members]:
        options.append(r"\\[" + "".join([_escaped(s) for s in short]) + "]")
    if controls := [c for c in range(0x20) if c in members]:
        if len(controls) == 0x20:
            options.append(r"\\u00[01][0-9a-fA-F]")
        else:
            codes = [f"{c >> 4}[{c & 15:x}{c & 15:X}]" for c in controls]
            options.append(r"\\u00(?:" + "|".join(codes) + ")")
    return "(?:" + "|".join(options) + ")" if options else NOTHING


def _escaped(char: str) -> str:
    return "\\" + char if char in "\\[]^-&~" else char
