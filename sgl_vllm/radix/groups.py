"""The KV-cache groups of a model, as the tree sees them.

Owns which group is the tree's own full attention, the order of the others, and a request's blocks
in that order. Does not own what the tree makes of them (`components/windows.py`), nor which layouts
are refused (`part.py`).

vLLM numbers the groups by the model's layers: the first may be any kind. The tree's order is: full
attention, then its window groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

from vllm.v1.kv_cache_interface import FullAttentionSpec

from sgl_vllm.radix.components.windows import HOLE, NumSkipped

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
    from vllm.v1.request import Request

Of = TypeVar("Of")


class Groups:
    """The groups of one model, all with blocks of the same size.

    Args:
        managers: vLLM's, one for each group; if there are several, one is of full attention.

    Attributes:
        block_size: tokens per block.
        full: number of the group that the tree takes for its own.
        num_skipped: for each further group what its layers skip, as vLLM frees its blocks.
    """

    def __init__(self, managers: Sequence[SingleTypeKVCacheManager]) -> None:
        specs = [manager.kv_cache_spec for manager in managers]
        full = (i for i, spec in enumerate(specs) if isinstance(spec, FullAttentionSpec))
        self.full = next(full, 0)
        order = [self.full, *(i for i in range(len(managers)) if i != self.full)]
        self._managers = [managers[number] for number in order]
        self._places = [order.index(number) for number in range(len(managers))]
        self.block_size = self._managers[0].block_size
        self.num_skipped: list[NumSkipped] = [
            manager.get_num_skipped_tokens for manager in self._managers[1:]
        ]

    def __len__(self) -> int:
        return len(self._managers)

    def blocks_of(self, request: Request) -> list[list[KVCacheBlock]]:
        """The blocks of a request in the tree's order; empty lists if it holds none."""
        request_id = request.request_id
        return [manager.req_to_blocks.get(request_id, []) for manager in self._managers]

    def num_scheduled(self, request: Request) -> int:
        """How many whole blocks of `request` vLLM has cached, scheduled ones included."""
        return self._managers[0].num_cached_block.get(request.request_id, 0)

    def in_vllms_order(self, lists: Sequence[Of]) -> tuple[Of, ...]:
        """One thing for each group, from the tree's order into vLLM's."""
        return tuple([lists[place] for place in self._places])

    def num_blocks_of_longest(self, num_tokens: int) -> int:
        """At most so many blocks hold a request of `num_tokens`."""
        num_blocks = -(-num_tokens // self.block_size)
        most = [manager.max_admission_blocks_per_request for manager in self._managers]
        return sum(num_blocks if one is None else min(num_blocks, one) for one in most)


def ids_with_holes(blocks: Sequence[KVCacheBlock]) -> list[int]:
    """The ids of a window group's blocks."""
    return [HOLE if block.is_null else block.block_id for block in blocks]
