"""Texts that a string must not be, as they are read byte by byte.

Owns the narrowing of a list of names to those that begin with what was read. A schema may list
thousands of names, or long ones, so reading copies none of them. Pure.

    names a, ab, b    after `a`: the first two of the list, from their second byte on
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar
from weakref import WeakValueDictionary


class NameList:
    """Names, sorted, each once. Equal lists share one object while it is in use."""

    __slots__ = ("__weakref__", "names", "num_bytes")

    _known: ClassVar[WeakValueDictionary[tuple[bytes, ...], NameList]] = WeakValueDictionary()

    def __init__(self, names: tuple[bytes, ...]) -> None:
        self.names = names
        self.num_bytes = sum(map(len, names)) + 50 * len(names)

    @classmethod
    def of(cls, names: Iterable[bytes]) -> NameList:
        key = tuple(sorted({*names}))
        return cls._known.setdefault(key, cls(key))


@dataclass(frozen=True, slots=True)
class Names:
    """The names of a list that begin with the bytes read so far: `list.names[low:high]`, at least
    one.

    Attributes:
        position: how many bytes were read.
    """

    list: NameList
    low: int
    high: int
    position: int

    @classmethod
    def of(cls, names: Iterable[bytes]) -> Names | None:
        """All of them, before the first byte. None if there are none."""
        known = NameList.of(names)
        return cls(known, 0, len(known.names), 0) if known.names else None

    def after(self, byte: int) -> Names | None:
        """Those that go on with `byte`; None if none does. Cost: a binary search."""
        names, low, high = self.list.names, self.low, self.high
        low = bisect_left(names, byte, low, high, key=self._next_byte)
        high = bisect_right(names, byte, low, high, key=self._next_byte)
        return Names(self.list, low, high, self.position + 1) if low < high else None

    def _next_byte(self, name: bytes) -> int:
        return name[self.position] if len(name) > self.position else -1

    @property
    def ends(self) -> bool:
        """Whether one of them has no further byte."""
        return len(self.list.names[self.low]) == self.position

    def rests(self, most: int) -> Iterator[bytes]:
        """The remaining bytes of each name that has at most `most` left."""
        for name in self.list.names[self.low : self.high]:
            if len(name) <= self.position + most:
                yield name[self.position :]
