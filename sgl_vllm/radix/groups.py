"""The KV-cache groups of a model, as the tree sees them.

Owns which group is the tree's own full attention, if any, the order of the others, and a
request's blocks in that order. Does not own what the tree makes of them (`components/`), nor which
layouts are refused (`part.py`).

vLLM numbers the groups by the model's layers: the first may be any kind. The tree's order is: full
attention, then its window groups, then its recurrent groups. Without full attention, its window
groups begin with the longest.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

from vllm.v1.kv_cache_interface import MambaSpec

from sgl_vllm.radix.components.windows import WindowGroup
from sgl_vllm.radix.node import HOLE

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
    from vllm.v1.request import Request

T = TypeVar("T")

MAX_STATE_BLOCKS = 3
"""Blocks of a recurrent group that a request holds at a time: its state before and after a pass,
and a state to copy from. One more where vLLM takes a state from inside a pass, and one for each
draft."""


class Groups:
    """The groups of one model.

    Args:
        managers: vLLM's, one for each group.
        max_model_len: tokens of the longest request.

    Attributes:
        managers: vLLM's, in its order.
        num_groups: all of them.
        block_size: tokens per block of `main` and of recurrent groups.
        common_block_size: every block, of any group, begins and ends at a multiple of it.
        main: number of the group of full attention; without one, that of the longest window.
        has_full_attention: whether it keeps all tokens of every request.
        main_blocks: by request id, the blocks of `main` that a request holds. vLLM's.
        num_cached_by_request: how many of these vLLM has cached, scheduled ones included. vLLM's.
        windows: the window groups.
        recurrent: vLLM's managers of the recurrent groups.
    """

    def __init__(self, managers: Sequence[SingleTypeKVCacheManager], max_model_len: int) -> None:
        numbers = range(len(managers))
        specs = [manager.kv_cache_spec for manager in managers]
        # Full attention skips nothing. Where there is none, the longest window never ends.
        self.main = min(numbers, key=lambda i: managers[i].get_num_skipped_tokens(sys.maxsize))
        first = managers[self.main]
        self.has_full_attention = first.get_num_skipped_tokens(max_model_len - 1) <= 0
        recurrent = [number for number in numbers if isinstance(specs[number], MambaSpec)]
        windows = [number for number in numbers if number not in (self.main, *recurrent)]
        if self.has_full_attention:
            order = [self.main, *windows, *recurrent]
        else:
            windows = [self.main, *windows]
            order = [HOLE, *windows]
        self._tree_order_index = [order.index(number) for number in numbers]
        self.managers = managers
        self.num_groups = len(managers)
        self.block_size = first.block_size
        self.common_block_size = math.gcd(*(manager.block_size for manager in managers))
        self.windows = [
            WindowGroup(managers[i].block_size, managers[i].get_num_skipped_tokens) for i in windows
        ]
        self.recurrent: list[SingleTypeKVCacheManager] = [managers[i] for i in recurrent]
        self.main_blocks = first.req_to_blocks
        self.num_cached_by_request = first.num_cached_block
        self._window_blocks = [managers[i].req_to_blocks for i in windows]
        limits = [
            MAX_STATE_BLOCKS + spec.num_prefill_checkpoint_blocks + spec.num_speculative_blocks
            if isinstance(spec, MambaSpec)
            else manager.max_admission_blocks_per_request
            for manager, spec in zip(managers, specs, strict=True)
        ]
        self._limits = list(zip(managers, limits, strict=True))

    @property
    def has_others(self) -> bool:
        """Whether there is more than full attention. A hit may then be shorter than its match, and
        a running request gives blocks back."""
        return bool(self.windows or self.recurrent)

    def window_blocks_of(self, request: Request, begin: int, end: int) -> list[list[KVCacheBlock]]:
        """For each window group the blocks in which a request has its tokens `[begin, end)`. Null
        blocks are those that it has given back."""
        if not self._window_blocks:
            return []
        request_id = request.request_id
        return [
            (blocks.get(request_id) or [])[begin // group.block_size : group.num_blocks(end)]
            for group, blocks in zip(self.windows, self._window_blocks, strict=True)
        ]

    def window_ids(self, request: Request, begin: int, end: int) -> list[list[int]]:
        """The ids of these blocks, `HOLE` for null blocks."""
        return [
            [HOLE if block.is_null else block.block_id for block in blocks]
            for blocks in self.window_blocks_of(request, begin, end)
        ]

    def blocks_at(self, request: Request, position: int) -> set[int]:
        """The blocks of full attention and of the window groups in which a request has the token at
        `position`."""
        blocks = self.main_blocks.get(request.request_id) or []
        number = position // self.block_size
        of_groups = [blocks[number : number + 1]]
        of_groups += self.window_blocks_of(request, position, position + 1)
        return {block.block_id for of_group in of_groups for block in of_group if not block.is_null}

    def states_of(self, request: Request, begin: int, end: int) -> dict[int, list[int]]:
        """By position, the blocks of the states that a request has after whole blocks of tokens,
        after `begin` (exclusive) up to `end`, and at `end` itself.

        A block holds the state after its last token once the request has gone past that token.
        vLLM gives most of them back a pass later.

        Args:
            end: a multiple of the block size, or the tokens that the request has computed by now.
        """
        size = self.block_size
        positions = [*range((begin // size + 1) * size, end, size), end]
        states = {position: self.state_at(request, position) for position in positions}
        return {position: ids for position, ids in states.items() if ids is not None}

    def state_at(self, request: Request, position: int) -> list[int] | None:
        """The block of each recurrent group in which a request keeps its state after `position`
        tokens; None if it has given any of them back."""
        number = (position - 1) // self.block_size
        blocks = [one.req_to_blocks.get(request.request_id) or [] for one in self.recurrent]
        if any(number >= len(one) or one[number].is_null for one in blocks):
            return None
        return [one[number].block_id for one in blocks]

    def in_vllms_order(self, lists: Sequence[T]) -> tuple[T, ...]:
        """Reorder one item per group from the tree's order to vLLM's. Without full attention, drop
        the first item."""
        return tuple([lists[index] for index in self._tree_order_index])

    def max_blocks(self, num_tokens: int, num_hit: int = 0) -> int:
        """The most blocks that a request of `num_tokens` holds at a time if it begins with a hit of
        `num_hit`, the blocks of the hit included."""
        total = 0
        for manager, limit in self._limits:
            num_skipped = max(0, manager.get_num_skipped_tokens(num_hit))
            num_blocks = -(-num_tokens // manager.block_size) - num_skipped // manager.block_size
            total += num_blocks if limit is None else min(num_blocks, limit)
        return total

    @property
    def num_blocks_per_main_block(self) -> int:
        """How many blocks there are, in all groups, for the tokens of one block of `main`, as long
        as all groups keep them."""
        return sum(self.block_size // manager.block_size for manager in self.managers)

    def tokens_in(self, num_blocks: int) -> int:
        """How many tokens fit into blocks of the pool, as long as all groups keep them."""
        return num_blocks * self.block_size // self.num_blocks_per_main_block
