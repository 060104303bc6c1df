"""What is cached of each waiting request, kept up to date at a bounded cost per step.

Owns when a request is matched again. Does not own the match (`radix/tree.py`), nor what follows
from it for the order (`orders.py`). Imports no vLLM at run time.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Collection
from typing import TYPE_CHECKING, cast

from sgl_vllm.radix.node import NO_MATCH, Match
from sgl_vllm.radix.tokens import TOKEN_BYTES
from sgl_vllm.scheduler.policy import WaitingQueue

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.request import Request

    from sgl_vllm.radix.manager import RadixKVCacheManager

MAX_SCORED = 64
"""At most this many requests are matched per step: 5 us each, and 16 ns per token of a new one."""

STOCK_SCORE_AGE_S = 0.5
"""With `radix` off, how long a match in vLLM's own cache is used."""

NUM_NEXT_TOKENS = 16
"""Of requests with the same match, this many tokens after it are compared, by their hash."""

_MAX_KEY = 2**62 - 1


class PrefixScores:
    """Matches waiting requests against the cache, and tells the waiting queue.

    A request is matched when it arrives, and again when the tree changes where its match ends. At
    most `MAX_SCORED` are matched per step; the rest keep their old score until a later step.
    """

    def __init__(
        self,
        waiting: WaitingQueue[Request],
        manager: KVCacheManager,
        radix: RadixKVCacheManager | None,
    ) -> None:
        self._waiting = waiting
        self._manager = manager
        self._radix = radix
        self._tree = radix.tree if radix is not None else None
        self._to_score: dict[Request, None] = {}
        self._scored_at = 0.0

    def add(self, request: Request) -> None:
        self._to_score[request] = None

    def discard(self, request: Request) -> None:
        self._to_score.pop(request, None)
        if self._tree is not None:
            self._tree.watchers.unwatch(request)

    def refresh(self) -> None:
        """Score the requests that are new, and those whose score may have changed."""
        self._find_changed()
        # In the middle of a step, popped requests stay in `_to_score`: they may be put back.
        waiting = (request for request in self._to_score if request in self._waiting)
        for request in list(itertools.islice(waiting, MAX_SCORED)):
            self.score(request)

    def score(self, request: Request) -> None:
        """Score a waiting request, unless its score is known."""
        if request not in self._to_score:
            return
        del self._to_score[request]
        if request.skip_reading_prefix_cache:
            return
        if self._tree is not None:
            self._score_by_tree(request)
        else:
            self._waiting.score(request, self._match_stock(request))

    def _find_changed(self) -> None:
        if self._tree is not None:
            if self._radix is not None and self._radix.tree is self._tree:
                changed = cast("Collection[Request]", self._tree.watchers.take_changed())
                self._to_score.update(dict.fromkeys(changed))
                return
            self._tree = None  # switched off: vLLM's own cache counts from now on
        if time.monotonic() - self._scored_at > STOCK_SCORE_AGE_S:
            self._scored_at = time.monotonic()
            self._to_score.update(dict.fromkeys(self._waiting))

    def _score_by_tree(self, request: Request) -> None:
        assert self._radix is not None and self._tree is not None
        match = self._radix.match(request)
        record = self._radix.pool.records.of(request)
        if record is None or self._radix.tree is None:
            self._waiting.score(request, NO_MATCH)
            return
        self._tree.watchers.watch(request, record.namespace, record.tokens, match)
        start = match.num_tokens * TOKEN_BYTES
        next_tokens = record.tokens[start : start + NUM_NEXT_TOKENS * TOKEN_BYTES]
        key = None
        if len(next_tokens) == NUM_NEXT_TOKENS * TOKEN_BYTES:
            key = hash((match.node or record.namespace, match.num_tokens, next_tokens)) >> 1
            key &= _MAX_KEY
        if self._tree.components:  # after a hole, or without a state, nothing can be read
            match = match._replace(num_tokens=self._radix.hit_length(match))
        self._waiting.score(request, match, key)

    def _match_stock(self, request: Request) -> Match:
        _, num_tokens, *_ = self._manager.coordinator.find_longest_cache_hit(
            request.block_hashes, request.num_tokens - 1
        )
        return Match(num_tokens, None)
