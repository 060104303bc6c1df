"""What a request says of itself beside its prompt: the program and the fork that it belongs to.

Hints come with the request (HTTP: `vllm_xargs`). They never change an answer, only who waits for
whom and which replica computes. Knows no vLLM.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from sgl_vllm.request_keys import FORK_GROUP, PROGRAM

logger = logging.getLogger("vllm.sgl_vllm.hints")

MAX_HINT_LENGTH = 256

Hint = str | int | None


def fork_group_in(extra: Mapping[str, Any] | None, request_id: str) -> tuple[Hint, Hint] | None:
    """(program, fork group) as the request says; None if it says nothing.

    A hint that cannot be read is not used, and a warning logged.
    """
    if not extra or (group := extra.get(FORK_GROUP)) is None:
        return None
    program = extra.get(PROGRAM)
    for name, value in ((FORK_GROUP, group), (PROGRAM, program)):
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
            return None
    return program, group
