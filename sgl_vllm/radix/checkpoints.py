"""Copies of a running request's recurrent state, kept for other requests.

Owns where such a copy, a *checkpoint*, is made, and having vLLM make it. Does not own states that
requests leave behind anyway, at the end of a block or at their own end (`retention.py`), nor
what becomes of a state in the tree (`components/states.py`).

A recurrent layer overwrites its state with every token. So a request that finds 900 cached tokens
of its prompt, but a state after 400 of them only, computes 500 tokens again, and so would the next.
It *stops* at the branch, the end of its match, and leaves a copy of its state there:

    cached        |---------------S-------------------|---- another prompt
    prompt        |-- hit, 400 ---|== computed, 500 ==|== the rest ==
                                                      ^ a checkpoint; up to two more passes

It also stops where prompts of waiting requests branch off its own, so that they can go on from
there:

    prompt        |============= examples =============|== question ==|== answer A ==
    waiting       |============= examples =============|== question ==|== answer B ==
    waiting       |============= examples =============|== another question ==
                                                       ^ checkpoints  ^

It also leaves one at the end of its prompt, where a pass ends anyway, if there are empty blocks for
it, or if requests are known to go on from such states (`components/state_order.py`). Conversations
whose template drops a part of the last answer do.

The copy is one that vLLM makes for its own prefix cache (`MambaManager.allocate_new_blocks`): it
takes a block of each recurrent group, and both endpoints stay allocated until it is done.

Idea: Marconi (Pan et al., arXiv 2411.19379) keeps states where prefixes branch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sgl_vllm.radix.components.state_order import Kind
from sgl_vllm.radix.passes import Passes
from sgl_vllm.radix.request_record import RequestRecord

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from sgl_vllm.radix.pool import RadixBlockPool

MIN_GAIN = 32
"""Tokens that later requests save by a checkpoint at a branch, at least, all those together that
are known to wait. It costs up to two more passes once: one ends at the branch, and vLLM ends one at
the next block."""


def stops_for(branches: Iterable[int], num_hit: int) -> tuple[int, ...]:
    """Where a request leaves checkpoints, in ascending order.

    Args:
        branches: for each request that could go on from there, known or expected, how many tokens
            it shares with this one.
        num_hit: after how many tokens this request begins.
    """
    in_order = sorted(branches)
    stops: list[int] = []
    last = num_hit
    for i, branch in enumerate(in_order):
        if (branch - last) * (len(in_order) - i) >= MIN_GAIN:
            stops.append(branch)
            last = branch
    return tuple(stops)


@dataclass(eq=False)
class Checkpoints:
    """The checkpoints of one cache.

    Args:
        pool: the blocks, and the tree over them.
    """

    _pool: RadixBlockPool
    _passes: Passes

    def __post_init__(self) -> None:
        self._groups = self._pool.groups

    @staticmethod
    def cut_to_stop(record: RequestRecord, start: int, num_new_tokens: int) -> int:
        """The length of the pass of `num_new_tokens` from `start` on, shortened to end at the first
        stop inside it."""
        end = start + num_new_tokens
        return min((stop for stop in record.stops if start < stop < end), default=end) - start

    def begin(self, request: Request, num_new_tokens: int) -> bool:
        """Ask vLLM for a checkpoint of what a running request has computed, when it next allocates
        blocks for it, if there is reason and room for one. Returns whether it was requested."""
        record, position = self._pool.records.lagging(request), request.num_computed_tokens
        if record is None or not self._groups.recurrent:
            return False
        is_stop = position in record.stops
        if not is_stop and position != request.num_prompt_tokens:
            return False
        tree, groups = self._pool.tree, self._groups
        number, num_inside = divmod(position, groups.block_size)
        block_ids = groups.state_at(request, position) if num_inside else None
        if block_ids is None or tree.states is None:
            return False  # at the end of a block the state stays there by itself
        if self._passes.state_end(request) != position:
            return False
        num_needed = num_new_tokens // groups.block_size + 1
        num_needed *= groups.num_blocks_per_main_block
        num_needed += len(groups.recurrent)
        num_free = self._pool.get_num_free_blocks()
        if num_free < num_needed:
            return False
        is_full = num_free - tree.num_evictable_blocks < num_needed
        if not is_stop and is_full and not tree.states.is_worth_a_state(Kind.PROMPT):
            return False
        for manager, block_id in zip(groups.recurrent, block_ids, strict=True):
            source = number, self._pool.blocks[block_id]
            manager._partial_hit_reqs[request.request_id] = source
        return True

    def withdraw(self, request: Request) -> None:
        """Undo `begin`: there are no blocks for it."""
        for manager in self._groups.recurrent:
            manager._partial_hit_reqs.pop(request.request_id, None)

    def finish(self, request: Request) -> None:
        """Put the checkpoint that `begin` has asked for, and vLLM will make before the next pass,
        into the tree."""
        position = request.num_computed_tokens
        number = (position - 1) // self._groups.block_size
        copies = []
        for manager in self._groups.recurrent:
            source = manager.req_to_blocks[request.request_id][number]
            copies += [copy for block, copy in manager._pending_cow_copies if block is source]
        blocks = self._groups.main_blocks[request.request_id]
        block_ids = [block.block_id for block in copies]
        self._pool.index(request, blocks, position, states={position: block_ids})
        self._pool.mark_computed_in_this_step(block_ids)
        record = self._pool.records.lagging(request)
        is_stop = record is not None and position in record.stops
        self._pool.tree.mark_state(block_ids[0], Kind.BRANCH if is_stop else Kind.PROMPT)
