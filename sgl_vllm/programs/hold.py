"""New contexts wait while those that will be continued soon need the cache.

Owns which requests are held back for that, and for how long. Does not own the estimate of what will
be continued (`continuations.py`), nor the order of the queue, which asks. Imports no vLLM at run
time.

Where the sessions that are active do not fit into the cache together, each that is admitted evicts
another, and each computes its whole context again at every step. It is faster to serve as many as
fit, and the next ones when some of these end or pause.

Idea: admission by working sets (Denning, The working set model for program behavior, 1968).
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sgl_vllm.programs.continuations import Context
from sgl_vllm.radix.node import Match

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from sgl_vllm.programs.programs import Programs
    from sgl_vllm.radix.manager import RadixKVCacheManager


@dataclass(eq=False)
class ContextHold:
    """Decides which requests wait because what they compute would evict contexts that will be
    continued soon.

    A request of which at least half is cached never waits. No request waits for more than `hold_s`
    seconds, or after it was preempted. Until then it waits even if it is overdue.

    Cost: O(expected contexts) in a step that looks at a request for a new context, and about 3 us
    for each request that it holds back.

    Args:
        hold_s: in seconds.
    """

    _radix: RadixKVCacheManager
    _programs: Programs
    _hold_s: float
    _num_expected_blocks: int | None = None  # in this step, once it is asked for

    def step_starts(self) -> None:
        self._num_expected_blocks = None

    def may_wait(self, request: Request) -> bool:
        """Whether a waiting request can be held back at all."""
        return not request.num_preemptions and time.time() - request.arrival_time < self._hold_s

    def waits(self, request: Request, match: Match) -> bool:
        """Whether a request that `may_wait`, and has this match, is held back until the next
        step."""
        if 2 * match.num_tokens >= request.num_tokens:
            return False
        if self._num_expected_blocks is None:
            self._num_expected_blocks = self._programs.num_expected_blocks()
        num_kept, block_size = self._num_expected_blocks, self._radix.block_size
        context = match.node.context if match.node is not None else None
        if isinstance(context, Context):  # it continues this one itself
            num_kept -= context.num_own_blocks(block_size)
        num_needed = -(-(request.num_tokens - match.num_tokens) // block_size)
        num_free_tokens = self._radix.groups.tokens_in(self._radix.block_pool.get_num_free_blocks())
        return (num_needed + max(0, num_kept)) * block_size > num_free_tokens
