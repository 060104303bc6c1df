"""vLLM's KV-cache manager, with the radix tree as its prefix cache.

Owns what a request's lookup finds, and which of its tokens are computed, so that other requests may
share them. Does not own allocating, copying and events, which stay vLLM's, nor the tree's agreement
with the blocks (`pool.py`), nor pins (`pins.py`). `RadixKVCacheManager.adopt` changes live vLLM
objects in place, so every reference to them stays valid.

A hit may end inside a block. vLLM then allocates one more block and copies the partial one into it
before the forward pass.

                 cached, full blocks    | partial |        to compute
    hit      [0 ........................|... hit) |
    blocks   |--shared--|--shared--|    |--copy---|--new--|--new--|
    indexed  when scheduled, for whole-block hits (as in vLLM)      the rest when computed

With several groups (`components/`), one block of each is copied, unless the hit ends where one of
its blocks does. In `allocate_slots`, vLLM frees superseded states and blocks that have left a
window, and may reuse them in the same call. So computed tokens enter the tree before that call.

With speculative decoding, the tree has accepted tokens only. A drafter's own KV of a token may
depend on the next token (EAGLE), which another request may not share. So a match of m tokens gives
a hit of m - 1 there.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple  # Any: arguments of vLLM's
from weakref import WeakKeyDictionary

from vllm.logger import init_logger
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.request import Request, RequestStatus

from sgl_vllm.degrade import Guard
from sgl_vllm.radix.block_hashes import BlockHasher, placeholder_hasher
from sgl_vllm.radix.checkpoints import Checkpoints, stops_for
from sgl_vllm.radix.components.state_order import Kind
from sgl_vllm.radix.components.states import States
from sgl_vllm.radix.components.windows import HOLE
from sgl_vllm.radix.eviction import POLICIES
from sgl_vllm.radix.groups import Groups
from sgl_vllm.radix.hit_copies import HitCopies, last_blocks
from sgl_vllm.radix.hit_events import announce_hit
from sgl_vllm.radix.keys import is_salted
from sgl_vllm.radix.misses import Cause, Missed, Misses, not_read
from sgl_vllm.radix.node import NO_MATCH, Match, Namespace, Node, holder_of
from sgl_vllm.radix.pins import Pins, max_pinned_blocks
from sgl_vllm.radix.pool import RadixBlockPool
from sgl_vllm.radix.request_record import RequestRecord, is_first_admission
from sgl_vllm.radix.snapshot import NO_CONTEXTS, CacheSnapshot, Json, take_snapshot
from sgl_vllm.radix.stats import RadixCounters, RadixGauges
from sgl_vllm.radix.tokens import Tokens
from sgl_vllm.radix.tree import RadixTree
from sgl_vllm.speculation import NO_DRAFTING, Drafting
from sgl_vllm.vllm_api.patching import adopt

logger = init_logger("vllm.sgl_vllm.radix")


class Left(NamedTuple):
    """An ended request whose tokens are in the tree."""

    record: RequestRecord
    ended_s: float


class RadixKVCacheManager(KVCacheManager):
    """Added to a live manager by `adopt`."""

    pool: RadixBlockPool
    """The same object as `block_pool`."""
    counters: RadixCounters
    policy: str
    groups: Groups
    block_size: int
    drafting: Drafting
    checkpoints: Checkpoints | None
    """None for a model without recurrent layers."""
    misses: Misses
    first_scored: MutableMapping[Request, int]
    """The first prompt token whose score a request asks for. A hit ends before the token that
    precedes it, whose forward pass gives the score."""
    left: list[Left]
    """The requests that have ended since the last step began, and left something in the tree."""
    _explaining: Guard
    """Errors in `misses`."""
    _ttl_s: float
    _copies: HitCopies
    _num_external: int  # tokens that a connector loads for the request that was allocated last

    @classmethod
    def adopt(
        cls,
        manager: KVCacheManager,
        *,
        policy: str = "lru",
        ttl_s: float = 0,
        pin_share: float = 0.25,
        max_pins: int = 1000,
        max_copies: int | None = None,
        max_evicted_bytes: int = 16 << 20,
        why_exact: bool = False,
        shows_text: bool = False,
        has_connector: bool = False,
        drafting: Drafting = NO_DRAFTING,
    ) -> RadixKVCacheManager:
        """Turn a freshly constructed stock manager into this one, in place.

        Args:
            policy: a name in `eviction.POLICIES`.
            ttl_s: evict what has not been used for this many seconds; 0 for never.
            pin_share: at most this share of the cache can be pinned.
            max_pins: at most this many pins at a time.
            max_copies: at most this many blocks are copied in a step, for hits that end inside
                them. Further hits are cut to whole blocks. The first such hit of a step is never
                cut, whatever the limit. None for no limit.
            max_evicted_bytes: host memory for remembering what was evicted.
            why_exact, shows_text: what explanations of misses tell (`Misses`).
            has_connector: a KV connector looks blocks up by vLLM's hashes.
            drafting: what speculative decoding does to the cache.
        """
        groups = Groups(manager.coordinator.single_type_managers)
        manager = adopt(manager, cls)
        longest = groups.max_blocks(manager.max_model_len) + groups.num_groups
        longest += manager.watermark_blocks
        manager.pool = RadixBlockPool.adopt(
            manager.block_pool,
            groups,
            POLICIES[policy],
            hash_blocks=has_connector or manager.enable_kv_cache_events,
            max_pinned_blocks=max_pinned_blocks(
                manager.block_pool.num_gpu_blocks - 1, pin_share, longest
            ),
            max_pins=max_pins,
            max_evicted_bytes=max_evicted_bytes,
        )
        manager.counters = RadixCounters()
        manager.policy = policy
        manager.groups = groups
        manager.block_size = groups.block_size
        manager.drafting = drafting
        manager.checkpoints = Checkpoints(manager.pool, groups) if groups.recurrent else None
        manager.misses = Misses(groups.block_size, is_exact=why_exact, shows_text=shows_text)
        manager._explaining = Guard(
            "explaining a cache miss", "the counters of misses may be wrong", logger
        )
        manager.first_scored = WeakKeyDictionary()
        manager.left = []
        manager._ttl_s = ttl_s
        manager._copies = HitCopies(manager.pool, groups, max_copies, manager.watermark_blocks)
        manager._num_external = 0
        return manager

    @property
    def tree(self) -> RadixTree | None:
        """None while it is off."""
        return self.pool.tree

    @property
    def is_off(self) -> bool:
        """Whether the tree is off: see `RadixBlockPool.off_reason`."""
        return self.pool.tree is None

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
        return placeholder_hasher(stock, hash_block_size, lambda: self.tree is not None)

    # -- lookup -------------------------------------------------------------------------------

    def new_step_starts(self) -> None:
        super().new_step_starts()
        self.left.clear()
        self._copies.step_starts()
        self.pool.step_starts()
        if self._ttl_s:
            self.pool.expire(self._ttl_s)

    def match(self, request: Request) -> Match:
        """The longest cached prefix of `request`, without side effects."""
        return self.pool.guarded(self._match, request) or NO_MATCH

    def _match(self, request: Request) -> Match:
        return self.pool.match(self.pool.records.of(request))

    def hit_length(self, match: Match) -> int:
        """How many tokens of a match a request can read. `match` is made since the last change."""
        return self.pool.guarded(self._hit_length, match) or 0

    def _hit_length(self, match: Match) -> int:
        assert self.tree is not None
        return self.tree.longest_hit(match, match.num_tokens)

    def hit_lengths(self, namespace: Namespace, candidates: Sequence[Tokens]) -> list[int]:
        """How many tokens of each candidate a request that begins with it could read.

        Changes nothing: no age, count or order. What the step under way computes is not counted.
        """
        found = self.pool.guarded(self._hit_lengths, namespace, candidates)
        return found if found is not None else [0] * len(candidates)

    def _hit_lengths(self, namespace: Namespace, candidates: Sequence[Tokens]) -> list[int]:
        tree = self.tree
        assert tree is not None
        matches = (tree.match_prefix(namespace, tokens) for tokens in candidates)
        num_lookahead = self.drafting.num_lookahead
        return [tree.longest_hit(m, m.num_tokens - num_lookahead) for m in matches]

    def hit_length_mid_step(self, request: Request) -> int:
        """How many tokens of `request` a lookup in the middle of a step would find. Of what this
        step computes, these are whole blocks only."""
        return self.pool.guarded(self._hit_length_mid_step, request) or 0

    def _hit_length_mid_step(self, request: Request) -> int:
        tree = self.tree
        assert tree is not None
        match = self._match(request)
        num_tokens = tree.longest_hit(match, match.num_tokens)
        while num_tokens % self.block_size:
            _, block_ids, others = self._blocks_of_hit(match, num_tokens)
            if self.pool.may_be_copied(num_tokens, last_blocks(block_ids, others)):
                break
            num_tokens = self._next_shorter_hit(match, num_tokens)
        return num_tokens

    def _next_shorter_hit(self, match: Match, num_tokens: int) -> int:
        """The longest hit of a match that may be read where one of `num_tokens`, which ends inside
        a block, may not: with states the one before it, else of whole blocks."""
        tree = self.tree
        assert tree is not None
        num_inside = num_tokens % self.block_size if tree.states is None else 1
        return tree.longest_hit(match, num_tokens - num_inside)

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
        num_before_last = limit
        first_scored = self.first_scored.get(request)
        if first_scored is not None:
            limit = min(limit, first_scored - 1)
        if self.pool.tree is None:
            self.misses.not_looked_up(request.num_prompt_tokens, "part_off")
            stock_limit = [] if max_cache_hit_length is None else [max_cache_hit_length]
            blocks, num_tokens, boundary = super().get_computed_blocks(request, *stock_limit)
            if num_tokens > limit:  # and a shorter hit needs other blocks of a window group
                shorter, num_tokens, _ = self.coordinator.find_longest_cache_hit(
                    request.block_hashes, limit
                )
                blocks = self.create_kv_cache_blocks(shorter)
            return blocks, num_tokens, boundary
        if not self.prefix_cache_lookup_enabled(request):
            self.misses.not_looked_up(request.num_prompt_tokens, "skipped")
            return self.empty_kv_cache_blocks, 0, 0
        found = self.pool.guarded(self._find, request, limit, num_before_last)
        if found is not None:
            return *found, 0
        if self.is_off:
            self.misses.not_looked_up(request.num_prompt_tokens, "part_off")
        return self.empty_kv_cache_blocks, 0, 0

    def _find(
        self, request: Request, limit: int, num_before_last: int
    ) -> tuple[KVCacheBlocks, int] | None:
        """The cached blocks of `request`, for at most `limit` tokens. The limit would be
        `num_before_last` if it asked for no scores."""
        tree, record = self.pool.tree, self.pool.records.of(request)
        if tree is None or record is None or record.namespace is None:
            self.misses.not_looked_up(request.num_prompt_tokens, "skipped")
            return None
        match = self.pool.match(record)
        if self.checkpoints is not None:
            self._note_stops(record, match, limit)
        num_readable = min(match.num_tokens - self.drafting.num_lookahead, limit)
        found = self._read(request, record, match, num_readable) if num_readable > 0 else None
        num_read = found[1] if found is not None else 0
        missed: list[Missed] = []
        if num_read < match.num_tokens:
            cached, num_prompt_tokens = match.num_tokens, request.num_prompt_tokens
            ends: tuple[tuple[int, Cause], ...] = (
                (tree.longest_hit(match, num_readable), "whole_blocks"),
                (num_readable, "component"),
                (min(cached, limit), "drafter"),
                (min(cached, num_before_last), "scored"),
                (min(cached, num_prompt_tokens), "last_token"),
            )
            missed = not_read(num_read, ends)
        try:  # an error here must not cost the tree
            self.misses.looked_up(
                missed, tree, record.namespace, record.tokens, match, request.num_prompt_tokens
            )
        except Exception:
            self._explaining.record()
        return found

    def _read(
        self, request: Request, record: RequestRecord, match: Match, limit: int
    ) -> tuple[KVCacheBlocks, int] | None:
        """The cached blocks of at most `limit` tokens of a match, which is at least one."""
        tree = self.pool.tree
        assert tree is not None
        num_tokens = tree.longest_hit(match, limit)
        num_slots = min(request.num_tokens + self.drafting.num_slots, self.max_model_len)
        num_with_room = num_tokens
        while True:
            holder, block_ids, others = self._blocks_of_hit(match, num_tokens)
            if num_tokens % self.block_size == 0:
                break
            if self._copies.may_be_made(num_tokens, block_ids, others):
                if self._copies.have_room(num_slots, num_tokens, block_ids, others):
                    break
            elif num_with_room == num_tokens:
                num_with_room = 0  # room alone would not help
            num_tokens = self._next_shorter_hit(match, num_tokens)
        if num_tokens < num_with_room:
            self._copies.note_lack_of_room(record, num_with_room - num_tokens)
        if not num_tokens:
            return None
        # A node per length of prompt would be of no use, so what `limit` leaves out counts as used.
        record.used = holder if num_tokens < limit else match
        record.num_found = num_tokens
        all_blocks = self.block_pool.blocks
        blocks: tuple[list[KVCacheBlock], ...] = ([all_blocks[i] for i in block_ids],)
        if others:
            null_block = self.block_pool.null_block
            blocks += tuple(
                [all_blocks[i] if i != HOLE else null_block for i in ids] for ids in others
            )
            blocks = self.groups.in_vllms_order(blocks)
        if (
            self.enable_kv_cache_events
            and getattr(request, "kv_cache_report_mode", "incremental") == "full"
        ):
            announce_hit(self.pool, request, blocks, num_tokens)
        return KVCacheBlocks(blocks), num_tokens

    def _note_stops(self, record: RequestRecord, match: Match, limit: int) -> None:
        """Note where a request leaves checkpoints: where what is cached ends, and what other
        waiting requests share with it."""
        tree = self.tree
        assert tree is not None
        branches = [match.num_tokens, *record.num_shared]
        num_hit = tree.longest_hit(match, limit)
        record.stops = stops_for((min(branch, limit) for branch in branches), num_hit)

    def _blocks_of_hit(
        self, match: Match, num_tokens: int
    ) -> tuple[Match, list[int], list[list[int]]]:
        """For a hit of `num_tokens` of a match: the tokens of the hit as a match of its own, its
        blocks of full attention, and those of each other group."""
        tree = self.tree
        assert tree is not None
        holder = match if num_tokens == match.num_tokens else holder_of(match, num_tokens)
        block_ids = tree.block_ids(holder, num_tokens)
        return holder, block_ids, self._other_group_blocks(holder, num_tokens)

    def _other_group_blocks(self, match: Match, num_tokens: int) -> list[list[int]]:
        """For each group but full attention the blocks of a hit, from number 0 on: `HOLE` for those
        that the hit does not need."""
        tree = self.tree
        if tree is None or self.groups.num_groups == 1:
            return []
        num_holes = -(-num_tokens // self.block_size) - 1
        others = tree.window_ids(match, num_tokens)
        others += [[HOLE] * num_holes + [i] for i in tree.state_ids(match, num_tokens)]
        return others

    def record_prefix_cache_stats(self, request: Request, num_hits: int) -> None:
        """Called once for every request that is admitted."""
        super().record_prefix_cache_stats(request, num_hits)
        if not request.num_preemptions:
            self._explaining.run(
                self.misses.admitted,
                request.request_id,
                request.cache_salt or None,
                request.num_prompt_tokens,
                num_hits,
                self._num_external,
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
            self.pool.guarded(self._record_hit, request)

    def _record_hit(self, request: Request) -> None:
        tree, record = self.pool.tree, self.pool.records.of(request)
        if tree is not None and record is not None:
            record.used = tree.record_hit(record.used, request.priority)
            tree.record_state_use(record.used, record.num_found)

    # -- insert -------------------------------------------------------------------------------

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        *args: Any,
        num_external_computed_tokens: int = 0,
        delay_cache_blocks: bool = False,
        has_scheduled_reqs: bool = True,
        **kwargs: Any,
    ) -> KVCacheBlocks | None:
        """Allocate as vLLM does, with this around it.

        A request that waits for room (`hit_copies.py`) gets none. Before: put computed blocks into
        the tree, because vLLM may free them in this call, and ask for a checkpoint if one is due.
        If there is no room with the checkpoint, allocate without it. After: count the copies of
        blocks, and note what a KV connector will load.
        """
        if self._copies.are_waited_for(request) and has_scheduled_reqs:
            return None
        leaves_checkpoint = False
        if self.groups.num_groups > 1:
            self.pool.guarded(self._index_before_blocks_go, request)
            if self.checkpoints is not None:
                leaves_checkpoint = bool(
                    self.pool.guarded(self._begin_checkpoint, request, num_new_tokens)
                )
        self.pool.first_computed = request.num_computed_tokens + num_new_computed_tokens
        blocks = super().allocate_slots(
            request,
            num_new_tokens,
            num_new_computed_tokens,
            *args,
            num_external_computed_tokens=num_external_computed_tokens,
            delay_cache_blocks=delay_cache_blocks,
            has_scheduled_reqs=has_scheduled_reqs,
            **kwargs,
        )
        if leaves_checkpoint and self.checkpoints is not None:
            if blocks is not None:
                self.pool.guarded(self.checkpoints.finish, request)
                self.counters.checkpoints += 1
            else:
                self.checkpoints.withdraw(request)
                blocks = super().allocate_slots(
                    request,
                    num_new_tokens,
                    num_new_computed_tokens,
                    *args,
                    num_external_computed_tokens=num_external_computed_tokens,
                    delay_cache_blocks=delay_cache_blocks,
                    has_scheduled_reqs=has_scheduled_reqs,
                    **kwargs,
                )
        self.pool.first_computed = None
        self._num_external = num_external_computed_tokens
        if blocks is None:
            return None
        if num_new_computed_tokens % self.block_size:
            self._copies.count()
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

    def index_prompt(self, request: Request) -> None:
        """Put the whole prompt of a running `request` into the tree, to the token. It must be
        computed before the next forward pass begins."""
        self.pool.guarded(self._index, request, request.num_prompt_tokens)

    def free(self, request: Request) -> None:
        self._leave(request)
        super().free(request)

    def pop_blocks_for_free(self, request: Request) -> list[KVCacheBlock]:
        self._leave(request)
        return super().pop_blocks_for_free(request)

    def _leave(self, request: Request) -> None:
        self.pool.guarded(self._retain, request)
        self.pool.discard_request(request)

    def _retain(self, request: Request) -> None:
        """Put what `request` has computed into the tree, before its blocks are released."""
        blocks = self.groups.full_blocks.get(request.request_id)
        if blocks and self.enable_caching:
            record = self.pool.records.of(request)
            num_scheduled = self.groups.num_cached_blocks.get(request.request_id, 0)
            num_sure = self.pool.loads.num_sure(request)
            if num_scheduled * self.block_size > num_sure:
                # It was taken out of the step that would have computed it, or its load has failed
                # or may fail yet. Only blocks of its own leave the tree, not those that it found.
                num_kept = max(num_sure, record.num_found if record else 0)
                end = num_scheduled * self.block_size
                uncertain = blocks[num_kept // self.block_size : num_scheduled]
                for each in (uncertain, *self.groups.window_blocks_of(request, num_kept, end)):
                    self.pool.unindex(each)
            num_tokens, states = self._num_to_index(request, record), None
            if self.groups.recurrent and record is not None:
                num_tokens, states = self._states_left(request, record, num_tokens)
            # After a failed load, vLLM may count blocks as computed that another request was to
            # load, which has failed too.
            if num_tokens > 0 and request.status != RequestStatus.FINISHED_ERROR:
                is_cached = self.pool.index(
                    request, blocks, num_tokens, is_last_use=True, states=states
                )
                tree = self.tree
                if states and num_tokens in states and tree is not None and tree.states is not None:
                    tree.states.mark(states[num_tokens][0], Kind.END)
                self.counters.retained_tails += is_cached and num_tokens % self.block_size != 0
                if is_cached and record is not None and request.is_finished():
                    self.left.append(Left(record, time.monotonic()))

    def _states_left(
        self, request: Request, record: RequestRecord, num_tokens: int
    ) -> tuple[int, States]:
        """The states that a request leaves behind when it releases its blocks, and how many tokens
        have to enter the tree with them.

        Passes in flight still advance the state, so the blocks will hold the one after their last
        token. It can be indexed only if all these tokens are known by now. Whatever reads it runs
        after these passes.
        """
        if request.num_computed_tokens <= request.num_tokens:
            num_tokens = request.num_computed_tokens
        else:
            num_tokens -= num_tokens % self.block_size
        return num_tokens, self.groups.states_of(request, record.num_with_states, num_tokens)

    def _index(self, request: Request, num_tokens: int, states: States | None = None) -> None:
        """Put the first tokens of a running request into the tree, if it still has its blocks."""
        if request.num_computed_tokens < num_tokens:
            return
        blocks = self.groups.full_blocks.get(request.request_id)
        if blocks and self.enable_caching:
            self.pool.index(request, blocks, num_tokens, states=states)

    def _index_before_blocks_go(self, request: Request) -> None:
        """Put the whole blocks, of any group, that a running request has computed into the tree,
        and its states after them, unless they have been there."""
        record = self.pool.records.known(request)
        if record is None:
            return
        num_tokens = self._num_to_index(request, record)
        if not self.groups.recurrent:
            num_tokens -= num_tokens % self.groups.common_block_size
            if num_tokens > record.num_indexed:
                self._index(request, num_tokens)
            return
        num_tokens -= num_tokens % self.block_size
        if num_tokens > record.num_with_states:
            states = self.groups.states_of(request, record.num_with_states, num_tokens)
            self._index(request, num_tokens, states)
            record.num_with_states = num_tokens

    def _begin_checkpoint(self, request: Request, num_new_tokens: int) -> bool:
        record = self.pool.records.known(request)
        if self.checkpoints is None or record is None:
            return False
        return self.checkpoints.begin(request, record, num_new_tokens)

    def cut_to_stop(self, request: Request, start: int, num_new_tokens: int) -> int:
        """How many of the tokens from `start` on the next pass computes: `num_new_tokens`, or fewer
        if the request stops to leave a checkpoint."""
        record = self.pool.records.known(request)
        if self.checkpoints is None or record is None or self.tree is None:
            return num_new_tokens
        return self.checkpoints.cut_to_stop(record, start, num_new_tokens)

    def _num_to_index(self, request: Request, record: RequestRecord | None) -> int:
        """How many of the request's tokens other requests may share.

        Tokens of a step in flight are not computed yet, and placeholders are no tokens. vLLM counts
        tokens as computed that a connector may still be loading. Of those, only the blocks that
        vLLM has cached itself are there. Tokens past the loaded ones are computed from them.
        """
        # A preempted request has no computed tokens, but may still have tokens in flight.
        num_computed = max(0, request.num_computed_tokens - request.num_in_flight_tokens)
        num_tokens = min(num_computed, request.num_tokens, self.pool.loads.num_sure(request))
        if record is not None and 0 < num_tokens <= record.num_loaded:
            num_cached = self.groups.num_cached_blocks.get(request.request_id, 0)
            num_tokens = min(num_tokens, num_cached * self.block_size)
        return num_tokens

    def estimate_cached_tokens(self, request: Request) -> int:
        """How many tokens `request` will have left in the cache, for vLLM's statistics."""
        if self.tree is None:
            return super().estimate_cached_tokens(request)
        return self.pool.guarded(self._estimate_cached_tokens, request) or 0

    def _estimate_cached_tokens(self, request: Request) -> int:
        record = self.pool.records.of(request)
        return 0 if record is None else self._num_to_index(request, record)

    def evict_last(self, wanted: Collection[Node]) -> None:
        """These nodes are evicted after all others, until the next call. The same object means the
        same nodes."""
        self.pool.wanted = wanted

    def may_evict(self, num_requests: int, num_tokens: int) -> bool:
        """Whether something may have to be evicted to allocate `num_tokens` more for so many
        requests."""
        num_blocks = num_requests + num_tokens // self.block_size
        num_blocks *= self.groups.num_blocks_per_full_block
        return not self.is_off and self.pool.num_empty_blocks < num_blocks

    def reset_prefix_cache(self) -> bool:
        """Empty the cache, pinned prefixes too. False, and nothing is changed, if it is in use."""
        pins = self.pins.unpin_all()
        if super().reset_prefix_cache():
            return True
        self.pins.restore(pins)
        return False

    def forget_misses(self) -> None:
        """Forget what was missed and evicted. The cache must be empty."""
        self.misses.forget()
        if self.tree is not None and self.tree.evictions is not None:
            self.tree.evictions.clear()

    # -- views --------------------------------------------------------------------------------

    @property
    def gauges(self) -> RadixGauges:
        tree = self.tree
        return RadixGauges(
            tree_nodes=tree.num_nodes if tree is not None else 0,
            tree_tokens=tree.num_tokens if tree is not None else 0,
            tree_blocks=tree.num_blocks if tree is not None else 0,
            tree_states=tree.num_states if tree is not None else 0,
            cache_tokens=self.groups.tokens_in(self.block_pool.num_gpu_blocks - 1),
            occupied_tokens=self.groups.tokens_in(tree.num_blocks if tree is not None else 0),
            protected_tokens=self.groups.tokens_in(
                tree.num_locked_blocks if tree is not None else 0
            ),
            pinned_tokens=self.groups.tokens_in(len(self.pins.block_ids)),
            block_size=self.block_size,
        )

    def snapshot(
        self,
        max_nodes: int,
        max_tokens: int,
        wanted: Collection[Node] = (),
        contexts: Mapping[Node, Json] = NO_CONTEXTS,
    ) -> CacheSnapshot | None:
        """The shape of the cache; None if the tree is off. Of tenants with a `cache_salt` it has
        totals only, and never tokens. See `take_snapshot`."""
        if self._ttl_s:
            self.pool.expire(self._ttl_s)
        if self.tree is None:
            return None
        pinned = self.pins.block_ids
        return CacheSnapshot(
            policy=self.policy,
            total_blocks=self.block_pool.num_gpu_blocks - 1,
            free_blocks=self.pool.num_empty_blocks,
            num_pinned_blocks=len(pinned),
            tree=take_snapshot(
                self.tree,
                max_nodes,
                is_isolated=is_salted,
                pinned=pinned,
                wanted=wanted,
                max_tokens=max_tokens,
                contexts=contexts,
            ),
        )
