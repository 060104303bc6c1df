"""Sets of code points, as ranges. Pure."""

from __future__ import annotations

from collections.abc import Iterable

Ranges = tuple[tuple[int, int], ...]
"""Code points, both ends included, sorted, not touching each other. Those of patterns hold no
surrogates."""

LAST = 0x10FFFF
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


def complement(ranges: Iterable[tuple[int, int]], *, has_surrogates: bool = False) -> Ranges:
    """All other characters; surrogates are none, unless `has_surrogates`."""
    found, begin = [], 0
    for low, high in normalized(ranges if has_surrogates else (*ranges, _SURROGATES)):
        if begin < low:
            found.append((begin, low - 1))
        begin = high + 1
    if begin <= LAST:
        found.append((begin, LAST))
    return tuple(found)


def is_surrogate(code: int) -> bool:
    return _SURROGATES[0] <= code <= _SURROGATES[1]


def intersection(a: Ranges, b: Ranges) -> Ranges:
    return complement(normalized((*complement(a), *complement(b))))
