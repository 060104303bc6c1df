"""Segments of a prompt whose order does not matter: their marks, and the canonical order for them.

The canonical order depends on the segments' texts alone, so prompts with the same segments begin
alike in all processes. Owns that order, and how marks are read. Pure.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any  # Any: the JSON of a request

from sgl_vllm.protocol.request_keys import APPROXIMATE, REUSE, SEGMENTS

MAX_MARKS = 10_000
"""Two for each segment."""


def digest_of(text: str) -> bytes:
    """What stands for a segment's text."""
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).digest()


def canonical_rank(digest: bytes, seed: int = 0) -> bytes:
    """Segments in canonical order are sorted by it. Each `seed` is another order."""
    return hashlib.blake2b(str(seed).encode() + b" " + digest).digest()


def check_reuse(extra_args: Mapping[str, Any]) -> None:
    """Raises ValueError if a request asks for reuse of its segments (`REUSE`) in a way that cannot
    be meant."""
    if REUSE not in extra_args:
        return
    if extra_args[REUSE] != APPROXIMATE:
        raise ValueError(f'{REUSE} has to be "{APPROXIMATE}"; leave it out for an exact answer')
    if SEGMENTS not in extra_args:
        raise ValueError(f"{REUSE} needs {SEGMENTS}, the segments to reuse")
    intervals_of(extra_args[SEGMENTS])


def intervals_of(marks: object) -> list[tuple[int, int]]:
    """The half-open intervals of characters that a request marks (`SEGMENTS`), in ascending order.

    Raises:
        ValueError: it is no list of integers that go up. The message does not quote it.
    """
    if (
        not isinstance(marks, Sequence)
        or isinstance(marks, str)
        or len(marks) % 2
        or any(type(mark) is not int for mark in marks)
    ):
        raise ValueError(f"{SEGMENTS} has to be a list of integers, a start and an end by turns")
    if len(marks) > MAX_MARKS:
        raise ValueError(f"{SEGMENTS} has more than {MAX_MARKS:,} numbers")
    intervals = list(zip(marks[::2], marks[1::2], strict=True))
    position = 0
    for start, end in intervals:
        if not position <= start < end:
            raise ValueError(f"{SEGMENTS} has to go up, and no segment can be empty")
        position = end
    return intervals
