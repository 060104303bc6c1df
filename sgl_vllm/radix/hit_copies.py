"""Copies of blocks in which hits end, so that a request can write behind what it shares.

Owns which hits may end inside a block: how much is copied in a step, whether there is room, and
which requests wait for room. Does not own the copying, which is vLLM's:
of a hit that ends inside a block, `SingleTypeKVCacheManager.add_local_computed_blocks` notes that
block, `_apply_cow` puts a new one in its place, and `take_kv_cache_block_copies` has the worker
copy it.

A request that copies holds both blocks of each group for a while, so it takes more blocks than one
without a hit. If these are not free, a hit of whole blocks loses less than a block. With recurrent
layers, or after an eviction from windows, the next shorter hit may be far shorter. Then the request
waits while others run, which give blocks back:

    cached        |----------------- 1,000 tokens ------------------|
    no room       |== computed again, if it does not wait a little ==|== 20 ==
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, NamedTuple

from sgl_vllm.radix.checkpoints import MIN_GAIN
from sgl_vllm.radix.components.windows import HOLE
from sgl_vllm.radix.groups import Groups
from sgl_vllm.radix.node import Match
from sgl_vllm.radix.request_record import RequestRecord

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
        block_ids: its blocks of full attention.
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


class HitCopies:
    """The copies of one cache.

    Args:
        pool: the blocks, and the tree over them.
        groups: the KV-cache groups, of each of which a hit inside a block copies one.
        max_copies: at most this many blocks in a step, but for its first such hit. None for no
            limit.
        num_reserved: blocks that no admission may take.
    """

    def __init__(
        self, pool: RadixBlockPool, groups: Groups, max_copies: int | None, num_reserved: int
    ) -> None:
        self._pool = pool
        self._groups = groups
        self._max_copies = sys.maxsize if max_copies is None else max_copies
        self._num_reserved = num_reserved
        self._num_copies = 0  # in this step
        self._waiting: Request | None = None
        """The last request of this step that waits for room."""

    def step_starts(self) -> None:
        self._num_copies = 0
        self._waiting = None

    def note_copied(self) -> None:
        """A request was admitted with a hit that ends inside a block."""
        self._num_copies += self._groups.num_groups

    def may_be_made(self, plan: HitPlan) -> bool:
        """Whether the hit may end inside its last blocks, if there is room."""
        if self._num_copies and self._num_copies + self._groups.num_groups > self._max_copies:
            return False
        return self._pool.may_be_copied(plan.num_tokens, plan.last_blocks)

    def have_room(self, num_slots: int, plan: HitPlan) -> bool:
        """Whether a request of `num_slots` tokens fits while it also holds the blocks that it
        copies from.

        Without this check, a request that needs every block of the cache is never admitted.
        """
        num_needed = self._groups.max_blocks(num_slots, plan.num_tokens) + self._groups.num_groups
        num_needed += self._num_reserved
        num_free = self._pool.get_num_free_blocks()
        if num_needed <= num_free:
            return True
        of_hit = (i for ids in (plan.block_ids, *plan.others) for i in ids if i != HOLE)
        num_in_use = sum(self._pool.blocks[block_id].ref_cnt > 0 for block_id in of_hit)
        return num_needed <= num_free + num_in_use

    def note_lack_of_room(self, record: RequestRecord, num_lost: int) -> None:
        """The last lookup of a request found `num_lost` tokens less than are cached, for lack of
        room. What is lost of a block is not worth a wait."""
        num_steps = min(num_lost // MIN_GAIN, MAX_STEPS_FOR_ROOM)
        if num_lost >= self._groups.block_size and record.num_waits_for_room < num_steps:
            record.num_waits_for_room += 1
            self._waiting = record.request

    def is_waiting(self, request: Request) -> bool:
        """Whether `request`, which was looked up last, waits for room as long as others run."""
        return self._waiting is request
