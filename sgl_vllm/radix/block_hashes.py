"""vLLM's block hashes while the radix tree replaces them: counted, but not computed.

vLLM hashes every full block of every request to look it up later. With the tree on, nothing looks a
block up by its hash unless a KV connector or KV events do, so hashing is skipped. vLLM 0.33 still
counts the hashes to know how many blocks are full, so each block gets the same placeholder.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias, cast

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import BlockHash
    from vllm.v1.request import Request

BlockHasher: TypeAlias = "Callable[[Request], list[BlockHash]]"
"""Returns the hashes of a request's full blocks that `request.block_hashes` does not have yet."""

NOT_HASHED = cast("BlockHash", b"sgl_vllm: not hashed")
"""Stands for the hash of a block. In no hash map, so a lookup by it finds nothing."""


def placeholder_hasher(
    stock: BlockHasher, hash_block_size: int, is_tree_on: Callable[[], bool]
) -> BlockHasher:
    """A block hasher that computes no hash while the tree is on, and vLLM's hashes after that.

    A request that began with placeholders is hashed from its first block once the tree is off.

    Args:
        stock: vLLM's hasher.
        hash_block_size: tokens per hash.
        is_tree_on: whether the radix tree serves prefix hits.
    """

    def new_hashes(request: Request) -> list[BlockHash]:
        known = request.block_hashes
        if is_tree_on():
            return [NOT_HASHED] * (request.num_tokens // hash_block_size - len(known))
        if known and known[0] is NOT_HASHED:
            known.clear()
        return stock(request)

    return new_hashes
