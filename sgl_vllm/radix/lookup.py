"""What a request finds in the tree, and reads of it.

Owns the length of a hit, and the blocks that a request gets for it. Does not own the match
(`tree.py`), copies (`hit_copies.py`), nor why the rest of a prompt is missed (`misses.py`).

                 cached, full blocks    | partial |        to compute
    match    [0 ........................|.........|...)
    hit      [0 ........................|... hit) |
    blocks   |--shared--|--shared--|    |--copy---|--new--|--new--|

With several groups (`components/`), one block of each is copied, unless the hit ends where one of
its blocks does. A drafter's own KV of a token may depend on the next token (EAGLE), which another
request may not share. So a match of m tokens gives a hit of m - 1 there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sgl_vllm.degrade import Guard
from sgl_vllm.radix.checkpoints import stops_for
from sgl_vllm.radix.components.windows import HOLE
from sgl_vllm.radix.hit_copies import HitCopies, HitPlan
from sgl_vllm.radix.misses import Misses, not_read
from sgl_vllm.radix.node import NO_MATCH, Match, Namespace, holder_of
from sgl_vllm.radix.request_record import RequestRecord
from sgl_vllm.radix.tokens import Tokens
from sgl_vllm.speculation import Drafting

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from sgl_vllm.radix.pool import RadixBlockPool

NO_HIT = HitPlan(NO_MATCH, [], [])


@dataclass(eq=False)
class Lookup:
    """The lookups of one cache, while its tree is on.

    Args:
        explaining: records errors in `misses`, which must not cost the tree.
        max_model_len: tokens of the longest request.
    """

    _pool: RadixBlockPool
    _copies: HitCopies
    _misses: Misses
    _explaining: Guard
    drafting: Drafting
    _max_model_len: int

    def match(self, request: Request) -> Match:
        """The longest cached prefix of `request`."""
        return self._pool.match(self._pool.records.of(request))

    def record_hit(self, request: Request) -> None:
        """`request` is admitted with what it found last."""
        tree, record = self._pool.tree, self._pool.records.of(request)
        if record is not None:
            record.used = tree.record_hit(record.used, request.priority)
            tree.record_state_use(record.used, record.num_found)

    def hit_length(self, match: Match) -> int:
        """How many tokens of a current match a request can read."""
        return self._pool.tree.longest_hit(match, match.num_tokens)

    def hit_lengths(self, namespace: Namespace, candidates: Sequence[Tokens]) -> list[int]:
        """How many tokens of each candidate a request that begins with it could read."""
        tree, num_lookahead = self._pool.tree, self.drafting.num_lookahead
        matches = (tree.match_prefix(namespace, tokens) for tokens in candidates)
        return [tree.longest_hit(match, match.num_tokens - num_lookahead) for match in matches]

    def hit_length_mid_step(self, request: Request) -> int:
        """How many tokens of `request` a lookup in the middle of a step would find. Of what this
        step computes, these are whole blocks only."""
        match = self.match(request)
        num_tokens = self.hit_length(match)
        while num_tokens % self._pool.block_size:
            plan = self._plan(match, num_tokens)
            if self._pool.may_be_copied(num_tokens, plan.last_blocks):
                break
            num_tokens = self._next_shorter(match, num_tokens)
        return num_tokens

    def find(self, request: Request, limit: int, num_before_last: int) -> HitPlan | None:
        """What `request` reads, of at most `limit` tokens; None if it does not read the tree. The
        limit would be `num_before_last` if it asked for no scores."""
        record = self._pool.records.of(request)
        if record is None or record.namespace is None:
            self._misses.not_looked_up(request.num_prompt_tokens, "skipped")
            return None
        tree, match = self._pool.tree, self._pool.match(record)
        record.used, record.num_found = NO_MATCH, 0
        if self._pool.groups.recurrent:
            self._note_stops(record, match, limit)
        num_readable = min(match.num_tokens - self.drafting.num_lookahead, limit)
        plan = self._read(record, match, num_readable) if num_readable > 0 else NO_HIT
        missed = []
        if plan.num_tokens < match.num_tokens:
            cached, num_prompt_tokens = match.num_tokens, request.num_prompt_tokens
            ends = (
                (tree.longest_hit(match, num_readable), "whole_blocks"),
                (num_readable, "component"),
                (min(cached, limit), "drafter"),
                (min(cached, num_before_last), "scored"),
                (min(cached, num_prompt_tokens), "last_token"),
            )
            missed = not_read(plan.num_tokens, ends)
        try:  # an error here must not cost the tree
            self._misses.looked_up(
                missed, tree, record.namespace, record.tokens, match, request.num_prompt_tokens
            )
        except Exception:
            self._explaining.record()
        return plan

    def _read(self, record: RequestRecord, match: Match, limit: int) -> HitPlan:
        """What a request reads of at most `limit` tokens of a match, which is at least one."""
        request, size = record.request, self._pool.block_size
        num_tokens = num_with_room = self._pool.tree.longest_hit(match, limit)
        num_slots = min(request.num_tokens + self.drafting.num_slots, self._max_model_len)
        while True:
            plan = self._plan(match, num_tokens)
            if num_tokens % size == 0:
                break
            if self._copies.may_be_made(plan):
                if self._copies.have_room(num_slots, plan):
                    break
            elif num_with_room == num_tokens:
                num_with_room = 0  # room alone would not help
            num_tokens = self._next_shorter(match, num_tokens)
        if num_tokens < num_with_room:
            self._copies.note_lack_of_room(record, num_with_room - num_tokens)
        if num_tokens:
            # A node per length of prompt would be of no use: what `limit` leaves out is used, too.
            record.used = plan.holder if num_tokens < limit else match
            record.num_found = num_tokens
        return plan

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

    def _next_shorter(self, match: Match, num_tokens: int) -> int:
        """The longest hit of a match that may be read where one of `num_tokens`, which ends inside
        a block, may not: with states the one before it, else of whole blocks."""
        tree = self._pool.tree
        num_inside = num_tokens % tree.block_size if tree.states is None else 1
        return tree.longest_hit(match, num_tokens - num_inside)

    def _note_stops(self, record: RequestRecord, match: Match, limit: int) -> None:
        """Note where a request leaves checkpoints: where what is cached ends, and what other
        waiting requests share with it."""
        branches = (min(branch, limit) for branch in (match.num_tokens, *record.num_shared))
        record.stops = stops_for(branches, self._pool.tree.longest_hit(match, limit))
