"""Caches whose keys come from requests, so their size is bounded in bytes, not in entries alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TypeVar

_FEW = 64
_MAX_ENTRIES = 4_096

Argument = TypeVar("Argument", bound="tuple[object, ...] | bytes | str")
Result = TypeVar("Result")


def cached_if_few(function: Callable[[Argument], Result]) -> Callable[[Argument], Result]:
    """Decorator: remembers results for arguments of at most 64 parts: bytes, characters, ranges.
    A request may come with a text of megabytes, or a set of 50,000 characters."""
    known = lru_cache(maxsize=_MAX_ENTRIES)(function)

    def cached(argument: Argument) -> Result:
        return known(argument) if len(argument) <= _FEW else function(argument)

    return cached
