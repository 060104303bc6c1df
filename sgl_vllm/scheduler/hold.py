"""New contexts wait while those that will be continued soon need the cache.

Owns which requests are held back for that, and for how long. Does not own the estimate of what will
be continued (`radix/continuations.py`), nor the order (`policy.py`). Imports no vLLM at run time.

Where the sessions that are active do not fit into the cache together, each that is admitted evicts
another, and each computes its whole context again at every step. It is faster to serve as many as
fit, and the next ones when some of these end or pause.

Idea: admission by working sets (Denning, The working set model for program behavior, 1968).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from sgl_vllm.scheduler.policy import WaitingQueue

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request

    from sgl_vllm.radix.manager import RadixKVCacheManager


class ContextHold:
    """Decides which requests wait because what they compute would evict contexts that will be
    continued soon.

    A request of which at least half is cached never waits. No request waits for more than `hold_s`
    seconds, while nothing runs, or after it was preempted. Until then it waits even if it is
    overdue.

    Cost: O(expected contexts) in a step that looks at a request for a new context, and about 3 us
    for each request that it holds back.

    Args:
        score: matches a waiting request against the cache, if that has not been done.
        hold_s: in seconds.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        waiting: WaitingQueue[Request],
        radix: RadixKVCacheManager,
        score: Callable[[Request], object],
        hold_s: float,
    ) -> None:
        self._scheduler = scheduler
        self._waiting = waiting
        self._radix = radix
        self._score = score
        self._hold_s = hold_s
        self._num_expected_blocks: int | None = None  # in this step, once it is asked for

    def step_starts(self) -> None:
        self._num_expected_blocks = None

    def waits_for_contexts(self, request: Request) -> bool:
        """Whether waiting `request` is held back until the next step."""
        if (
            request.num_preemptions
            or not self._scheduler.running
            or time.time() - request.arrival_time >= self._hold_s
        ):
            return False
        self._score(request)
        num_cached = self._waiting.num_matched(request)
        if 2 * num_cached >= request.num_tokens:
            return False
        if self._num_expected_blocks is None:
            self._num_expected_blocks = self._radix.contexts.num_expected_blocks()
        num_kept = self._num_expected_blocks
        node = self._waiting.node_of(request)
        if node is not None and node.context is not None:  # it continues this one itself
            num_kept -= node.context.num_own_blocks(self._radix.block_size)
        block_size = self._radix.block_size
        num_needed = -(-(request.num_tokens - num_cached) // block_size)
        num_free_tokens = self._radix.groups.tokens_in(self._radix.block_pool.get_num_free_blocks())
        return (num_needed + max(0, num_kept)) * block_size > num_free_tokens
