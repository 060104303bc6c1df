"""vLLM's block pool, with the radix tree deciding what is cached and what goes.

Owns: what the tree holds of each request (`find`, `index`), the agreement of the tree's locks with
vLLM's reference counts, and which blocks are handed out next. Does not own which tokens of a
request are computed, nor pins (`manager.py`).

vLLM keeps all blocks that nobody references in one queue and hands them out from its front. Here:

    front | hold nothing cached ... | cached, in the tree ... | back

A block of the tree carries a hash, be it only `_MARK`, so that vLLM puts it at the back when it is
freed; what the tree forgets loses it and comes to the front. When the first part is too short, the
tree evicts (`get_new_blocks`). So vLLM's count of free blocks stays what it was: all of the queue.

Should anything go wrong in the tree, it is switched off with one error in the log, and the engine
goes on with vLLM's own prefix cache: `tree` is None from then on.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from vllm.logger import init_logger
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId, KVCacheBlock
from vllm.v1.request import Request

from sgl_vllm.counters import counter
from sgl_vllm.degrade import CircuitBreaker
from sgl_vllm.radix.eviction import EvictionPolicy
from sgl_vllm.radix.invariants import check_tree
from sgl_vllm.radix.keys import CacheNamespace, TokenKeys, namespace_of
from sgl_vllm.radix.node import NO_MATCH, Match, Node
from sgl_vllm.radix.tokens import TOKEN_BYTES, Tokens
from sgl_vllm.radix.tree import RadixTree
from sgl_vllm.vllm_api.patching import adopt

logger = init_logger("vllm.sgl_vllm.radix")

_MARK = BlockHashWithGroupId(b"sgl_vllm: in the radix tree" + bytes(4))
"""The hash of a block that is in the tree and that vLLM has not hashed. In no hash map."""

Result = TypeVar("Result")


@dataclass(slots=True)
class EvictionCounters:
    """What the tree has evicted since start."""

    evicted_blocks: int = counter("KV blocks evicted from the tree to make room.", unit="blocks")
    evicted_tokens: int = counter("Tokens in these blocks.", unit="tokens")
    expired_tokens: int = counter("Tokens evicted because of `radix_ttl_s`.", unit="tokens")


@dataclass(slots=True)
class RequestState:
    """How a live request stands in the tree.

    Attributes:
        tokens: its tokens as the tree compares them; may lag behind the request.
        own: the leaf that its inserts made.
        found: what its last look-up matched.
        num_found: how many cached tokens that look-up gave it.
        num_loaded: how many it has with what a KV connector loads for it; 0 without.
    """

    request: Request
    namespace: CacheNamespace | None
    tokens: Tokens
    own: Node | None = None
    found: Match = NO_MATCH
    num_found: int = 0
    num_loaded: int = 0


class RadixBlockPool(BlockPool):
    """Added to a live pool by `adopt`."""

    tree: RadixTree | None

    @classmethod
    def adopt(
        cls, pool: BlockPool, block_size: int, policy: EvictionPolicy, hash_blocks: bool
    ) -> RadixBlockPool:
        """Turn a freshly constructed stock pool into this one, in place.

        Args:
            block_size: tokens per block.
            hash_blocks: keep vLLM's block hashes and its map too, for KV events and connectors.
        """
        pool = adopt(pool, cls)
        pool.tree = RadixTree(block_size, policy)
        pool.block_size = block_size
        pool.hash_blocks = hash_blocks
        pool.counters = EvictionCounters()
        pool.wanted = tuple
        pool.moved = lambda block_ids: None
        pool._keys = TokenKeys()
        pool._trails = {}
        pool._scheduled = {}
        pool._in_this_step = set()
        pool._breaker = CircuitBreaker(
            "the radix tree",
            "vLLM's own prefix cache goes on",
            logger,
            on_trip=pool.switch_off,
        )
        return pool

    block_size: int
    hash_blocks: bool
    counters: EvictionCounters
    wanted: Callable[[], Collection[Node]]
    """What waiting requests match. Asked when something has to be evicted."""
    moved: Callable[[Sequence[int]], None]
    """Told which blocks the tree has forgotten, whoever uses them."""
    _keys: TokenKeys
    _trails: dict[str, RequestState]
    _scheduled: dict[str, tuple[Request, list[KVCacheBlock], int]]
    """Whole blocks that this step will compute, by request, and are not in the tree yet: most of
    them get there with the rest of their request."""
    _breaker: CircuitBreaker
    _in_this_step: set[int]
    """Those that are in the tree, because somebody was looked up after them."""

    # -- a request and the tree ---------------------------------------------------------------

    def state_of(self, request: Request) -> RequestState | None:
        """None if the request stays out of the tree."""
        trail = self._trails.get(request.request_id)
        if trail is None or trail.request is not request:
            trail = self._trails[request.request_id] = self._new_trail(request)
        elif len(trail.tokens) < TOKEN_BYTES * request.num_tokens and trail.namespace is not None:
            trail.tokens += self._keys.pack(request, len(trail.tokens) // TOKEN_BYTES)
        return trail if trail.namespace is not None else None

    def _new_trail(self, request: Request) -> RequestState:
        try:
            namespace = namespace_of(request)
            tokens = self._keys.pack(request) if namespace is not None else b""
            return RequestState(request, namespace, tokens)
        except Exception:
            logger.exception(
                "request %s has something in its prompt that the radix tree cannot compare: it is "
                "served without the prefix cache. Please report this with the lines below",
                request.request_id,
            )
            return RequestState(request, None, b"")

    def forget_request(self, request: Request) -> None:
        """`request` has given up its blocks, or is gone."""
        self._trails.pop(request.request_id, None)
        self._scheduled.pop(request.request_id, None)

    def match(self, trail: RequestState | None) -> Match:
        """The longest cached prefix of a request, all of it possibly."""
        if trail is None or trail.namespace is None or self.tree is None:
            return NO_MATCH
        if self._scheduled:
            self._index_scheduled()
        return self.tree.match_prefix(trail.namespace, trail.tokens)

    def is_computed(self, block_id: int) -> bool:
        """Whether the block may be copied from before this step's forward pass."""
        return block_id not in self._in_this_step

    def step_starts(self) -> None:
        """The next forward pass comes after all that was scheduled so far."""
        if self._scheduled:
            self.guarded(self._index_scheduled)
        self._in_this_step.clear()

    def expire(self, unused_since: float) -> None:
        """Forget what nobody has used since then, in seconds on the monotonic clock."""
        self.guarded(self._expire, unused_since)

    def _expire(self, unused_since: float) -> None:
        assert self.tree is not None
        num_tokens = self.tree.num_tokens
        self._forgotten(self.tree.expire(unused_since))
        self.counters.expired_tokens += num_tokens - self.tree.num_tokens

    def _index_scheduled(self) -> None:
        """Put what this step will compute into the tree: whole blocks of it can be shared."""
        scheduled, self._scheduled = self._scheduled, {}
        for request, blocks, num_tokens in scheduled.values():
            self.index(request, blocks, num_tokens)
            first, last = request.num_computed_tokens, num_tokens
            new_blocks = blocks[first // self.block_size : last // self.block_size]
            self._in_this_step.update([block.block_id for block in new_blocks])

    def index(
        self,
        request: Request,
        blocks: Sequence[KVCacheBlock],
        num_tokens: int,
        is_last_use: bool = False,
    ) -> bool:
        """Put the first `num_tokens` of `request` into the tree; `blocks` hold their KV. False if
        the request stays out of it."""
        trail = self.state_of(request)
        if trail is None or self.tree is None:
            return False
        tree, own = self.tree, trail.own
        first_block = 0
        if not tree.leads_to(own, num_tokens):
            own = None
        elif own is not None:
            if own.end == num_tokens:
                if is_last_use:
                    tree.record_use(own, request.priority)
                return True
            first_block = own.end // self.block_size
        tokens = trail.tokens
        if len(tokens) > TOKEN_BYTES * num_tokens:
            tokens = tokens[: TOKEN_BYTES * num_tokens]
        new_blocks = blocks[first_block : -(-num_tokens // self.block_size)]
        trail.own, taken, forgotten = tree.insert(
            trail.namespace,
            tokens,
            [block.block_id for block in new_blocks],
            own,
            request.priority,
        )
        if is_last_use:
            tree.record_use(trail.own or trail.found.node, request.priority)
        for block in new_blocks[len(new_blocks) - len(taken) :]:
            if block.block_hash is None:
                block.set_block_hash(_MARK, num_tokens)
        if forgotten:
            self._forgotten(forgotten)
        if self.hash_blocks:
            self._hash_whole_blocks(request, blocks, num_tokens // self.block_size)
        return True

    def _hash_whole_blocks(
        self, request: Request, blocks: Sequence[KVCacheBlock], num_blocks: int
    ) -> None:
        """Give those of the first `num_blocks` that have just come into the tree vLLM's hashes, and
        tell of them. A second copy of what is there has no place in the tree, so it gets none."""
        first = num_blocks
        while first > 0 and blocks[first - 1].block_hash == _MARK:
            first -= 1
            blocks[first].reset_hash()
        super().cache_full_blocks(request, list(blocks), first, num_blocks, self.block_size, 0)

    def unindex(self, blocks: Iterable[KVCacheBlock]) -> None:
        """The KV of `blocks` is not there after all."""
        if self.tree is not None:
            for block in blocks:
                self._forgotten(self.tree.evict_block(block.block_id))

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
        """vLLM calls this when more blocks of `request` are full, or will be after this step."""
        if self.tree is not None:
            self._scheduled[request.request_id] = (request, blocks, num_full_blocks * block_size)
            if self.hash_blocks:
                self.guarded(self._index_scheduled)
        if self.tree is None:
            # A request that began while the tree was there has to be hashed from its beginning.
            request.update_block_hashes()
            first = 0
            while first < num_full_blocks and blocks[first].block_hash is not None:
                first += 1
            super().cache_full_blocks(
                request, blocks, first, num_full_blocks, block_size, kv_cache_group_id
            )

    # -- handing out, taking back -------------------------------------------------------------

    def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        if self.tree is not None:
            num_empty = self.get_num_free_blocks() - self.tree.num_evictable_blocks
            if num_empty < num_blocks:
                self.guarded(self._evict, num_blocks - num_empty)
        return super().get_new_blocks(num_blocks)

    def _evict(self, num_blocks: int) -> None:
        assert self.tree is not None
        tree, wanted = self.tree, self.wanted()
        num_tokens = tree.num_tokens
        forgotten = tree.evict(num_blocks, wanted)
        self.counters.evicted_blocks += len(forgotten)
        self.counters.evicted_tokens += num_tokens - tree.num_tokens
        self._forgotten(forgotten)

    def touch(self, blocks: Sequence[KVCacheBlock]) -> None:
        super().touch(blocks)
        if self.tree is not None:
            self.tree.lock([block.block_id for block in blocks])

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
        if self.tree is not None and blocks:
            self.guarded(
                self.tree.unlock, [block.block_id for block in blocks if block.ref_cnt == 0]
            )

    def _maybe_evict_cached_block(self, block: KVCacheBlock) -> bool:
        """vLLM hands the block out again, or a connector says that its contents are wrong."""
        if self.tree is not None:
            if block.block_hash is None and self.metrics_collector is None:
                return False  # holds nothing: the most frequent case, at no cost
            self.guarded(self.unindex, [block])
        return super()._maybe_evict_cached_block(block)

    def _forgotten(self, block_ids: Sequence[int]) -> None:
        """The tree has forgotten these: those that nobody uses are the next to be handed out."""
        to_front = []
        for block_id in block_ids:
            block = self.blocks[block_id]
            if self.hash_blocks:
                self._emit_block_removed_events(self._remove_cached_block_hashes(block))
            else:
                block.reset_hash()
            if block.ref_cnt == 0 and block.next_free_block is not None:
                self.free_block_queue.remove(block)
                to_front.append(block)
        self.free_block_queue.prepend_n(to_front)
        self.moved(block_ids)

    def _emit_block_removed_events(self, block_hashes: list[BlockHashWithGroupId]) -> None:
        """Of a block that has a second copy, vLLM would say that it is gone."""
        if self.enable_kv_cache_events and block_hashes:
            super()._emit_block_removed_events(
                [
                    key
                    for key in block_hashes
                    if self.cached_block_hash_to_block.get_one_block(key) is None
                ]
            )

    def reset_prefix_cache(self) -> bool:
        if not super().reset_prefix_cache():
            return False
        if self.tree is not None:
            self.tree.clear()
            self._scheduled.clear()
        return True

    # -- safety -------------------------------------------------------------------------------

    def guarded(self, step: Callable[..., Result], *args: Any) -> Result | None:
        """Do a step; if it fails, or the tree is off, None."""
        if self.tree is None:
            return None
        try:  # `CircuitBreaker.run` without its call: a step may take less than that
            return step(*args)
        except Exception:
            self._breaker.record()
            return None

    def switch_off(self) -> None:
        """Go on with vLLM's own prefix cache, which knows nothing of what the tree held."""
        self.tree = None
        self._trails.clear()
        self._scheduled.clear()
        for block in self.blocks:
            self._emit_block_removed_events(self._remove_cached_block_hashes(block))

    def check_invariants(self) -> None:
        """Raise AssertionError if tree and pool disagree: free + cached + in use = all, and the
        tree's locks are the reference counts. Walks everything: for tests."""
        tree = self.tree
        assert tree is not None, "the tree was switched off by an error"
        check_tree(tree)
        free, block = [], self.free_block_queue.fake_free_list_head.next_free_block
        while block is not None and block is not self.free_block_queue.fake_free_list_tail:
            free.append(block)
            block = block.next_free_block
        assert len(free) == self.get_num_free_blocks() == len({b.block_id for b in free})
        in_use = [b for b in self.blocks if b.ref_cnt > 0 and not b.is_null]
        assert all(b.ref_cnt == 0 for b in free)
        assert len(free) + len(in_use) == self.num_gpu_blocks - 1
        assert tree.num_protected_blocks == sum(b.block_id in tree for b in in_use)
        assert tree.num_evictable_blocks == sum(b.block_id in tree for b in free)
        for block in self.blocks:
            assert (block.block_id in tree) == (block.block_hash is not None), block
        num_empty = len(free) - tree.num_evictable_blocks
        assert not any(b.block_id in tree for b in free[:num_empty]), "a cached block is in front"
