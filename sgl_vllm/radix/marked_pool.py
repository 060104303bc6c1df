"""The hashes of blocks in the tree, beside vLLM's own.

Owns the mark of a block in the tree, vLLM's hashes of whole blocks where KV events or a connector
need them, and their events. Does not own which blocks are in the tree (`pool.py`).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId, KVCacheBlock
from vllm.v1.request import Request

from sgl_vllm.radix.groups import Groups
from sgl_vllm.radix.request_record import RequestRecord
from sgl_vllm.radix.tree import RadixTree

_MARK = BlockHashWithGroupId(b"sgl_vllm: in the radix tree" + bytes(4))
"""The hash of a block that is in the tree and that vLLM has not hashed. Never a key of the hash
map."""


def _is_marked(block: KVCacheBlock) -> bool:
    return block.block_hash == _MARK


class MarkedBlockPool(BlockPool):
    """Added to a live pool by `RadixBlockPool.adopt`."""

    tree: RadixTree
    """Empty while it is off."""
    is_off: bool
    off_reason: str
    """Why the tree is off, for people; empty while it is on."""
    groups: Groups
    hash_blocks: bool
    """Whether vLLM's block hashes and its map of them are kept too."""

    def mark(self, block_ids: Sequence[int], num_tokens: int) -> None:
        """These blocks have entered the tree with a request of `num_tokens`."""
        blocks = self.blocks
        for block_id in block_ids:
            block = blocks[block_id]
            if block._block_hash is None:  # `set_block_hash` takes three times as long
                block._block_hash, block._block_hash_num_tokens = _MARK, num_tokens

    def hash_whole_blocks(self, record: RequestRecord, begin: int, end: int) -> None:
        """Give the whole blocks of tokens `[begin, end)` that have entered the tree vLLM's hashes,
        and emit their events: for each group one for every run of such blocks. A second copy of
        cached tokens is not in the tree, so it gets no hash. From vLLM 0.33 on, a block's hash with
        EAGLE needs the token after the block, so a block may get it later."""
        request = record.request
        begin = min(begin, record.num_hashed)
        end = min(end, len(request.block_hashes) * self.hash_block_size)
        for number, group in enumerate(self.groups.managers):
            size, blocks = group.block_size, group.req_to_blocks.get(request.request_id) or []
            first = begin // size
            for is_marked, run in itertools.groupby(blocks[first : end // size], _is_marked):
                run_blocks = list(run)
                last = first + len(run_blocks)
                if is_marked:
                    for block in run_blocks:
                        block.reset_hash()
                    super().cache_full_blocks(request, blocks, first, last, size, number)
                first = last
        record.num_hashed = end

    def hash_all(
        self,
        request: Request,
        blocks: list[KVCacheBlock],
        num_full_blocks: int,
        block_size: int,
        kv_cache_group_id: int,
    ) -> None:
        """Cache full blocks by their hashes, as vLLM does. A request that started while the tree
        was on has to be hashed from its first block."""
        request.update_block_hashes()
        first = 0
        while first < num_full_blocks and (
            blocks[first].block_hash is not None or blocks[first].is_null
        ):
            first += 1
        # Where another request has left its window earlier, only a later block has its hash.
        mask = [block.block_hash is None for block in blocks[first:num_full_blocks]]
        super().cache_full_blocks(
            request, blocks, first, num_full_blocks, block_size, kv_cache_group_id, mask
        )

    def announce_hit(
        self, request: Request, blocks: Sequence[Sequence[KVCacheBlock]], num_tokens: int
    ) -> None:
        """Announce the whole blocks of a hit again, for a request that asks for their events with
        `kv_cache_report_mode="full"`: of each group those that the request reads.

        Args:
            blocks: the hit, a list for each group in vLLM's order. It begins with null blocks where
                the request does not read the first ones.
            num_tokens: length of the hit.
        """
        for number, (of_group, group) in enumerate(zip(blocks, self.groups.managers, strict=True)):
            size = group.block_size
            whole = of_group[: num_tokens // size]
            num_skipped = sum(block.is_null for block in whole)
            if num_skipped == len(whole):
                continue
            self.emit_cached_block_events(request, len(whole), size, number)
            if num_skipped:  # vLLM announces them too
                event = self.kv_event_queue[-1]
                event.parent_block_hash = event.block_hashes[num_skipped - 1]
                event.block_hashes = event.block_hashes[num_skipped:]
                event.token_ids = event.token_ids[num_skipped * size :]
                if event.extra_keys is not None:
                    event.extra_keys = event.extra_keys[num_skipped:]

    def remove_hashes(self, block: KVCacheBlock) -> None:
        """A block has left the tree."""
        self._emit_block_removed_events(self._remove_cached_block_hashes(block))

    def unhash(self, block: KVCacheBlock) -> None:
        """The tree has a block in part. Remove its hash, which stands for the whole block."""
        if not _is_marked(block):
            num_tokens = block.block_hash_num_tokens
            self.remove_hashes(block)
            block.set_block_hash(_MARK, num_tokens)

    def _emit_block_removed_events(self, block_hashes: list[BlockHashWithGroupId]) -> None:
        """Emit no event for a hash of which another copy stays, as vLLM would."""
        if self.enable_kv_cache_events and block_hashes:
            super()._emit_block_removed_events(
                [
                    key
                    for key in block_hashes
                    if self.cached_block_hash_to_block.get_one_block(key) is None
                ]
            )
