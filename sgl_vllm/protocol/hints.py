"""What a request says of itself beside its prompt: the program and the fork that it belongs to.

Hints come with the request (HTTP: `vllm_xargs`). They never change an answer, only who waits for
whom and which replica computes. Knows no vLLM.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple

from sgl_vllm.protocol.request_keys import FORK_GROUP, PROGRAM

logger = logging.getLogger("vllm.sgl_vllm.hints")

MAX_HINT_LENGTH = 256

Hint = str | int | None


class Hints(NamedTuple):
    """What a request says of itself; None where it says nothing."""

    program: Hint = None
    fork_group: Hint = None

    @property
    def together(self) -> Hashable:
        """Equal for requests that one engine should have, a program's or else a fork group's; None
        for one that belongs to none."""
        if self.program is not None:
            return PROGRAM, self.program
        return None if self.fork_group is None else (FORK_GROUP, self.fork_group)


NO_HINTS = Hints()


def hints_in(extra: Mapping[str, Any] | None, request_id: str) -> Hints:
    """What the request says in `extra`.

    If one of its hints cannot be read none is used, and a warning logged.
    """
    if not extra:
        return NO_HINTS
    hints = Hints(extra.get(PROGRAM), extra.get(FORK_GROUP))
    for name, value in zip((PROGRAM, FORK_GROUP), hints, strict=True):
        # The size of a number first: Python refuses to write out very large ones.
        is_large = isinstance(value, int) and value.bit_length() > 64
        if is_large or not isinstance(value, Hint) or len(str(value)) > MAX_HINT_LENGTH:
            logger.warning(
                "%s of request %s is not used: it is a whole number of 64 bits or a string of at "
                "most %d characters",
                name,
                request_id,
                MAX_HINT_LENGTH,
            )
            return NO_HINTS
    return hints
