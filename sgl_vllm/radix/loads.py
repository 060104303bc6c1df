"""KV that a connector loads within a pass, until it is known whether the load has succeeded.

Owns which requests have such a load in flight, and what of their blocks may not be used before its
outcome is known. Does not own the load, nor loads over several passes: vLLM caches the blocks of
those only when they are there.

vLLM caches the blocks of a load when it schedules the pass that loads them. Requests that share
these blocks are found by vLLM if the load fails, by their block ids. A copy of a block has another
id, so nothing is copied until the pass has reported.

                 cached | loaded in this pass | computed in it
    request     [0 ... begin) ............... ) .......... end)
                 sure   |-- in doubt until the pass reports --|

After a failure, vLLM resets `num_computed_tokens` of the request to the end of what is valid, so a
count below `end` shows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from sgl_vllm.radix.groups import Groups

if TYPE_CHECKING:
    from vllm.v1.request import Request


@dataclass(frozen=True, slots=True)
class Load:
    """A request whose KV of the tokens `[begin, end)` is loaded, or computed from loaded KV, in one
    pass. It may also share a load of another request, from `begin` on."""

    request: Request
    begin: int
    end: int

    @property
    def has_failed(self) -> bool:
        """Whether vLLM has taken computed tokens back. Meaningless in the step that schedules the
        pass."""
        return self.request.num_computed_tokens < self.end

    @property
    def has_succeeded(self) -> bool:
        """Whether its pass has reported, and no failure."""
        request = self.request
        return request.num_computed_tokens - request.num_in_flight_tokens >= self.end


class Lost(NamedTuple):
    """What a failed load leaves invalid.

    Attributes:
        begin: the KV of `request` is invalid from this token on.
        is_sharer: another request's load has failed. vLLM does not always compute what a sharer
            has computed from it again.
    """

    request: Request
    begin: int
    is_sharer: bool


@dataclass(eq=False)
class Loads:
    """The loads in flight of one cache, and the requests that share their blocks.

    Args:
        groups: the KV-cache groups of the model.
    """

    _groups: Groups
    _loads: dict[str, Load] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self._loads)

    def num_sure(self, request: Request) -> int:
        """How many of the tokens that vLLM counts as computed depend on no load in doubt."""
        load = self._loads.get(request.request_id)
        if load is None or load.has_succeeded:
            return request.num_computed_tokens
        return min(load.begin, request.num_computed_tokens)

    def scheduled(self, request: Request, num_hit: int, num_loaded: int, end: int) -> None:
        """A request has got its blocks for a pass that loads `num_loaded` tokens after a hit of
        `num_hit`, and computes the rest up to `end`."""
        begin = self._first_shared(request, num_hit)
        if num_loaded or begin < num_hit:
            self._loads[request.request_id] = Load(request, begin, end)

    def discard(self, request: Request) -> None:
        """Forget a request, whether it is known or not."""
        self._loads.pop(request.request_id, None)

    def clear(self) -> None:
        self._loads.clear()

    def settle(self) -> list[Lost]:
        """Forget the loads whose outcome is known. To be called when a step begins."""
        lost: list[Lost] = []
        for load in self._loads.values():
            if load.has_failed:
                begin = load.request.num_computed_tokens
                lost.append(Lost(load.request, begin, is_sharer=False))
                lost += [Lost(one, begin, True) for one in self._sharers(load.request, begin)]
        is_out = {one.request.request_id for one in lost}
        self._loads = {
            request_id: load
            for request_id, load in self._loads.items()
            if request_id not in is_out and not load.has_succeeded
        }
        return lost

    def are_in_doubt(self, num_tokens: int, last_blocks: Sequence[int]) -> bool:
        """Whether a load fills one of the blocks that hold the last of `num_tokens`, or one is
        computed from it. O(loads)."""
        return any(
            load.begin < num_tokens
            and not self._groups.blocks_at(load.request, num_tokens - 1).isdisjoint(last_blocks)
            for load in self._loads.values()
        )

    def _sharers(self, failed: Request, begin: int) -> list[Request]:
        """The other requests in doubt that share blocks of `failed` from token `begin` on."""
        first, main_blocks = begin // self._groups.block_size, self._groups.main_blocks
        lost = {block.block_id for block in main_blocks.get(failed.request_id, ())[first:]}
        return [
            load.request
            for request_id, load in self._loads.items()
            if load.request is not failed
            and not lost.isdisjoint(block.block_id for block in main_blocks.get(request_id, ()))
        ]

    def _first_shared(self, request: Request, num_hit: int) -> int:
        """The first of `num_hit` tokens whose block another load fills; `num_hit` if none does."""
        size, main_blocks = self._groups.block_size, self._groups.main_blocks
        blocks = main_blocks.get(request.request_id, ())[: num_hit // size]
        shared = [
            number * size
            for request_id, load in self._loads.items()
            for number, (own, other) in enumerate(
                zip(blocks, main_blocks.get(request_id, ()), strict=False)
            )
            if own is other and number >= load.begin // size
        ]
        return min(shared, default=num_hit)
