"""vLLM's KV-cache manager, with the radix tree as its prefix cache.

Owns: what a request's look-up finds, which of its tokens are computed and so may be found by
others, and pins. Does not own allocation, copying and events, which stay vLLM's, nor the tree's
agreement with the blocks (`pool.py`). `RadixKVCacheManager.adopt` adds the overrides to live vLLM
objects, so whoever holds a reference keeps it.

How a hit inside a block works: vLLM itself, given a hit that is not block-aligned, allocates one
more block and copies the partial one into it before the forward pass.

                 cached, full blocks    | partial |        to compute
    hit      [0 ........................|... hit) |
    blocks   |--shared--|--shared--|    |--copy---|--new--|--new--|
    indexed  when scheduled, for whole-block hits (as in vLLM)      the rest when computed
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig
from vllm.v1.request import Request, RequestStatus

from sgl_vllm.counters import counter, gauge
from sgl_vllm.radix.block_hashes import BlockHasher, placeholder_hasher
from sgl_vllm.radix.eviction import POLICIES
from sgl_vllm.radix.keys import CacheNamespace
from sgl_vllm.radix.node import NO_MATCH, Match
from sgl_vllm.radix.pool import RadixBlockPool
from sgl_vllm.radix.snapshot import CacheSnapshot, take_snapshot
from sgl_vllm.radix.tokens import TOKEN_BYTES, pack
from sgl_vllm.radix.tree import RadixTree
from sgl_vllm.vllm_api.patching import adopt


@dataclass(slots=True)
class RadixCounters:
    """Hits since start. A request counts once, at its first admission."""

    lookups: int = counter(
        "Admitted requests that were looked up in the prefix cache.",
        unit="requests",
        metric="prefix_lookups",
    )
    prompt_tokens: int = counter(
        "Tokens of these requests.", unit="tokens", metric="prefix_lookup_tokens"
    )
    hit_tokens: int = counter(
        "Tokens of these requests that were found in the tree.",
        unit="tokens",
        metric="prefix_hit_tokens",
    )
    whole_block_hit_tokens: int = counter(
        "Cached prompt tokens by where they were found: in whole blocks of the tree.",
        unit="tokens",
        metric="tier_hit_tokens",
        labels={"tier": "whole_blocks"},
    )
    partial_block_hit_tokens: int = counter(
        "In the last, partial block of a hit. With `whole_blocks` this adds up to "
        "`prefix_hit_tokens`.",
        unit="tokens",
        metric="tier_hit_tokens",
        labels={"tier": "partial_block"},
    )
    host_hit_tokens: int = counter(
        "Found beyond the tree by a KV connector, in host memory.",
        unit="tokens",
        metric="tier_hit_tokens",
        labels={"tier": "host"},
    )
    disk_hit_tokens: int = counter(
        "Found by a KV connector on disk.",
        unit="tokens",
        metric="tier_hit_tokens",
        labels={"tier": "disk"},
    )
    p2p_hit_tokens: int = counter(
        "Found by a KV connector on another server.",
        unit="tokens",
        metric="tier_hit_tokens",
        labels={"tier": "p2p"},
    )
    other_tier_hit_tokens: int = counter(
        "Found by a KV connector that does not say where.",
        unit="tokens",
        metric="tier_hit_tokens",
        labels={"tier": "other_tier"},
    )
    tier_declined_tokens: int = counter(
        "Found by a KV connector, but computed because that is cheaper than loading.",
        unit="tokens",
    )
    tier_requests_not_asked: int = counter(
        "Requests too short for any load to pay off, so the KV connector was not asked.",
        unit="requests",
        metric=None,
    )
    partial_block_hits: int = counter("Hits that end inside a block.", unit="requests")
    retained_tails: int = counter(
        "Partial last blocks kept in the cache for later requests.", unit="blocks"
    )


@dataclass(frozen=True, slots=True)
class RadixGauges:
    """The size of the cache and of the tree at this moment."""

    tree_nodes: int = gauge("Nodes of the radix tree.", unit="nodes")
    tree_tokens: int = gauge("Tokens that the radix tree holds.", unit="tokens")
    tree_blocks: int = gauge("KV blocks that the radix tree holds.", unit="blocks")
    cache_tokens: int = gauge("Tokens that fit into all KV blocks.", unit="tokens")
    protected_tokens: int = gauge(
        "Size of the tree's blocks that cannot be evicted now, because a running request or a pin "
        "uses them. Blocks count whole, however full they are.",
        unit="tokens",
    )
    pinned_tokens: int = gauge("Size of the pinned blocks.", unit="tokens")
    block_size: int = 0


@dataclass(slots=True)
class Pin:
    """A cached prefix that is not evicted: the pool counts its blocks as used."""

    namespace: CacheNamespace
    tokens: bytes
    blocks: list[KVCacheBlock]
    num_tokens: int
    since: float


def unsupported_reason(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> str | None:
    """Why the tree cannot serve this model or configuration; None if it can."""
    parallel = vllm_config.parallel_config
    if not vllm_config.cache_config.enable_prefix_caching:
        return "prefix caching is off (--no-enable-prefix-caching)"
    if len(kv_cache_config.kv_cache_groups) != 1:
        return "the model has several KV-cache groups (sliding window, Mamba or hybrid)"
    if type(kv_cache_config.kv_cache_groups[0].kv_cache_spec) is not FullAttentionSpec:
        return "the model's KV cache is not plain full attention"
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        return "context parallelism splits blocks over workers"
    if vllm_config.speculative_config is not None:
        return "speculative decoding is configured, which is not verified with it yet"
    aux_output = getattr(vllm_config, "aux_output_config", None)
    if getattr(aux_output, "enable_return_routed_experts", False):
        return "routed experts are returned, which vLLM keeps by its own block hashes"
    return None


class RadixKVCacheManager(KVCacheManager):
    """Added to a live manager by `adopt`."""

    @classmethod
    def adopt(
        cls,
        manager: KVCacheManager,
        *,
        policy: str = "lru",
        ttl_s: float = 0,
        pin_share: float = 0.25,
        has_connector: bool = False,
    ) -> RadixKVCacheManager:
        """Turn a freshly constructed stock manager into this one, in place.

        Args:
            policy: a name in `eviction.POLICIES`.
            ttl_s: forget what nobody has used for so many seconds; 0 for never.
            pin_share: at most this share of the cache can be pinned.
            has_connector: a KV connector looks blocks up by vLLM's hashes.
        """
        block_size = manager.coordinator.single_type_managers[0].block_size
        manager = adopt(manager, cls)
        hash_blocks = has_connector or manager.enable_kv_cache_events
        manager.pool = RadixBlockPool.adopt(
            manager.block_pool, block_size, POLICIES[policy], hash_blocks
        )
        manager.pool.moved = manager._keep_pins
        manager.counters = RadixCounters()
        manager.policy = policy
        manager.block_size = block_size
        manager.score_from = lambda request: None
        manager._ttl_s = ttl_s
        manager._pin_share = pin_share
        manager._pins = {}
        return manager

    pool: RadixBlockPool
    """The same object as `block_pool`."""
    counters: RadixCounters
    policy: str
    block_size: int
    score_from: Callable[[Request], int | None]
    """The first prompt token whose score a request wants, if it scores its prompt: the prefix
    cache may serve the tokens before the one before it."""
    _ttl_s: float
    _pin_share: float
    _pins: dict[str, Pin]

    @property
    def tree(self) -> RadixTree | None:
        """None once an error has switched it off."""
        return self.pool.tree

    @property
    def failed(self) -> bool:
        """Whether an error has switched the tree off."""
        return self.tree is None

    def block_hasher(self, stock: BlockHasher) -> BlockHasher:
        """What hashes the blocks of new requests in place of vLLM's `stock` hasher."""
        if self.pool.hash_blocks:
            return stock
        hash_block_size = self.block_pool.hash_block_size
        return placeholder_hasher(stock, hash_block_size, lambda: self.tree is not None)

    # -- look up ------------------------------------------------------------------------------

    def new_step_starts(self) -> None:
        super().new_step_starts()
        self.pool.step_starts()
        if self._ttl_s:
            self.pool.expire(self._expire_before())

    def _expire_before(self) -> float:
        return time.monotonic() - self._ttl_s if self._ttl_s else float("-inf")

    def match(self, request: Request) -> Match:
        """The longest cached prefix of `request`, without side effects."""
        return self.pool.guarded(self._match, request) or NO_MATCH

    def _match(self, request: Request) -> Match:
        return self.pool.match(self.pool.state_of(request))

    def num_shared_now(self, request: Request) -> int:
        """How many tokens a look-up would find in the middle of a step: like `match`, but of blocks
        that this step computes only whole ones."""
        return self.pool.guarded(self._num_shared_now, request) or 0

    def _num_shared_now(self, request: Request) -> int:
        assert self.tree is not None
        match = self._match(request)
        num_inside = match.num_tokens % self.block_size
        if num_inside:
            last_block = self.tree.block_ids(match, match.num_tokens)[-1]
            if not self.pool.is_computed(last_block):
                return match.num_tokens - num_inside
        return match.num_tokens

    def get_computed_blocks(
        self, request: Request, max_cache_hit_length: int | None = None
    ) -> tuple[KVCacheBlocks, int, int]:
        """The cached blocks of `request`, how many of its tokens they hold, and a boundary that
        only vLLM's hybrid models use.

        Args:
            max_cache_hit_length: at most this many tokens, given by vLLM from 0.33 on. At least one
                token always has to run, or there is nothing to sample from.
        """
        stock_limit = [] if max_cache_hit_length is None else [max_cache_hit_length]
        limit = min([request.num_tokens - 1, *stock_limit])
        if getattr(request, "prefill_stats", None) is not None and not request.num_preemptions:
            # Some output may follow the prompt already; vLLM counts a first hit as prompt.
            limit = min(limit, request.num_prompt_tokens)
        first_scored = self.score_from(request)
        if first_scored is not None:
            limit = min(limit, first_scored - 1)
        if self.tree is None:
            blocks, num_tokens, boundary = super().get_computed_blocks(request, *stock_limit)
            if num_tokens > limit:
                num_tokens = limit - limit % self.block_size
                kept = list(blocks.blocks[0][: num_tokens // self.block_size])
                blocks = self.create_kv_cache_blocks((kept,))
            return blocks, num_tokens, boundary
        if not self.prefix_cache_lookup_enabled(request):
            return self.empty_kv_cache_blocks, 0, 0
        found = self.pool.guarded(self._find, request, limit)
        return (*found, 0) if found else (self.empty_kv_cache_blocks, 0, 0)

    def _find(self, request: Request, limit: int) -> tuple[KVCacheBlocks, int] | None:
        """The cached blocks of `request`, for at most `limit` tokens."""
        trail = self.pool.state_of(request)
        match = self.pool.match(trail)
        num_tokens = min(match.num_tokens, limit)
        if num_tokens <= 0:
            return None
        assert self.tree is not None and trail is not None
        block_ids = self.tree.block_ids(match, num_tokens)
        num_inside = num_tokens % self.block_size
        if num_inside and (
            not self.pool.is_computed(block_ids[-1])
            or not self._has_room_for_copy(request, block_ids)
        ):
            num_tokens -= num_inside
            block_ids.pop()
            if not block_ids:
                return None
        trail.found, trail.num_found = match, num_tokens
        all_blocks = self.block_pool.blocks
        blocks = ([all_blocks[block_id] for block_id in block_ids],)
        if (
            self.enable_kv_cache_events
            and getattr(request, "kv_cache_report_mode", "incremental") == "full"
        ):
            whole = blocks[0][: num_tokens // self.block_size]
            self.coordinator.emit_cached_block_events(request, (whole,))
        return KVCacheBlocks(blocks), num_tokens

    def _has_room_for_copy(self, request: Request, block_ids: list[int]) -> bool:
        """Whether the request fits while it also holds the block that it copies from.

        Without this check a request that needs every block there is could never be admitted.
        """
        pool = self.block_pool
        num_needed = -(-request.num_tokens // self.block_size) + 1 + self.watermark_blocks
        num_free = pool.get_num_free_blocks()
        if num_needed <= num_free:
            return True
        num_in_use = sum(pool.blocks[block_id].ref_cnt > 0 for block_id in block_ids)
        return num_needed <= num_free + num_in_use

    def record_prefix_cache_stats(self, request: Request, num_hits: int) -> None:
        """Called once for every request that is admitted."""
        super().record_prefix_cache_stats(request, num_hits)
        if not self.prefix_cache_lookup_enabled(request):
            return
        if not request.num_preemptions:
            self.counters.lookups += 1
            self.counters.prompt_tokens += request.num_tokens
            self.counters.hit_tokens += num_hits
            num_inside = num_hits % self.block_size
            self.counters.partial_block_hits += num_inside != 0
            self.counters.partial_block_hit_tokens += num_inside
            self.counters.whole_block_hit_tokens += num_hits - num_inside
        if num_hits:
            self.pool.guarded(self._use_hit, request)

    def _use_hit(self, request: Request) -> None:
        trail = self.pool.state_of(request)
        if trail is not None and self.tree is not None:
            self.tree.record_hit(trail.found, request.priority)

    # -- leave behind -------------------------------------------------------------------------

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        *args: Any,
        num_external_computed_tokens: int = 0,
        **kwargs: Any,
    ) -> KVCacheBlocks | None:
        """Notes how far a KV connector is to fill what is allocated."""
        blocks = super().allocate_slots(
            request,
            num_new_tokens,
            num_new_computed_tokens,
            *args,
            num_external_computed_tokens=num_external_computed_tokens,
            **kwargs,
        )
        if num_external_computed_tokens and blocks is not None:
            trail = self.pool.state_of(request)
            if trail is not None:
                trail.num_loaded = num_new_computed_tokens + num_external_computed_tokens
        return blocks

    def index_prompt(self, request: Request) -> None:
        """Let others find the whole prompt of a running `request`, to the token. It is computed
        before the next forward pass begins."""
        self.pool.guarded(self._index, request, request.num_prompt_tokens)

    def free(self, request: Request) -> None:
        self.pool.guarded(self._retain, request)
        super().free(request)

    def pop_blocks_for_free(self, request: Request) -> list[KVCacheBlock]:
        self.pool.guarded(self._retain, request)
        return super().pop_blocks_for_free(request)

    def _retain(self, request: Request) -> None:
        """Before its blocks are released, whatever the reason: index what `request` computed."""
        request_id = request.request_id
        manager = self.coordinator.single_type_managers[0]
        blocks = manager.req_to_blocks.get(request_id)
        if blocks and self.enable_caching:
            num_scheduled = manager.num_cached_block.get(request_id, 0)
            if num_scheduled * self.block_size > request.num_computed_tokens:
                # Taken out of the step that would have computed it, or its load has failed. What it
                # found in the cache is not its own to take out.
                trail = self.pool.state_of(request)
                num_kept = max(request.num_computed_tokens, trail.num_found if trail else 0)
                self.pool.unindex(blocks[num_kept // self.block_size : num_scheduled])
            num_tokens = self._num_to_index(request)
            # After a failed load vLLM counts blocks as computed that another failed request shares.
            if num_tokens > 0 and request.status != RequestStatus.FINISHED_ERROR:
                is_cached = self.pool.index(request, blocks, num_tokens, is_last_use=True)
                self.counters.retained_tails += is_cached and num_tokens % self.block_size != 0
        self.pool.forget_request(request)

    def _index(self, request: Request, num_tokens: int) -> None:
        """Put the first tokens of a running request into the tree, if it still has its blocks."""
        if request.num_computed_tokens < num_tokens:
            return
        blocks = self.coordinator.single_type_managers[0].req_to_blocks.get(request.request_id)
        if blocks and self.enable_caching:
            self.pool.index(request, blocks, num_tokens)

    def _num_to_index(self, request: Request) -> int:
        """How many of the request's tokens others may find.

        Tokens of a step in flight are not computed yet, and a placeholder is no token. vLLM counts
        tokens as computed that are still to be loaded, and may never be: of those, only the blocks
        that it has cached itself are there. What comes after them is computed, and has read them.
        """
        num_tokens = min(
            request.num_computed_tokens - request.num_in_flight_tokens, request.num_tokens
        )
        trail = self.pool.state_of(request)
        if trail is not None and 0 < num_tokens <= trail.num_loaded:
            cached = self.coordinator.single_type_managers[0].num_cached_block
            num_tokens = min(num_tokens, cached.get(request.request_id, 0) * self.block_size)
        return num_tokens

    def estimate_cached_tokens(self, request: Request) -> int:
        """How many tokens `request` will have left in the cache, for vLLM's statistics."""
        if self.tree is None:
            return super().estimate_cached_tokens(request)
        if self.pool.state_of(request) is None:
            return 0
        return self._num_to_index(request)

    def reset_prefix_cache(self) -> bool:
        """Empty the cache, pinned prefixes too. False, and nothing is changed, if it is in use."""
        pins, self._pins = self._pins, {}
        for pin in pins.values():
            self.block_pool.free_blocks(reversed(pin.blocks))
        if super().reset_prefix_cache():
            return True
        for pin in pins.values():
            self.block_pool.touch(pin.blocks)
        self._pins = pins
        return False

    # -- pins ---------------------------------------------------------------------------------

    @property
    def max_pinned_blocks(self) -> int:
        """The share of the cache that may be pinned, but never so much that the longest request
        would not fit beside it."""
        usable = self.block_pool.num_gpu_blocks - 1
        longest = -(-self.max_model_len // self.block_size) + 1 + self.watermark_blocks
        return max(0, min(int(usable * self._pin_share), usable - longest))

    @property
    def gauges(self) -> RadixGauges:
        tree, block_size = self.tree, self.block_size
        return RadixGauges(
            tree_nodes=tree.num_nodes if tree is not None else 0,
            tree_tokens=tree.num_tokens if tree is not None else 0,
            tree_blocks=tree.num_blocks if tree is not None else 0,
            cache_tokens=(self.block_pool.num_gpu_blocks - 1) * block_size,
            protected_tokens=tree.num_protected_blocks * block_size if tree is not None else 0,
            pinned_tokens=len(self.pinned_block_ids) * block_size,
            block_size=block_size,
        )

    @property
    def pinned_block_ids(self) -> set[int]:
        return {block.block_id for pin in self._pins.values() for block in pin.blocks}

    def pin(
        self,
        token_ids: Sequence[int],
        cache_salt: str | None = None,
        adapter: tuple[str, str] | None = None,
    ) -> tuple[str, Pin]:
        """Keep the longest cached prefix of `token_ids` until `unpin` or a reset.

        Raises:
            ValueError: nothing of it is cached, or too much would be pinned.
        """
        if self.tree is None:
            raise ValueError("the radix tree is switched off by an error: see the server's log")
        namespace = CacheNamespace(adapter, cache_salt or None)
        tokens = pack(token_ids)
        blocks, num_tokens = self._pinnable(namespace, tokens)
        if not blocks:
            raise ValueError("nothing of this prefix is cached: run it once, then pin it")
        pinned = self.pinned_block_ids
        num_pinned = len(pinned | {block.block_id for block in blocks})
        if num_pinned > self.max_pinned_blocks:
            raise ValueError(
                f"{num_pinned} blocks would be pinned and at most {self.max_pinned_blocks} may be: "
                "unpin something, or start the server with a larger radix_pin_share or cache"
            )
        self.block_pool.touch(blocks)
        pin_id = secrets.token_hex(8)
        tokens = tokens[: TOKEN_BYTES * num_tokens]
        self._pins[pin_id] = Pin(namespace, tokens, blocks, num_tokens, time.monotonic())
        return pin_id, self._pins[pin_id]

    def unpin(self, pin_id: str) -> bool:
        """Let a pinned prefix be evicted again; False if there is no such pin."""
        pin = self._pins.pop(pin_id, None)
        if pin is None:
            return False
        self.block_pool.free_blocks(reversed(pin.blocks))
        return True

    def pins(self) -> dict[str, Pin]:
        return dict(self._pins)

    def _pinnable(self, namespace: CacheNamespace, tokens: bytes) -> tuple[list[KVCacheBlock], int]:
        assert self.tree is not None
        match = self.tree.match_prefix(namespace, tokens)
        block_ids = self.tree.block_ids(match, match.num_tokens)
        return [self.block_pool.blocks[block_id] for block_id in block_ids], match.num_tokens

    def _keep_pins(self, forgotten: Sequence[int]) -> None:
        """A pinned block has left the tree, most often because somebody's longer copy of a partial
        last block replaced it: pin what holds the prefix now."""
        if not self._pins:
            return
        gone = set(forgotten)
        for pin in self._pins.values():
            if gone.isdisjoint(block.block_id for block in pin.blocks):
                continue
            old = pin.blocks
            pin.blocks, pin.num_tokens = self._pinnable(pin.namespace, pin.tokens)
            self.block_pool.touch(pin.blocks)
            self.block_pool.free_blocks(reversed(old))

    # -- views --------------------------------------------------------------------------------

    def snapshot(self, max_nodes: int, max_tokens: int) -> CacheSnapshot | None:
        """The cache for people and pages; None if the tree is off. Tenants with a `cache_salt` are
        shown in totals only, and never with tokens."""
        self.pool.expire(self._expire_before())
        if self.tree is None:
            return None
        pinned = self.pinned_block_ids
        num_free = self.block_pool.get_num_free_blocks()
        return CacheSnapshot(
            policy=self.policy,
            total_blocks=self.block_pool.num_gpu_blocks - 1,
            free_blocks=num_free - self.tree.num_evictable_blocks,
            num_pinned_blocks=len(pinned),
            tree=take_snapshot(
                self.tree,
                max_nodes,
                is_isolated=_is_salted,
                pinned=pinned,
                wanted=self.pool.wanted(),
                max_tokens=max_tokens,
            ),
        )


def _is_salted(namespace: Any) -> bool:
    return namespace.salt is not None
