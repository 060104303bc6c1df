"""vLLM's KV-cache manager, with the radix tree as its prefix cache.

Owns vLLM's interface to it. Does not own what a lookup finds (`lookup.py`), which tokens other
requests may share (`retention.py`), the tree's agreement with the blocks (`pool.py`), how a request
gets blocks and gives them back (`allocation.py`), nor copying and events, which stay vLLM's.
`RadixKVCacheManager.adopt` changes live vLLM objects in place, so every reference to them stays
valid.

A hit may end inside a block. vLLM then allocates one more block and copies the partial one into it
before the forward pass. Whole blocks of a prompt that a step is to compute enter the tree at the
next lookup, or when the next step starts; the rest of it when it is computed, and the output when
the request ends (`RadixBlockPool.indexes_output`). With speculative decoding, the tree has accepted
tokens only.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import replace
from typing import Any  # Any: arguments of vLLM's, and counters
from weakref import WeakKeyDictionary

from vllm.logger import init_logger
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from sgl_vllm.config import Options
from sgl_vllm.degrade import Guard
from sgl_vllm.radix.allocation import AllocatingManager
from sgl_vllm.radix.block_hashes import BlockHasher, placeholder_hasher
from sgl_vllm.radix.checkpoints import Checkpoints
from sgl_vllm.radix.groups import Groups
from sgl_vllm.radix.keys import is_salted
from sgl_vllm.radix.lookup import HitPlan, Lookup
from sgl_vllm.radix.misses import Misses
from sgl_vllm.radix.node import HOLE, NO_MATCH, Match, Namespace, Node
from sgl_vllm.radix.passes import Passes
from sgl_vllm.radix.pins import Pins
from sgl_vllm.radix.pool import RadixBlockPool
from sgl_vllm.radix.prompt_logprobs import Rows, WantedRows
from sgl_vllm.radix.request_record import RequestRecord, is_first_admission
from sgl_vllm.radix.retention import Retention
from sgl_vllm.radix.snapshot import NO_CONTEXTS, Json, take_snapshot
from sgl_vllm.radix.stats import EvictionCounters, RadixCounters, gauges_of
from sgl_vllm.radix.tokens import TOKEN_BYTES, Tokens
from sgl_vllm.radix.tree import RadixTree
from sgl_vllm.speculation import NO_DRAFTING, Drafting
from sgl_vllm.step_hooks import StepHooks
from sgl_vllm.vllm_api.patching import adopt

logger = init_logger("vllm.sgl_vllm.radix")


class RadixKVCacheManager(AllocatingManager, StepHooks):
    """Added to a live manager by `adopt`."""

    passes: Passes
    policy: str
    misses: Misses
    first_scored: MutableMapping[Request, int]
    """The first prompt token whose score a request asks for. A hit ends before the token that
    precedes it, whose forward pass gives the score."""
    wanted_rows: MutableMapping[Request, WantedRows]
    """The log-probabilities that a request asks for of all its prompt tokens. A hit reaches as far
    as the tree has them."""
    _explaining: Guard
    """Errors in `misses`."""
    _ttl_s: float

    @classmethod
    def adopt(
        cls,
        manager: KVCacheManager,
        options: Options,
        *,
        max_copies: int | None = None,
        has_connector: bool = False,
        drafting: Drafting = NO_DRAFTING,
    ) -> RadixKVCacheManager:
        """Turn a freshly constructed stock manager into this one, in place.

        Args:
            max_copies: at most this many blocks are copied in a step, for hits that end inside
                them. Further hits are cut to whole blocks. The first such hit of a step is never
                cut, whatever the limit. None for no limit.
            has_connector: a KV connector looks blocks up by vLLM's hashes.
            drafting: what speculative decoding does to the cache.
        """
        groups = Groups(manager.coordinator.single_type_managers, manager.max_model_len)
        has_drafts = bool(groups.recurrent) and drafting.num_slots > 0
        if groups.recurrent:
            # A hit must end at a state, and there is none one token earlier. The drafter's KV of
            # the last token depends on the next one, so it may be wrong. At most, a draft is lost.
            drafting = replace(drafting, num_lookahead=0)
        manager = adopt(manager, cls)
        longest = groups.max_blocks(manager.max_model_len) + groups.num_groups
        longest += manager.watermark_blocks
        hash_blocks = has_connector or manager.enable_kv_cache_events
        manager.pool = RadixBlockPool.adopt(
            manager.block_pool, groups, options, hash_blocks=hash_blocks
        )
        if not has_connector:  # which would load tokens without their log-probabilities
            manager.pool.tree.logprobs.max_bytes = int(options.prompt_logprobs_mb * (1 << 20))
        num_blocks = manager.block_pool.num_gpu_blocks - 1
        # The longest request must fit beside the pins.
        pinned = min(int(num_blocks * options.radix_pin_share), num_blocks - longest)
        manager.pins.max_blocks, manager.pins.max_pins = max(0, pinned), options.radix_max_pins
        kept = int(num_blocks * options.radix_keep_share / groups.num_groups)
        manager.pool.tree.kept.max_blocks = kept
        manager.counters = RadixCounters()
        manager.policy = options.radix_policy
        manager.groups = groups
        manager.block_size = groups.block_size
        manager.passes = Passes(groups.block_size, has_drafts=has_drafts)
        manager.checkpoints = Checkpoints(manager.pool, manager.passes)
        manager.misses = Misses(
            groups.block_size, is_exact=options.tells_exactly, shows_text=options.tree_text
        )
        guard = manager._explaining = Guard(
            "explaining a cache miss", "the counters of misses may be wrong", logger
        )
        manager.first_scored = WeakKeyDictionary()
        manager.wanted_rows = WeakKeyDictionary()
        manager.retention = Retention(manager.pool, manager.counters, manager.passes)
        manager._ttl_s = options.radix_ttl_s
        manager.num_external = 0
        manager.lookup = Lookup(
            manager.pool,
            manager.misses,
            guard,
            drafting,
            manager.max_model_len,
            max_copies,
            manager.watermark_blocks,
        )
        return manager

    @property
    def tree(self) -> RadixTree | None:
        """None while it is off."""
        return None if self.is_off else self.pool.tree

    @property
    def is_off(self) -> bool:
        """Whether the tree is off: see `RadixBlockPool.off_reason`."""
        return self.pool.is_off

    @property
    def failed(self) -> bool:
        """Whether an error has switched the tree off."""
        return self.pool.failed

    @property
    def pins(self) -> Pins:
        return self.pool.pins

    def block_hasher(self, stock: BlockHasher) -> BlockHasher:
        """The hasher for the blocks of new requests, instead of vLLM's `stock` hasher."""
        if self.pool.hash_blocks:
            return stock
        hash_block_size = self.block_pool.hash_block_size
        return placeholder_hasher(stock, hash_block_size, lambda: not self.is_off)

    # -- called by vLLM -----------------------------------------------------------------------

    def new_step_starts(self) -> None:
        super().new_step_starts()
        self.retention.left.clear()
        self.lookup.step_starts()
        self.pool.step_starts()
        if self._ttl_s:
            self.pool.expire(self._ttl_s)

    def get_computed_blocks(
        self, request: Request, max_cache_hit_length: int | None = None
    ) -> tuple[KVCacheBlocks, int, int]:
        """The cached blocks of `request`, how many of its tokens they hold, and vLLM's
        `shared_prefix_boundary`, which is 0 while the tree is on.

        Args:
            max_cache_hit_length: at most this many tokens, given by vLLM from 0.33 on. At least one
                token always has to run, or there is nothing to sample from.
        """
        limit = request.num_tokens - 1
        if max_cache_hit_length is not None:
            limit = min(limit, max_cache_hit_length)
        if is_first_admission(request):
            # Forced output may follow the prompt already, and vLLM counts a first hit as prompt.
            limit = min(limit, request.num_prompt_tokens)
        unscored_limit = limit
        first_scored = self.first_scored.get(request)
        if first_scored is not None:
            limit = min(limit, first_scored - 1)
        num_prompt_tokens = request.num_prompt_tokens
        if not self.is_off and not self.prefix_cache_lookup_enabled(request):
            self.misses.not_looked_up(num_prompt_tokens, "skipped")
            return self.empty_kv_cache_blocks, 0, 0
        wanted_rows = self.wanted_rows.get(request)
        plan = self.pool.guarded(self.lookup.find, request, limit, unscored_limit, wanted_rows)
        if plan is not None and plan.num_tokens:
            return self._blocks_of(request, plan), plan.num_tokens, 0
        if not self.is_off or wanted_rows is not None:
            return self.empty_kv_cache_blocks, 0, 0
        self.misses.not_looked_up(num_prompt_tokens, "part_off")
        stock_limit = [] if max_cache_hit_length is None else [max_cache_hit_length]
        blocks, num_tokens, boundary = super().get_computed_blocks(request, *stock_limit)
        if num_tokens > limit:  # and a shorter hit needs other blocks of a window group
            shorter, num_tokens, _ = self.coordinator.find_longest_cache_hit(
                request.block_hashes, limit
            )
            blocks = self.create_kv_cache_blocks(shorter)
        return blocks, num_tokens, boundary

    def _blocks_of(self, request: Request, plan: HitPlan) -> KVCacheBlocks:
        all_blocks, null_block = self.block_pool.blocks, self.block_pool.null_block
        blocks: tuple[list[KVCacheBlock], ...] = ([all_blocks[i] for i in plan.block_ids],)
        if plan.others:
            blocks += tuple(
                [all_blocks[i] if i != HOLE else null_block for i in ids] for ids in plan.others
            )
            blocks = self.groups.in_vllms_order(blocks)
        if (
            self.enable_kv_cache_events
            and getattr(request, "kv_cache_report_mode", "incremental") == "full"
        ):
            self.pool.announce_hit(request, blocks, plan.num_tokens)
        return KVCacheBlocks(blocks)

    def record_prefix_cache_stats(self, request: Request, num_hits: int) -> None:
        """Called once for every request that is admitted. Here the tree is told of its hit, too."""
        super().record_prefix_cache_stats(request, num_hits)
        if not request.num_preemptions:
            self._explaining.run(
                self.misses.admitted,
                request.request_id,
                request.cache_salt or None,
                request.num_prompt_tokens,
                num_hits,
                self.num_external,
            )
        if not self.prefix_cache_lookup_enabled(request):
            return
        if not request.num_preemptions:
            self.counters.lookups += 1
            self.counters.prompt_tokens += request.num_prompt_tokens
            self.counters.hit_tokens += num_hits
            num_inside = num_hits % self.block_size
            self.counters.partial_block_hits += num_inside != 0
            self.counters.partial_block_hit_tokens += num_inside
            self.counters.whole_block_hit_tokens += num_hits - num_inside
        if num_hits:
            self.pool.guarded(self.lookup.record_hit, request)

    def estimate_cached_tokens(self, request: Request) -> int:
        """How many tokens `request` will have left in the cache, for vLLM's statistics."""
        if self.is_off:
            return super().estimate_cached_tokens(request)
        return self.pool.guarded(self.retention.num_shareable, request) or 0

    def reset_prefix_cache(self) -> bool:
        """Empty the cache, pinned prefixes too. False, and nothing is changed, if it is in use."""
        pins = self.pins.unpin_all()
        if super().reset_prefix_cache():
            return True
        self.pins.restore(pins)
        return False

    # -- hooks of the scheduler (`step_hooks.py`) ---------------------------------------------

    def before_schedule(self, prompts_done: Sequence[Request]) -> None:
        """Put these whole prompts into the tree, to the token. They are computed before the next
        forward pass begins."""
        for request in prompts_done:
            self.pool.guarded(self.retention.index, request, request.num_prompt_tokens)
        self.pool.index_scheduled()

    def after_schedule(self, output: SchedulerOutput) -> Iterable[tuple[Request, int]]:
        if self.passes.has_drafts:
            self.pool.guarded(self.passes.scheduled, output)
        return ()

    def before_update(
        self,
        scheduled: SchedulerOutput,
        sampled: ModelRunnerOutput,
        requests: Mapping[str, Request],
    ) -> None:
        if self.passes.has_drafts:
            self.pool.guarded(self.passes.sampled, scheduled, sampled)

    def cut_to_stop(self, request: Request, start: int, num_new_tokens: int) -> int:
        """How many of the tokens from `start` on the next pass computes: `num_new_tokens`, or fewer
        if the request stops to leave a checkpoint."""
        record = self.pool.records.lagging(request)
        if record is None or self.is_off:
            return num_new_tokens
        return self.checkpoints.cut_to_stop(record, start, num_new_tokens)

    def sections(self) -> Mapping[str, Any]:
        num_blocks, num_pinned = self.block_pool.num_gpu_blocks - 1, len(self.pins.block_ids)
        return {
            "radix": copy.copy(self.counters),
            "evictions": copy.copy(self.pool.counters),
            "cache": gauges_of(self.pool.tree, self.groups, num_blocks, num_pinned),
            "misses": copy.copy(self.misses.counters),
        }

    def renew(self) -> None:
        """Count, miss and evict as if nothing had been. The cache must be empty."""
        self.counters = self.retention.counters = RadixCounters()
        self.pool.counters = EvictionCounters()
        self.misses.forget()
        self.pool.tree.evictions.clear()

    # -- for other parts ----------------------------------------------------------------------

    def match(self, request: Request) -> Match:
        """The longest cached prefix of `request`, without side effects."""
        return self.pool.guarded(self.lookup.match, request) or NO_MATCH

    def hit_length(self, match: Match) -> int:
        """How many tokens of a current match a request can read, a drafter's look-ahead left
        aside: matches are compared by what is cached."""
        return self.pool.guarded(self.pool.tree.longest_hit, match, match.num_tokens) or 0

    def hit_lengths(self, namespace: Namespace, candidates: Sequence[Tokens]) -> list[int]:
        """How many tokens of each candidate a request that begins with it could read.

        Changes nothing: no age, count or order. What the step under way computes is not counted.
        """
        found = self.pool.guarded(self.lookup.hit_lengths, namespace, candidates)
        return found if found is not None else [0] * len(candidates)

    def hit_length_mid_step(self, request: Request) -> int:
        """How many tokens of `request` a lookup in the middle of a step would find, a
        drafter's look-ahead left aside. Of what this step computes, these are whole blocks only."""
        return self.pool.guarded(self.lookup.hit_length_mid_step, request) or 0

    def evict_last(self, wanted: Collection[Node]) -> None:
        """These nodes are evicted after all others, until the next call. The same object means the
        same nodes."""
        self.pool.wanted = wanted

    @property
    def keeps_logprobs(self) -> bool:
        """Whether log-probabilities of prompts are kept."""
        return not self.is_off and self.pool.tree.logprobs.max_bytes > 0

    def keep_logprobs(self, record: RequestRecord, rows: Rows) -> None:
        """Keep the log-probabilities of a request's whole prompt beside the tokens of it that are
        in the tree. The prompt is computed; the request may have ended since."""
        request, tree = record.request, self.pool.tree
        if not request.is_finished():
            self.retention.index(request, request.num_prompt_tokens)
        tokens = record.tokens[: TOKEN_BYTES * request.num_prompt_tokens]
        tree.logprobs.keep(tree.match_prefix(record.namespace, tokens), rows)

    def may_evict(self, num_requests: int, num_tokens: int) -> bool:
        """Whether something may have to be evicted to allocate `num_tokens` more for so many
        requests."""
        num_blocks = num_requests + num_tokens // self.block_size
        num_blocks *= self.groups.num_blocks_per_main_block
        return not self.is_off and self.pool.num_empty_blocks < num_blocks

    def snapshot(
        self,
        max_nodes: int,
        max_tokens: int,
        wanted: Collection[Node] = (),
        contexts: Mapping[Node, Json] = NO_CONTEXTS,
    ) -> Json:
        """The shape of the cache as JSON; empty if the tree is off. Of tenants with a `cache_salt`
        it has totals only, and never tokens. See `take_snapshot`."""
        if self._ttl_s:
            self.pool.expire(self._ttl_s)
        if self.is_off:
            return {}
        pinned = self.pins.block_ids
        return {
            "policy": self.policy,
            "total_blocks": self.block_pool.num_gpu_blocks - 1,
            "free_blocks": self.pool.num_empty_blocks,
            "num_pinned_blocks": len(pinned),
            **take_snapshot(
                self.pool.tree,
                max_nodes,
                is_isolated=is_salted,
                pinned=pinned,
                wanted=wanted,
                max_tokens=max_tokens,
                contexts=contexts,
            ),
        }
