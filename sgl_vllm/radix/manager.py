"""Puts the radix tree into vLLM's KV-cache manager.

Owns: what a request's look-up finds, and what it leaves behind when its blocks are released. Does
not own: allocation, copying, eviction order, events; these stay vLLM's. The two classes here add
overrides to live vLLM objects (`RadixKVCacheManager.adopt`), so whoever holds a reference keeps it.

How a hit inside a block works: vLLM itself, given a hit that is not block-aligned, allocates one
more block and copies the partial one into it before the forward pass.

    look-up    longest of (a) vLLM's own: full blocks, also those being computed in this step,
               (b) the tree's: any number of *computed* tokens
    release    [0, computed) goes into the tree; the last, partial block gets a private key so that
               the pool keeps it in its LRU order instead of reusing it first
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    BlockHashWithGroupId,
    KVCacheBlock,
    make_block_hash_with_group_id,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig
from vllm.v1.request import Request

from sgl_vllm.radix.tree import Namespace, RadixTree, Tokens

logger = init_logger("vllm.sgl_vllm.radix")

_TAIL_KEY = b"sgl_vllm partial tail "


@dataclass(slots=True)
class RadixCounters:
    """Counts since start, over admitted requests, in tokens unless they say otherwise."""

    lookups: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    partial_block_hits: int = 0
    retained_tails: int = 0


def unsupported_reason(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> str | None:
    """Why the tree cannot serve this model or configuration; None if it can."""
    parallel = vllm_config.parallel_config
    if not vllm_config.cache_config.enable_prefix_caching:
        return "prefix caching is off (--no-enable-prefix-caching)"
    if len(kv_cache_config.kv_cache_groups) != 1:
        return "the model has several KV-cache groups (sliding window, Mamba or hybrid)"
    if type(kv_cache_config.kv_cache_groups[0].kv_cache_spec) is not FullAttentionSpec:
        return "the model's KV cache is not plain full attention"
    if vllm_config.kv_transfer_config is not None:
        return "a KV connector is configured, which is not verified with it yet"
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        return "context parallelism splits blocks over workers"
    if vllm_config.speculative_config is not None:
        return "speculative decoding is configured, which is not verified with it yet"
    return None


class RadixBlockPool(BlockPool):
    """Tells the tree about every block that is handed out again or loses its contents' name."""

    radix_tree: RadixTree

    def _maybe_evict_cached_block(self, block: KVCacheBlock) -> bool:
        self.radix_tree.drop_block(block.block_id)
        return super()._maybe_evict_cached_block(block)

    def _emit_block_removed_events(self, block_hashes: list[BlockHashWithGroupId]) -> None:
        """Partial tails were never announced, so their removal is not either."""
        super()._emit_block_removed_events(
            [key for key in block_hashes if not bytes(key).startswith(_TAIL_KEY)]
        )

    def keep_tail(self, block: KVCacheBlock, key: BlockHash, num_tokens: int) -> None:
        """Let `block`, which no full-block hash names, live in the LRU order."""
        self._insert_block_hash(make_block_hash_with_group_id(key, 0), block, num_tokens)

    def release_tail(self, block: KVCacheBlock) -> None:
        """`block` is of no more use: if it is a kept tail and unused, it is the next to go."""
        if block.block_hash is None or not bytes(block.block_hash).startswith(_TAIL_KEY):
            return
        self._remove_cached_block_hashes(block)
        if block.ref_cnt == 0:
            self.free_block_queue.remove(block)
            self.free_block_queue.prepend_n([block])


