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

from collections.abc import Callable, Sequence
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

    def find(self, request: Request, limit: int, unscored_limit: int) -> HitPlan | None:
        """What `request` reads, of at most `limit` tokens; None if it does not read the tree. The
        limit would be `unscored_limit` if it asked for no scores."""
        record = self._pool.records.of(request)
        if record is None:
            self._misses.not_looked_up(request.num_prompt_tokens, "skipped")
            return None
        match = self._pool.match(record)
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
        request, copies = record.request, self._copies
        num_slots = min(request.num_tokens + self.drafting.num_slots, self._max_model_len)
        first = self._plan(match, longest)
        plan = self._shortened(
            first, match, lambda one: copies.may_be_made(one) and copies.have_room(num_slots, one)
        )
        if plan is not first and copies.may_be_made(first):  # so it lacks only room
            copies.note_lack_of_room(record, longest - plan.num_tokens)
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
