"""How a request gets blocks and gives them back, beside the radix tree.

Owns what happens around vLLM's allocating and releasing. Does not own either, nor which tokens
enter the tree (`retention.py`) and which blocks are evicted for others (`pool.py`).

In `allocate_slots`, vLLM frees superseded states and blocks that have left a window, and may reuse
them in the same call. So computed tokens enter the tree before that call.
"""

from __future__ import annotations

from typing import Any  # Any: arguments of vLLM's

from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.request import Request

from sgl_vllm.radix.checkpoints import Checkpoints
from sgl_vllm.radix.groups import Groups
from sgl_vllm.radix.lookup import Lookup
from sgl_vllm.radix.pool import RadixBlockPool
from sgl_vllm.radix.retention import Retention
from sgl_vllm.radix.stats import RadixCounters


class AllocatingManager(KVCacheManager):
    """Added to a live manager by `RadixKVCacheManager.adopt`."""

    pool: RadixBlockPool
    """The same object as `block_pool`."""
    counters: RadixCounters
    groups: Groups
    block_size: int
    checkpoints: Checkpoints
    lookup: Lookup
    retention: Retention
    num_external: int
    """Tokens that a connector loads for the request that was allocated last."""

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        *args: Any,
        num_lookahead_tokens: int = 0,
        num_external_computed_tokens: int = 0,
        delay_cache_blocks: bool = False,
        has_scheduled_reqs: bool = True,
        **kwargs: Any,
    ) -> KVCacheBlocks | None:
        """Allocate as vLLM does, with this around it.

        A request that decodes, and has room in its last block, needs nothing of it. One that waits
        for room (`lookup.py`) gets none. Before: put computed blocks into the tree, because vLLM
        may free them in this call, and ask for a checkpoint if one is due. If there is no room with
        the checkpoint, allocate without it. After: count the copies of blocks, and note what a KV
        connector will load.
        """
        num_computed = request.num_computed_tokens
        if num_computed >= request.num_prompt_tokens and not self.pool.indexes_output:
            num_slots = num_computed + num_new_tokens + num_lookahead_tokens
            if num_slots <= len(self.groups.main_blocks[request.request_id]) * self.block_size:
                return self.empty_kv_cache_blocks
        if self.lookup.is_waiting(request) and has_scheduled_reqs:
            return None
        leaves_checkpoint = False
        if self.groups.has_others:
            self.pool.guarded(self.retention.index_before_blocks_go, request)
            leaves_checkpoint = bool(
                self.pool.guarded(self.checkpoints.begin, request, num_new_tokens)
            )
        self.pool.first_computed = num_computed + num_new_computed_tokens
        while True:
            blocks = super().allocate_slots(
                request,
                num_new_tokens,
                num_new_computed_tokens,
                *args,
                num_lookahead_tokens=num_lookahead_tokens,
                num_external_computed_tokens=num_external_computed_tokens,
                delay_cache_blocks=delay_cache_blocks,
                has_scheduled_reqs=has_scheduled_reqs,
                **kwargs,
            )
            if blocks is not None or not leaves_checkpoint:
                break
            self.checkpoints.withdraw(request)
            leaves_checkpoint = False
        if leaves_checkpoint:
            self.pool.guarded(self.checkpoints.finish, request)
            self.counters.checkpoints += 1
        self.pool.first_computed = None
        self.num_external = num_external_computed_tokens
        if blocks is None:
            return None
        if num_new_computed_tokens % self.block_size:
            self.lookup.note_copied()
        if num_external_computed_tokens:
            record = self.pool.records.of(request)
            if record is not None:
                record.num_loaded = num_new_computed_tokens + num_external_computed_tokens
        # vLLM caches only what has been loaded of a load over several passes, by a later call.
        if not delay_cache_blocks and (num_external_computed_tokens or self.pool.loads):
            num_adopted = num_new_computed_tokens + num_external_computed_tokens
            self.pool.guarded(
                self.pool.loads.scheduled,
                request,
                num_new_computed_tokens,
                num_external_computed_tokens,
                request.num_computed_tokens + num_adopted + num_new_tokens,
            )
        return blocks

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """Called once output tokens or loaded tokens are known to be computed."""
        if self.pool.indexes_output or request.num_computed_tokens < request.num_prompt_tokens:
            super().cache_blocks(request, num_computed_tokens)

    def free(self, request: Request) -> None:
        self._leave(request)
        super().free(request)

    def pop_blocks_for_free(self, request: Request) -> list[KVCacheBlock]:
        self._leave(request)
        return super().pop_blocks_for_free(request)

    def _leave(self, request: Request) -> None:
        self.pool.guarded(self.retention.retain, request)
        self.pool.discard_request(request)
