"""What a request finds in the tree, and how much of it the request reads.

Owns the length of a hit, the blocks that a request gets for it, whether the last one may be copied,
and which requests wait for room. Does not own the match (`tree.py`), nor why the rest of a prompt
is missed (`misses.py`).

                 cached, full blocks    | partial |        to compute
    match    [0 ........................|.........|...)
    hit      [0 ........................|... hit) |
    blocks   |--shared--|--shared--|    |--copy---|--new--|--new--|

With several groups (`components/`), one block of each is copied, unless the hit ends where one of
its blocks does. vLLM makes the copy: if a hit ends inside a block,
`SingleTypeKVCacheManager.add_local_computed_blocks` notes that block, `_apply_cow` puts a new one
in its place, and `take_kv_cache_block_copies` has the worker copy it.

A request that copies holds both blocks of each group for a while, so it takes more blocks than one
without a hit. If these are not free, a hit of whole blocks loses less than a block. With recurrent
layers, or after an eviction from windows, the next shorter hit may be far shorter. Then the request
waits while others run, which give blocks back:

    cached        |----------------- 1,000 tokens ------------------|
    no room       |== computed again, if it does not wait a little ==|== 20 ==

A drafter's own KV of a token may depend on the next token (EAGLE), which another request may not
share. So a match of m tokens gives a hit of m - 1 there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from sgl_vllm.degrade import Guard
from sgl_vllm.radix.checkpoints import MIN_GAIN, stops_for
from sgl_vllm.radix.misses import Misses, not_read
from sgl_vllm.radix.node import HOLE, NO_MATCH, Match, Namespace, holder_of
from sgl_vllm.radix.prompt_logprobs import WantedRows
from sgl_vllm.radix.request_record import RequestRecord
from sgl_vllm.radix.tokens import Tokens
from sgl_vllm.speculation import Drafting

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

    from sgl_vllm.radix.pool import RadixBlockPool

MAX_COPY_BYTES = 64 << 20
"""KV cache of a worker that is copied in one step, for hits that end inside a block. vLLM may need
as much memory again while it copies."""

MAX_STEPS_FOR_ROOM = 32
"""Steps that a request waits for room at most. It never waits longer than one step for every
`MIN_GAIN` tokens that it would compute again."""


def max_copies(config: KVCacheConfig) -> int | None:
    """The copies of blocks that stay within `MAX_COPY_BYTES`; None if blocks have no memory."""
    # There is a tensor for each shape of layers; `size` is that of the allocation they all share.
    num_bytes = max((tensor.size for tensor in config.kv_cache_tensors), default=0)
    return max(1, MAX_COPY_BYTES * config.num_blocks // num_bytes) if num_bytes else None


class HitPlan(NamedTuple):
    """What a request reads of its match.

    Attributes:
        holder: the tokens of the hit, as a match of their own.
        block_ids: its blocks of full attention; `HOLE` for each if there is none.
        others: for each other group its blocks from number 0 on, `HOLE` for those that the hit does
            not need.
    """

    holder: Match
    block_ids: list[int]
    others: list[list[int]]

    @property
    def num_tokens(self) -> int:
        return self.holder.num_tokens

    @property
    def last_blocks(self) -> list[int]:
        """The blocks that are copied if it ends inside a block."""
        return [ids[-1] for ids in (self.block_ids, *self.others)]


NO_HIT = HitPlan(NO_MATCH, [], [])


@dataclass(eq=False)
class Lookup:
    """The lookups of one cache, while its tree is on.

    Args:
        explaining: records errors in `misses`, which must not cost the tree.
        max_model_len: tokens of the longest request.
        max_copies: at most this many blocks are copied in a step, but for its first hit. None for
            no limit.
        num_reserved: blocks that no admission may take.
    """

    _pool: RadixBlockPool
    _misses: Misses
    _explaining: Guard
    drafting: Drafting
    _max_model_len: int
    _max_copies: int | None
    _num_reserved: int
    _num_copies: int = 0  # in this step
    _waiting: Request | None = None
    """The last request of this step that waits for room."""

    def step_starts(self) -> None:
        self._num_copies = 0
        self._waiting = None

    def note_copied(self) -> None:
        """A request was admitted with a hit that ends inside a block."""
        self._num_copies += self._pool.groups.num_groups

    def match(self, request: Request) -> Match:
        """The longest cached prefix of `request`."""
        return self._pool.match(self._pool.records.of(request))

    def record_hit(self, request: Request) -> None:
        """`request` is admitted with what it found last."""
        tree, record = self._pool.tree, self._pool.records.of(request)
        if record is not None:
            record.used = tree.record_hit(record.used, request.priority)
            tree.record_state_use(record.used, record.num_found)

    def hit_lengths(self, namespace: Namespace, candidates: Sequence[Tokens]) -> list[int]:
        """See `RadixKVCacheManager.hit_lengths`."""
        tree, num_lookahead = self._pool.tree, self.drafting.num_lookahead
        matches = (tree.match_prefix(namespace, tokens) for tokens in candidates)
        return [tree.longest_hit(match, match.num_tokens - num_lookahead) for match in matches]

    def hit_length_mid_step(self, request: Request) -> int:
        """See `RadixKVCacheManager.hit_length_mid_step`."""
        match, pool = self.match(request), self._pool
        num_tokens = pool.tree.longest_hit(match, match.num_tokens)
        if num_tokens % pool.block_size == 0:
            return num_tokens
        plan = self._plan(match, num_tokens)
        return self._shortened(
            plan, match, lambda plan: pool.may_be_copied(plan.num_tokens, plan.last_blocks)
        ).num_tokens

    def find(
        self,
        request: Request,
        limit: int,
        unscored_limit: int,
        wanted_rows: WantedRows | None = None,
    ) -> HitPlan | None:
        """What `request` reads, of at most `limit` tokens; None if it does not read the tree. The
        limit would be `unscored_limit` if it asked for no scores. With `wanted_rows`, it reads only
        tokens whose log-probabilities are kept."""
        record = self._pool.records.of(request)
        if record is None:
            self._misses.not_looked_up(request.num_prompt_tokens, "skipped")
            return None
        match = self._pool.match(record)
        if wanted_rows is not None:
            found = self._pool.tree.logprobs.find(match, wanted_rows.top_k)
            limit = min(limit, wanted_rows.limit_hit(found, request.num_prompt_tokens))
        num_readable = min(match.num_tokens - self.drafting.num_lookahead, limit)
        longest = self._pool.tree.longest_hit(match, num_readable)
        if self._pool.groups.recurrent:
            # It leaves checkpoints where what is cached ends, and where other prompts branch off.
            branches = (min(branch, limit) for branch in (match.num_tokens, *record.num_shared))
            record.stops = stops_for(branches, longest)
        plan = self._read(record, match, num_readable, longest)
        num_prompt_tokens = request.num_prompt_tokens
        missed = []
        if plan.num_tokens < match.num_tokens:
            # From the tightest limit to the widest: each is the cause of what the next would add.
            limits = (
                (longest, "whole_blocks"),
                (num_readable, "component"),
                (limit, "drafter"),
                (unscored_limit, "scored"),
                (num_prompt_tokens, "last_token"),
            )
            ends = ((min(match.num_tokens, end), cause) for end, cause in limits)
            missed = not_read(plan.num_tokens, ends)
        self._explaining.run(
            self._misses.looked_up,
            missed,
            self._pool.tree,
            record.namespace,
            record.tokens,
            match,
            num_prompt_tokens,
        )
        return plan

    def _read(
        self, record: RequestRecord, match: Match, num_readable: int, longest: int
    ) -> HitPlan:
        """What a request reads of a match: its `longest` hit of at most `num_readable` tokens, or a
        shorter one if that needs a copy of blocks which cannot be made."""
        num_slots = min(record.request.num_tokens + self.drafting.num_slots, self._max_model_len)
        first = self._plan(match, longest)
        plan = self._shortened(
            first, match, lambda one: self._may_be_copied(one) and self._has_room(num_slots, one)
        )
        if plan is not first and self._may_be_copied(first):  # so it lacks only room
            self._note_lack_of_room(record, longest - plan.num_tokens)
        # If only its limit or the drafter cut the hit, the whole match counts as used, so that no
        # node is split there.
        record.used = match if 0 < plan.num_tokens == num_readable else plan.holder
        record.num_found = plan.num_tokens
        return plan

    def _shortened(
        self, plan: HitPlan, match: Match, may_be_read: Callable[[HitPlan], bool]
    ) -> HitPlan:
        """The longest hit of a match, from that of `plan` on, which ends with a block or may be
        read inside one. With states, the next shorter one is at the state before; else it is one of
        whole blocks."""
        tree = self._pool.tree
        while (num_inside := plan.num_tokens % tree.block_size) and not may_be_read(plan):
            num_less = num_inside if tree.states is None else 1
            plan = self._plan(match, tree.longest_hit(match, plan.num_tokens - num_less))
        return plan

    def _may_be_copied(self, plan: HitPlan) -> bool:
        """Whether the last blocks of the hit may be copied, apart from the room that this takes."""
        num_copies = self._num_copies + self._pool.groups.num_groups
        if self._num_copies and self._max_copies is not None and num_copies > self._max_copies:
            return False
        return self._pool.may_be_copied(plan.num_tokens, plan.last_blocks)

    def _has_room(self, num_slots: int, plan: HitPlan) -> bool:
        """Whether a request of `num_slots` tokens fits while it also holds the blocks that it
        copies from.

        Without this check, a request that needs every block of the cache is never admitted.
        """
        groups = self._pool.groups
        num_needed = groups.max_blocks(num_slots, plan.num_tokens) + groups.num_groups
        num_missing = num_needed + self._num_reserved - self._pool.get_num_free_blocks()
        of_hit = (i for ids in (plan.block_ids, *plan.others) for i in ids if i != HOLE)
        return num_missing <= 0 or num_missing <= sum(
            self._pool.blocks[block_id].ref_cnt > 0 for block_id in of_hit
        )

    def _note_lack_of_room(self, record: RequestRecord, num_lost: int) -> None:
        """The last lookup of a request found `num_lost` tokens less than are cached, for lack of
        room. What is lost of a block is not worth a wait."""
        num_steps = min(num_lost // MIN_GAIN, MAX_STEPS_FOR_ROOM)
        if num_lost >= self._pool.block_size and record.num_waits_for_room < num_steps:
            record.num_waits_for_room += 1
            self._waiting = record.request

    def is_waiting(self, request: Request) -> bool:
        """Whether `request`, which was looked up last, waits for room as long as others run."""
        return self._waiting is request

    def _plan(self, match: Match, num_tokens: int) -> HitPlan:
        """For a hit of `num_tokens` of a match."""
        if not num_tokens:
            return NO_HIT
        tree = self._pool.tree
        holder = match if num_tokens == match.num_tokens else holder_of(match, num_tokens)
        others: list[list[int]] = []
        if tree.components:
            num_holes = -(-num_tokens // tree.block_size) - 1
            others = tree.window_ids(holder, num_tokens)
            others += [[HOLE] * num_holes + [i] for i in tree.state_ids(holder, num_tokens)]
        return HitPlan(holder, tree.block_ids(holder, num_tokens), others)
