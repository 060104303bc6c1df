"""Segments of a prompt whose order does not matter: their digests and their marks.

Owns how marks are read, and where the segments of a chat are in its rendered prompt. Pure.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any  # Any: the JSON of a request

from sgl_vllm.protocol.request_keys import APPROXIMATE, PROMPT_CHARS, REUSE, SEGMENTS

MAX_MARKS = 10_000
"""Two for each segment."""


def digest_of(text: str) -> bytes:
    """What stands for a segment's text."""
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).digest()


def check_reuse(extra_args: Mapping[str, Any]) -> None:
    """Raises ValueError if a request asks for reuse of its segments (`REUSE`) in a way that cannot
    be meant."""
    if REUSE not in extra_args:
        return
    if extra_args[REUSE] != APPROXIMATE:
        raise ValueError(f'{REUSE} must be "{APPROXIMATE}"; leave it out for an exact answer')
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
        raise ValueError(f"{SEGMENTS} must be a list of integers: alternating starts and ends")
    if len(marks) > MAX_MARKS:
        raise ValueError(f"{SEGMENTS} has more than {MAX_MARKS:,} numbers")
    intervals = list(zip(marks[::2], marks[1::2], strict=True))
    position = 0
    for start, end in intervals:
        if not position <= start < end:
            raise ValueError(f"{SEGMENTS} has to go up, and no segment can be empty")
        position = end
    return intervals


def marks_in(
    prompt: str | None, contents: Iterable[object], intervals: Sequence[tuple[int, int]]
) -> list[int]:
    """The marks of a chat's segments in characters of its rendered prompt.

        intervals                 |---- content 1 ----|-- content 2 --|
        prompt     <|im_start|>...|---- content 1 ----|<|im_end|>...|-- content 2 --|<|im_end|>...

    Each content is searched for from the end of the one before it. Many chat templates strip
    contents, so what is searched for is stripped too. What is not found has no segments. Cost: one
    search for each content, and about a microsecond for each interval.

    Args:
        prompt: None if the chat was rendered into tokens: then there are no marks.
        contents: of the messages. Those that are not texts count as empty.
        intervals: in characters of all contents, one after the other. They are cut to the content
            in which they begin.
    """
    marks: list[int] = []
    if prompt is None:
        return marks
    waiting = deque(intervals)
    begin = found_end = 0
    for content in contents:
        text = content if isinstance(content, str) else ""
        stripped = text.strip()
        found = prompt.find(stripped, found_end) if stripped else -1
        if found >= 0:
            found_end = found + len(stripped)
        shift = found - len(text) + len(text.lstrip()) - begin
        begin += len(text)
        while waiting and waiting[0][0] < begin:
            start, end = waiting.popleft()
            first, last = max(start + shift, found), min(end + shift, found_end)
            if found >= 0 and first < last:
                marks += [first, last]
    return marks


def with_length(extra_args: Mapping[str, Any], prompt: str | None) -> dict[str, Any]:
    """`extra_args` of a request that marks segments, with the length of its prompt
    (`PROMPT_CHARS`), if it is known."""
    others = {key: value for key, value in extra_args.items() if key != PROMPT_CHARS}
    return others if prompt is None else {**others, PROMPT_CHARS: len(prompt)}
