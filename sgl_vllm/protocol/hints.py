"""Scheduling hints: the program and the fork that a request belongs to, and what follows it.

A request carries them in `vllm_xargs`. They never change an answer, only the order of admission,
the engine that a router chooses, and what the cache keeps. Pure.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any  # Any: the JSON of a request

from sgl_vllm.protocol.quoting import quoted
from sgl_vllm.protocol.request_keys import (
    AHEAD,
    ENDS,
    FORK_GROUP,
    KEEP,
    NEXT_IN_S,
    NEXT_TOOL,
    PROGRAM,
)

logger = logging.getLogger("vllm.sgl_vllm.hints")

MAX_HINT_LENGTH = 256
MAX_HINT_BITS = 64
MAX_NEXT_IN_S = MAX_KEEP_S = 86_400
MAX_KEPT = 4

Hint = str | int | None


@dataclass(frozen=True, slots=True)
class Hints:
    """The hints of one request, None where it has none.

    Attributes:
        ends: not 0 if no later prompt extends this request's. From 2 on, what that many requests
            have used is of use to others.
        next_tool: runs before the request that continues this one.
        next_in_s: how long that is expected to take.
        is_ahead: its answer is not needed, only its prompt is to be computed.
        kept: prefixes of its prompt to keep, as pairs of seconds and a share of the prompt.
    """

    program: Hint = None
    fork_group: Hint = None
    ends: int = 0
    next_tool: Hint = None
    next_in_s: float | None = None
    is_ahead: bool = False
    kept: tuple[tuple[float, float], ...] = ()

    @property
    def fork(self) -> Hashable:
        """Equal for requests of one fork of a program; None for a request that names no fork."""
        return None if self.fork_group is None else (self.program, self.fork_group)

    @property
    def routing_group(self) -> Hashable:
        """Equal for requests that one engine should serve: those of one program, or without a
        program those of one fork group. None for a request that belongs to neither."""
        if self.program is not None:
            return PROGRAM, self.program
        return None if self.fork_group is None else (FORK_GROUP, self.fork_group)


NO_HINTS = Hints()


def read_hints(extra_args: Mapping[str, Any] | None, request_id: str) -> Hints:
    """The hints in a request's `vllm_xargs`.

    If one of them is not valid, all are ignored, with a warning that does not repeat the value.
    """
    if not extra_args:
        return NO_HINTS
    if problem := _problem_of(extra_args):
        logger.warning("The hints of request %s are ignored: %s", quoted(request_id), problem)
        return NO_HINTS
    ends = extra_args.get(ENDS, 0)
    hints = Hints(
        extra_args.get(PROGRAM),
        extra_args.get(FORK_GROUP),
        ends if isinstance(ends, int) and ends > 1 else int(bool(ends)),
        extra_args.get(NEXT_TOOL),
        extra_args.get(NEXT_IN_S),
        bool(extra_args.get(AHEAD, 0)),
        _read_kept(extra_args.get(KEEP, [])) or (),
    )
    return NO_HINTS if hints == NO_HINTS else hints


def write_hints(hints: Hints) -> dict[str, Any]:
    """The hints as `read_hints` reads them. Text that is longer than `MAX_HINT_LENGTH` is cut."""
    written = {
        PROGRAM: hints.program,
        FORK_GROUP: hints.fork_group,
        ENDS: hints.ends or None,
        NEXT_TOOL: hints.next_tool,
        NEXT_IN_S: hints.next_in_s,
        AHEAD: int(hints.is_ahead) or None,
        KEEP: [part for one in hints.kept for part in one] or None,
    }
    return {
        key: value[:MAX_HINT_LENGTH] if isinstance(value, str) else value
        for key, value in written.items()
        if value is not None
    }


def _problem_of(extra_args: Mapping[str, Any]) -> str | None:
    """What is wrong with the hints, without their values."""
    for name in (PROGRAM, FORK_GROUP, NEXT_TOOL):
        if not _is_name(extra_args.get(name)):
            return (
                f"{name} must be a string of at most {MAX_HINT_LENGTH} characters or an integer of "
                f"at most {MAX_HINT_BITS} bits"
            )
    next_in_s = extra_args.get(NEXT_IN_S)
    if next_in_s is not None and not _is_within(next_in_s, MAX_NEXT_IN_S):
        return f"{NEXT_IN_S} must be a number of seconds from 0 to {MAX_NEXT_IN_S}"
    if _read_kept(extra_args.get(KEEP, [])) is None:
        return (
            f"{KEEP} must be a list of up to {MAX_KEPT} pairs: seconds from 0 to {MAX_KEEP_S}, and "
            "a share from 0 to 1"
        )
    return None


def _read_kept(value: object) -> tuple[tuple[float, float], ...] | None:
    if not isinstance(value, list) or len(value) > 2 * MAX_KEPT or len(value) % 2:
        return None
    pairs = [*zip(value[::2], value[1::2], strict=True)]
    is_right = all(_is_within(s, MAX_KEEP_S) and _is_within(share, 1) for s, share in pairs)
    return tuple(pairs) if is_right else None


def _is_name(value: object) -> bool:
    if isinstance(value, int):  # Python refuses to write out very large ones
        return value.bit_length() <= MAX_HINT_BITS
    return value is None or (isinstance(value, str) and len(value) <= MAX_HINT_LENGTH)


def _is_within(value: object, most: float) -> bool:
    return isinstance(value, int | float) and 0 <= value <= most  # false for NaN
