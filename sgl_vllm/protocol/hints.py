"""Scheduling hints: the program and the fork that a request belongs to.

A request carries them in `vllm_xargs`. They never change an answer, only the order of admission and
the engine that a router chooses. Pure.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any  # Any: the JSON of a request

from sgl_vllm.protocol.request_keys import FORK_GROUP, PROGRAM

logger = logging.getLogger("vllm.sgl_vllm.hints")

MAX_HINT_LENGTH = 256
MAX_HINT_BITS = 64

Hint = str | int | None


@dataclass(frozen=True, slots=True)
class Hints:
    """The hints of one request, None where it has none. Those of equal forks are equal."""

    program: Hint = None
    fork_group: Hint = None

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
    hints = Hints(extra_args.get(PROGRAM), extra_args.get(FORK_GROUP))
    for name, value in ((PROGRAM, hints.program), (FORK_GROUP, hints.fork_group)):
        if not _is_valid(value):
            logger.warning(
                "%s of request %.100s is ignored: it must be a string of at most %d characters or "
                "an integer of at most %d bits",
                name,
                request_id,
                MAX_HINT_LENGTH,
                MAX_HINT_BITS,
            )
            return NO_HINTS
    return hints


def _is_valid(value: object) -> bool:
    if isinstance(value, int):  # Python refuses to write out very large ones
        return value.bit_length() <= MAX_HINT_BITS
    return value is None or (isinstance(value, str) and len(value) <= MAX_HINT_LENGTH)
