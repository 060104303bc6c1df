"""Forced runs too short for a jump: decoded one token a pass, in the tokens of a jump.

Owns which tokens are left of each such run, and that nothing else is legal meanwhile. So an answer
does not depend on whether a run was jumped over or decoded.

    forced after t      f1 f2
    pass 1, 2           samples with f1, then f2 as the only legal token
    pass 3              samples the next undecided token
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from weakref import WeakKeyDictionary

import numpy as np
from vllm.v1.core.sched.output import GrammarOutput
from vllm.v1.request import Request


class ShortRuns:
    """The runs that requests are decoding. A request has at most one."""

    def __init__(self) -> None:
        self._left: WeakKeyDictionary[Request, list[int]] = WeakKeyDictionary()

    def __contains__(self, request: Request) -> bool:
        return request in self._left

    def begin(self, request: Request, run: Sequence[int]) -> None:
        """From now on, `request` decodes `run`, which is forced after what it has."""
        self._left[request] = list(run)

    def has_next(self, request: Request) -> bool:
        """Whether the token that `request` has just got is the next one of its run. The run ends
        with its last token, or with any token that is not its next."""
        left = self._left.get(request)
        if left is None:
            return False
        is_next = request._all_token_ids[-1] == left.pop(0)
        if not is_next or not left:
            del self._left[request]
        return is_next

    def narrow(self, masks: GrammarOutput, requests: Mapping[str, Request]) -> None:
        """Leave the next token of its run as the only legal one to every request that has one. If
        that token is not legal, the run ends.

        Args:
            masks: one row for each request. With drafts there are more, and none is changed.
            requests: by id.
        """
        rows, ids = masks.grammar_bitmask.view(np.uint32), masks.structured_output_request_ids
        if not self._left or len(rows) != len(ids):
            return
        for row, request_id in zip(rows, ids, strict=True):
            request = requests.get(request_id)
            if request is None or (left := self._left.get(request)) is None:
                continue
            word, bit = left[0] >> 5, np.uint32(1 << (left[0] & 31))
            if row[word] & bit:
                row[:] = 0
                row[word] = bit
            else:  # the grammar is right
                del self._left[request]
