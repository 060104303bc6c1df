"""vLLM's block pool, with the radix tree deciding what is cached and what is evicted.

Owns which blocks of a request are in the tree (`match`, `index`), the agreement of the tree's locks
with vLLM's reference counts, and which blocks are handed out next. Does not own which tokens of a
request are computed (`retention.py`), what is kept of a request (`request_record.py`), or pins
(`pins.py`).

vLLM keeps all blocks without a reference in one queue and hands them out from its front. Here:

    front | empty blocks ... | cached blocks, in the tree ... | back

To *index* a request is to insert its computed tokens and their blocks into the tree; to *unindex*
blocks is to take them out again.

A block in the tree carries a hash (`marked_pool.py`), so vLLM puts it at the back when it is freed.
An evicted block loses its hash and comes to the front. When there are too few empty blocks, the
tree evicts (`get_new_blocks`). vLLM still counts the whole queue as free. All KV-cache groups of a
model take their blocks from here (`groups.py`).

After an unexpected error the tree is switched off with one error in the log, and vLLM's own prefix
cache is used: the tree is empty from then on, and nothing enters it. The same holds after the
self-check has switched it off.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, TypeVar  # Any: arguments that pass through

from vllm.logger import init_logger
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId, KVCacheBlock
from vllm.v1.request import Request

from sgl_vllm.config import Options
from sgl_vllm.degrade import CircuitBreaker
from sgl_vllm.radix.components.component import States
from sgl_vllm.radix.eviction_policies import POLICIES
from sgl_vllm.radix.groups import Groups
from sgl_vllm.radix.inexact import InexactRequests
from sgl_vllm.radix.loads import Loads
from sgl_vllm.radix.marked_pool import MarkedBlockPool
from sgl_vllm.radix.node import NO_MATCH, Match, Node
from sgl_vllm.radix.pins import Pins
from sgl_vllm.radix.request_record import RequestRecord, RequestRecords
from sgl_vllm.radix.scheduled import Scheduled, is_continued
from sgl_vllm.radix.stats import EvictionCounters
from sgl_vllm.radix.tokens import TOKEN_BYTES
from sgl_vllm.radix.tree import RadixTree
from sgl_vllm.vllm_api.patching import adopt

logger = init_logger("vllm.sgl_vllm.radix")

MAX_AHEAD = 1 / 256
"""At most this share of the blocks is evicted before it is needed, so that few allocations evict:
each time costs as much as the allocation itself."""

BY_ERROR = "switched off by an error: see the server's log"

Result = TypeVar("Result")


class RadixBlockPool(MarkedBlockPool):
    """Added to a live pool by `adopt`."""

    records: RequestRecords
    pins: Pins
    counters: EvictionCounters
    block_size: int
    wanted: Collection[Node]
    """The nodes to evict last: those that waiting requests match."""
    indexes_output: bool
    """Whether a request's output enters the tree as its blocks fill, not only when the request
    releases them: it does for vLLM's hashes, and where windows and states are released earlier."""
    _breaker: CircuitBreaker
    loads: Loads
    first_computed: int | None
    """The first token that is not a hit, of the request that is being given blocks; None while no
    request is. vLLM sets `num_computed_tokens` of a new request only afterwards."""
    _scheduled: dict[str, Scheduled]
    """By request id. They enter the tree at the next lookup that they are of use to, or when the
    next step starts, whichever comes first."""
    inexact: InexactRequests
    _in_this_step: set[int]
    """Blocks in the tree whose contents exist only after this step's forward pass: not to be copied
    from before it."""

    @classmethod
    def adopt(
        cls, pool: BlockPool, groups: Groups, options: Options, *, hash_blocks: bool
    ) -> RadixBlockPool:
        """Turn a freshly constructed stock pool into this one, in place.

        Args:
            groups: the KV-cache groups whose blocks it has.
            hash_blocks: keep vLLM's block hashes and its map too, for KV events and connectors.
        """
        pool = adopt(pool, cls)
        pool.tree = RadixTree(
            groups.block_size,
            POLICIES[options.radix_policy],
            window_groups=groups.windows,
            num_recurrent_groups=len(groups.recurrent),
            max_evicted_bytes=int(options.why_evicted_mb * (1 << 20)),
            has_full_attention=groups.has_full_attention,
        )
        pool.is_off, pool.off_reason = False, ""
        pool.records = RequestRecords()
        pool.pins = Pins(pool)
        pool.counters = EvictionCounters()
        pool.block_size = groups.block_size
        pool.groups = groups
        pool.hash_blocks = hash_blocks
        pool.indexes_output = hash_blocks or groups.has_others
        pool.wanted = ()
        pool._breaker = CircuitBreaker(
            "the radix tree",
            "vLLM's own prefix cache is used instead",
            logger,
            on_trip=functools.partial(pool.switch_off, BY_ERROR),
        )
        pool.loads = Loads(groups)
        pool.inexact = InexactRequests(pool.touch, pool.free_blocks)
        pool.first_computed = None
        pool._scheduled = {}
        pool._in_this_step = set()
        return pool

    # -- a request and the tree ---------------------------------------------------------------

    def match(self, record: RequestRecord | None) -> Match:
        """The longest cached prefix of a request, which may be all of it."""
        if record is None:
            return NO_MATCH
        match = self.tree.match_prefix(record.namespace, record.tokens)
        if self._scheduled and (
            self.indexes_output or is_continued(record, match.num_tokens, self._scheduled)
        ):
            self._index_scheduled()
            match = self.tree.match_prefix(record.namespace, record.tokens)
        return match

    def discard_request(self, request: Request) -> None:
        """`request` is about to release its blocks."""
        try:
            if self.inexact:  # with the tree off, too: it holds blocks of others
                self.inexact.end(request.request_id)
            self._scheduled.pop(request.request_id, None)
            if request.is_finished():
                self.records.discard(request)
            else:
                self.records.leave_tree(request)
            self.loads.discard(request)
        except Exception:
            self._breaker.trip()

    def may_be_copied(self, num_tokens: int, last_blocks: list[int]) -> bool:
        """Whether the blocks that hold the last of `num_tokens` may be copied before this step's
        forward pass: they hold their contents by then, and whatever they hold is right."""
        if self.loads and self.loads.are_in_doubt(num_tokens, last_blocks):
            return False
        return self._in_this_step.isdisjoint(last_blocks)

    def mark_computed_in_this_step(self, block_ids: Iterable[int]) -> None:
        """Note that the blocks, which are in the tree, hold their contents only after this step's
        forward pass."""
        self._in_this_step.update(block_ids)

    def step_starts(self) -> None:
        """All that was scheduled so far is computed before the next forward pass."""
        self.index_scheduled()
        if self._in_this_step:
            self._in_this_step = set()
        if self.loads:
            self.guarded(self._settle_loads)

    def _settle_loads(self) -> None:
        """Take what failed loads should have filled, and what was computed from it, out of the
        tree."""
        for request, begin, is_sharer in self.loads.settle():
            blocks = self.groups.main_blocks.get(request.request_id, [])
            windows = self.groups.window_blocks_of(request, begin, len(blocks) * self.block_size)
            for of_group in (blocks[begin // self.block_size :], *windows):
                self.unindex(of_group)
            if is_sharer:
                self.records.exclude(request)

    def expire(self, ttl_s: float) -> None:
        """Evict what has not been used for `ttl_s` seconds."""
        self.guarded(self._expire, ttl_s)

    def _expire(self, ttl_s: float) -> None:
        num_tokens, num_states = self.tree.num_tokens, self.tree.num_states
        self._release_evicted(self.tree.expire(self.tree.clock() - ttl_s))
        self.counters.expired_tokens += num_tokens - self.tree.num_tokens
        self.counters.evicted_states += num_states - self.tree.num_states

    def index_scheduled(self) -> None:
        """Put what was scheduled so far into the tree."""
        if self._scheduled:
            self.guarded(self._index_scheduled)

    def _index_scheduled(self) -> None:
        """Put the whole blocks that this step will compute into the tree, so they can be shared."""
        scheduled, self._scheduled = self._scheduled, {}
        for record, blocks, begin, end in scheduled.values():
            if record.num_indexed >= end and not self.indexes_output:
                continue  # its whole prompt is in the tree by now
            request = record.request
            self.index(request, blocks, end)
            new = blocks[begin // self.block_size : end // self.block_size]
            for of_group in (new, *self.groups.window_blocks_of(request, begin, end)):
                self._in_this_step.update([block.block_id for block in of_group])

    def index(
        self,
        request: Request,
        blocks: Sequence[KVCacheBlock],
        num_tokens: int,
        is_last_use: bool = False,
        states: States | None = None,
    ) -> bool:
        """Put the first `num_tokens` of `request` into the tree, with its blocks of window groups.
        Those with inexact KV, and all that follow them, stay out.

        Args:
            blocks: the request's blocks of full attention, from number 0 on.
            is_last_use: the request ends or is preempted, so its tokens count as used now.
            states: states after prefixes of these tokens.

        Returns:
            False if the request stays out of the tree, or the tree is off.
        """
        record = self.records.of(request)
        if record is None or self.is_off:
            return False
        if self.inexact:
            num_tokens = self.inexact.num_exact(request.request_id, num_tokens)
            if not num_tokens:
                return False
        tree, own, hit = self.tree, record.own, None
        if not tree.can_extend(own, num_tokens):
            own = None
            if not self.indexes_output:
                hit = record.end_of_hit(num_tokens)
        elif own is not None and own.end == num_tokens and not states:
            if is_last_use:
                tree.record_use(own, request.priority)
            return True
        known = own if own is not None else hit
        num_known = known.end if known is not None else 0
        tokens = record.tokens
        if len(tokens) > TOKEN_BYTES * num_tokens:
            tokens = tokens[: TOKEN_BYTES * num_tokens]
        new_blocks = blocks[num_known // self.block_size : -(-num_tokens // self.block_size)]
        record.own, taken, evicted = tree.insert(
            record.namespace,
            tokens,
            [block.block_id for block in new_blocks],
            own,
            request.priority,
            self.groups.window_ids(request, num_known, num_tokens),
            states,
            hit,
        )
        record.num_indexed = num_tokens
        if is_last_use:
            tree.record_use(record.leaf, request.priority)
        self.mark(taken, num_tokens)
        if evicted:
            self._release_evicted(evicted)
        if self.hash_blocks:
            first_state = min(states) if states else num_tokens
            self.hash_whole_blocks(record, min(num_known, first_state - 1), num_tokens)
        return True

    def unindex(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Take blocks whose KV has not been computed after all out of the tree."""
        for block in blocks:  # null blocks are not in it
            self._release_evicted(self.tree.evict_block(block.block_id))

    def cache_full_blocks(
        self,
        request: Request,
        blocks: list[KVCacheBlock],
        num_cached_blocks: int,
        num_full_blocks: int,
        block_size: int,
        kv_cache_group_id: int,
        block_mask: list[bool] | None = None,
    ) -> None:
        """Called by vLLM for each group when more blocks of `request` are full, or will be after
        this step."""
        if not self.is_off and kv_cache_group_id == self.groups.main:
            begin = self.first_computed
            if begin is None:
                begin = request.num_computed_tokens
            if begin < request.num_prompt_tokens or self.indexes_output:
                end = num_full_blocks * block_size
                record = self.guarded(self.records.of, request)
                if record is not None:
                    self._scheduled[request.request_id] = Scheduled(record, blocks, begin, end)
            if self.hash_blocks:
                self.index_scheduled()
        if not self.is_off:
            return
        if self.inexact:
            num_exact = self.inexact.num_exact(request.request_id, num_full_blocks * block_size)
            num_full_blocks = num_exact // block_size
        self.hash_all(request, blocks, num_full_blocks, block_size, kv_cache_group_id)

    def cache_partial_block(
        self,
        request: Request,
        block: KVCacheBlock,
        num_tokens: int,
        kv_cache_group_id: int,
        block_size: int,
        *args: Any,
        **kwargs: Any,
    ) -> BlockHashWithGroupId | None:
        """Called by vLLM, if `prefix_match_unit` is smaller than its blocks, when a prompt that
        ends inside a block is computed. The tree has it anyway."""
        if not self.is_off or request.request_id in self.inexact:
            return None
        return super().cache_partial_block(
            request, block, num_tokens, kv_cache_group_id, block_size, *args, **kwargs
        )

    # -- allocate and free --------------------------------------------------------------------

    @property
    def num_empty_blocks(self) -> int:
        """Free blocks that hold nothing. Beyond these, allocating evicts."""
        return self.get_num_free_blocks() - self.tree.num_evictable_blocks

    def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        num_missing = num_blocks - self.num_empty_blocks
        if num_missing > 0:
            self.guarded(self._evict, num_missing)
        return super().get_new_blocks(num_blocks)

    def _evict(self, num_blocks: int) -> None:
        tree = self.tree
        num_tokens, num_states = tree.num_tokens, tree.num_states
        evicted = tree.evict(num_blocks, self.wanted, int(MAX_AHEAD * self.num_gpu_blocks))
        self.counters.evicted_blocks += len(evicted)
        self.counters.evicted_tokens += num_tokens - tree.num_tokens
        self.counters.evicted_states += num_states - tree.num_states
        self._release_evicted(evicted)

    def touch(self, blocks: Sequence[KVCacheBlock]) -> None:
        super().touch(blocks)
        self.guarded(self.tree.lock, [block.block_id for block in blocks])

    def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock]) -> None:
        blocks = list(ordered_blocks)
        super().free_blocks(blocks)
        self._unlock(blocks)

    def unpin_blocks(
        self, blocks: Iterable[KVCacheBlock], on_reuse: Callable[[KVCacheBlock], None]
    ) -> None:
        blocks = list(blocks)
        super().unpin_blocks(blocks, on_reuse)
        self._unlock(blocks)

    def _unlock(self, blocks: list[KVCacheBlock]) -> None:
        unused = [block.block_id for block in blocks if block.ref_cnt == 0]
        if unused:
            self.guarded(self.tree.unlock, unused)

    def _maybe_evict_cached_block(self, block: KVCacheBlock) -> bool:
        """Called by vLLM when it reuses the block, or when a connector finds its contents wrong."""
        if not self.is_off:
            if block._block_hash is None and self.metrics_collector is None:
                return False  # an empty block, by far the most frequent case
            self.guarded(self.unindex, [block])
        return super()._maybe_evict_cached_block(block)

    def _release_evicted(self, block_ids: Sequence[int]) -> None:
        """Remove the hashes of blocks that have left the tree. Those without a reference are handed
        out next."""
        blocks, queue, hash_blocks = self.blocks, self.free_block_queue, self.hash_blocks
        unused = []
        for block_id in block_ids:
            block = blocks[block_id]
            if hash_blocks:
                self.remove_hashes(block)
            else:
                block._block_hash = block._block_hash_num_tokens = None
            # One that `super().get_new_blocks` reuses has left the queue already.
            if block.ref_cnt == 0 and block.next_free_block is not None:
                queue.remove(block)
                unused.append(block)
        queue.prepend_n(unused)
        if self.tree.shortened:
            for block in (blocks[i] for i in self.tree.shortened if i in self.tree):
                self.unhash(block)
            self.tree.shortened.clear()
        self.pins.follow(block_ids)

    def reset_prefix_cache(self) -> bool:
        if not super().reset_prefix_cache():
            return False
        self.tree.clear()
        self._scheduled.clear()
        return True

    # -- safety -------------------------------------------------------------------------------

    def guarded(self, step: Callable[..., Result], *args: Any) -> Result | None:
        """The result of `step`; None if it fails, or if the tree is off."""
        if self.is_off:
            return None
        try:
            return step(*args)
        except Exception:
            self._breaker.trip()
            return None

    @property
    def failed(self) -> bool:
        """Whether an error has switched the tree off."""
        return self._breaker.tripped

    def switch_off(self, reason: str) -> None:
        """Use vLLM's own prefix cache from now on. It starts empty, and nothing is pinned.

        Args:
            reason: why, for people.
        """
        self.tree, self.wanted = RadixTree(self.block_size), ()
        self.is_off, self.off_reason = True, reason
        self.indexes_output = True
        self.pins.unpin_all()
        self.records.clear()
        self.loads.clear()
        self._scheduled.clear()
        for block in self.blocks:
            self.remove_hashes(block)
