"""Puts the segments that a request marks into the canonical order, before it is routed.

Owns what of a request changes. How marks are read, and the order, is `protocol/segments.py`'s.
Knows neither Ray nor vLLM, and neither logs nor keeps prompts.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias  # Any: the JSON of a request

from sgl_vllm.protocol.request_keys import SEGMENTS
from sgl_vllm.protocol.segments import canonical_rank, digest_of, intervals_of
from sgl_vllm.routing.prompts import Body, as_body

Interval: TypeAlias = tuple[int, int]
"""Characters, half-open."""


def in_canonical_order(request: object) -> dict[str, Any] | None:
    """The fields of `request` that change if its segments are put into the canonical order.

    A request marks segments with ``vllm_xargs={"sgl_segments": [start, end, start, end, ...]}``, in
    characters of its `prompt`, or of the contents of all its `messages`, one after the other.
    Contents that are lists of parts count as empty. Segments that follow each other without a gap,
    in one message, change places among themselves:

        0         12        40   52                 70
        |- head --|--- A ---|-B-|------ question ----|      marks 12, 40, 40, 52

    Cost: a few microseconds per segment, and a copy of the prompt.

    Args:
        request: a body, as a mapping or as an object with its fields.

    Returns:
        The new `prompt` or `messages`, and `vllm_xargs` without the marks. None if there are none.

    Raises:
        ValueError: the marks do not fit the prompt. The message does not quote it.
    """
    body = as_body(request)
    extra = body.get("vllm_xargs")
    if not isinstance(extra, Mapping) or SEGMENTS not in extra:
        return None
    marks = intervals_of(extra[SEGMENTS])
    rest = {name: value for name, value in extra.items() if name != SEGMENTS} or None
    return {**_reordered(body, marks), "vllm_xargs": rest}


def _reordered(body: Body, marks: Sequence[Interval]) -> dict[str, Any]:
    messages, prompt = body.get("messages"), body.get("prompt")
    if isinstance(prompt, str):
        (text,) = _texts_in_order([prompt], marks)
        return {"prompt": text}
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise ValueError(f"{SEGMENTS} is for a prompt that is a text, or for messages")
    contents = [as_body(message).get("content") for message in messages]
    texts = _texts_in_order([one if isinstance(one, str) else "" for one in contents], marks)
    return {
        "messages": [
            _with_content(message, text) if isinstance(content, str) else message
            for message, content, text in zip(messages, contents, texts, strict=True)
        ]
    }


def _with_content(message: Any, content: str) -> Any:
    if isinstance(message, Mapping):
        return {**message, "content": content}
    return message.model_copy(update={"content": content})


def _texts_in_order(texts: Sequence[str], marks: Sequence[Interval]) -> list[str]:
    """`texts` with their segments in order; `marks` count through all of them."""
    ordered, first, begin = [], 0, 0
    for text in texts:
        end = begin + len(text)
        next_first = bisect_left(marks, (end, 0), first)
        own = marks[first:next_first]
        first = next_first
        if own and own[-1][1] > end:
            raise ValueError(f"a segment of {SEGMENTS} goes beyond the end of its text")
        ordered.append(_in_order(text, [(one - begin, other - begin) for one, other in own]))
        begin = end
    if first < len(marks):
        raise ValueError(f"a segment of {SEGMENTS} begins beyond the end of the prompt")
    return ordered


def _in_order(text: str, marks: Sequence[Interval]) -> str:
    pieces, position = [], 0
    for run in _runs(marks):
        pieces.append(text[position : run[0][0]])
        segments = [text[start:end] for start, end in run]
        pieces += sorted(segments, key=lambda segment: canonical_rank(digest_of(segment)))
        position = run[-1][1]
    return "".join([*pieces, text[position:]])


def _runs(marks: Sequence[Interval]) -> Iterator[list[Interval]]:
    """Segments that follow each other without a gap."""
    run: list[Interval] = []
    for one in marks:
        if run and run[-1][1] != one[0]:
            yield run
            run = []
        run.append(one)
    if run:
        yield run