class RadixKVCacheManager(KVCacheManager):
    """vLLM's manager with the tree beside its hash map.

    Should anything go wrong in the tree, it is switched off with one error in the log, and the
    engine goes on with vLLM's own cache: `tree` is None from then on.
    """

    tree: RadixTree | None
    counters: RadixCounters

    @classmethod
    def adopt(cls, manager: KVCacheManager) -> RadixKVCacheManager:
        """Turn a freshly constructed stock manager into this one, in place."""
        block_size = manager.coordinator.single_type_managers[0].block_size
        pool = manager.block_pool
        manager.__class__ = cls
        assert isinstance(manager, RadixKVCacheManager)
        manager.tree = RadixTree(block_size)
        manager.counters = RadixCounters()
        manager._tokens = WeakKeyDictionary()
        manager._tail_numbers = itertools.count()
        manager.score_from = lambda request: None
        pool.__class__ = RadixBlockPool
        assert isinstance(pool, RadixBlockPool)
        pool.radix_tree = manager.tree
        return manager

    _tokens: WeakKeyDictionary[Request, Tokens]
    _tail_numbers: Any
    score_from: Callable[[Request], int | None]
    """The first prompt token whose score a request wants, if it scores its prompt: the prefix
    cache may serve the tokens before the one before it."""

    # -- look up ------------------------------------------------------------------------------

    def get_computed_blocks(self, request: Request, *args: Any) -> tuple[KVCacheBlocks, int, int]:
        found = super().get_computed_blocks(request, *args)
        if not self.prefix_cache_lookup_enabled(request):
            return found
        blocks, num_tokens, boundary = found
        limit = args[0] if args else request.num_tokens - 1
        first_scored = self.score_from(request)
        if first_scored is not None:
            limit = min(limit, first_scored - 1)
            if num_tokens > limit:
                # Full blocks may still be computed in this very step, so they are not to be
                # copied from: cut at a block boundary.
                size = self.coordinator.single_type_managers[0].block_size
                num_tokens = limit // size * size
                blocks = self.create_kv_cache_blocks(
                    (list(blocks.blocks[0][: num_tokens // size]),)
                )
        longer = self._guarded(self._tree_hit, request, limit, num_tokens)
        return (*longer, boundary) if longer is not None else (blocks, num_tokens, boundary)

    def _tree_hit(
        self, request: Request, limit: int, at_least: int
    ) -> tuple[KVCacheBlocks, int] | None:
        """The tree's hit of at most `limit` tokens, if it is longer than `at_least`."""
        assert self.tree is not None
        namespace = namespace_of(request)
        if namespace is None:
            return None
        match = self.tree.match(namespace, self._tokens_of(request)[:limit])
        num_tokens, size = match.num_tokens, self.tree.block_size
        if num_tokens % size and not self._has_room_for_copy(request, match.block_ids):
            num_tokens = num_tokens // size * size
        if num_tokens <= at_least:
            return None
        blocks = [self.block_pool.blocks[i] for i in match.block_ids[: -(-num_tokens // size)]]
        return KVCacheBlocks((blocks,)), num_tokens

    def _has_room_for_copy(self, request: Request, block_ids: list[int]) -> bool:
        """Whether the request fits while it also holds the block that it copies from.

        Without this check a request that needs every block there is could never be admitted.
        """
        assert self.tree is not None
        pool = self.block_pool
        num_needed = -(-request.num_tokens // self.tree.block_size) + 1 + self.watermark_blocks
        num_in_use = sum(pool.blocks[block_id].ref_cnt > 0 for block_id in block_ids)
        return num_needed <= pool.get_num_free_blocks() + num_in_use

    def matched_tokens(self, request: Request) -> int:
        """How long a prefix of `request` is in the tree, without side effects."""
        namespace = namespace_of(request)
        if self.tree is None or namespace is None:
            return 0
        tokens = self._tokens_of(request)[:-1]
        return self._guarded(self.tree.match_length, namespace, tokens) or 0

    def record_prefix_cache_stats(self, request: Request, num_hits: int) -> None:
        super().record_prefix_cache_stats(request, num_hits)
        if self.prefix_cache_lookup_enabled(request):
            self.counters.lookups += 1
            self.counters.prompt_tokens += request.num_tokens
            self.counters.hit_tokens += num_hits
            if self.tree is not None:
                self.counters.partial_block_hits += num_hits % self.tree.block_size != 0

    # -- release ------------------------------------------------------------------------------

    def free(self, request: Request) -> None:
        self._guarded(self._retain, request)
        super().free(request)

    def pop_blocks_for_free(self, request: Request) -> list[KVCacheBlock]:
        self._guarded(self._retain, request)
        return super().pop_blocks_for_free(request)

    def index_computed(self, request: Request) -> None:
        """Let others find what a running `request` has computed so far."""
        self._guarded(self._insert, request)

    def _retain(self, request: Request) -> None:
        """Before its blocks are released: index what `request` computed and keep its tail."""
        inserted = self._insert(request)
        if inserted is None:
            return
        tail, num_tokens = inserted
        assert self.tree is not None
        is_partial = num_tokens % self.tree.block_size != 0
        if is_partial and tail.block_hash is None and tail.block_id in self.tree:
            key = BlockHash(_TAIL_KEY + str(next(self._tail_numbers)).encode())
            self._pool.keep_tail(tail, key, num_tokens)
            self.counters.retained_tails += 1

    def _insert(self, request: Request) -> tuple[KVCacheBlock, int] | None:
        """Put the request's computed tokens into the tree; its last block and their number."""
        namespace = namespace_of(request)
        if self.tree is None or namespace is None or not self.enable_caching:
            return None
        blocks = self.coordinator.single_type_managers[0].req_to_blocks.get(request.request_id)
        # Tokens of a step in flight are not computed yet, and a placeholder is no token.
        num_tokens = min(
            request.num_computed_tokens - request.num_in_flight_tokens, request.num_tokens
        )
        if not blocks or num_tokens <= 0:
            return None
        blocks = blocks[: -(-num_tokens // self.tree.block_size)]
        redundant = self.tree.insert(
            namespace, self._tokens_of(request)[:num_tokens], [block.block_id for block in blocks]
        )
        for block_id in redundant:
            self._pool.release_tail(self.block_pool.blocks[block_id])
        return blocks[-1], num_tokens

    def reset_prefix_cache(self) -> bool:
        if not super().reset_prefix_cache():
            return False
        if self.tree is not None:
            self.tree.clear()
        return True

    # -- inside -------------------------------------------------------------------------------

    @property
    def _pool(self) -> RadixBlockPool:
        assert isinstance(self.block_pool, RadixBlockPool)
        return self.block_pool

    def _tokens_of(self, request: Request) -> Tokens:
        tokens = self._tokens.get(request)
        if tokens is None or len(tokens) != request.num_tokens:
            tokens = np.array(request._all_token_ids, dtype=np.int32)
            self._tokens[request] = tokens
        return tokens

    def _guarded(self, step: Callable[..., Any], *args: Any) -> Any:
        if self.tree is None:
            return None
        try:
            return step(*args)
        except Exception:
            logger.exception(
                "the radix tree failed and is switched off; vLLM's own prefix cache goes on. "
                "Please report this with the lines below"
            )
            self.tree.clear()
            self.tree = None
            return None


def namespace_of(request: Request) -> Namespace | None:
    """What must be equal for two requests to share KV beside the tokens; None: never share.

    The same as in vLLM's block hashes: an adapter from another path shares nothing, an empty salt
    is none. Multimodal inputs, prompt embeddings and streaming sessions stay with vLLM's cache.
    """
    if request.mm_features or request.prompt_token_ids is None or request.resumable:
        return None
    if request.prompt_embeds is not None:
        return None
    lora = request.lora_request
    adapter = (lora.lora_name, lora.lora_path) if lora is not None else None
    return (adapter, request.cache_salt or None)
