"""A stand-in for the memory of the KV cache, in which every slot knows what it was computed for."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from vllm.v1.core.kv_cache_utils import KVCacheBlockCopy


class WrongKvError(Exception):
    """A pass would read a key and value that were computed for other tokens."""


class KvMemory:
    """What every slot of the cache would hold: a number for a token and all before it.

    With it a pass can be checked: that it reads, for every token of a request, what was computed
    for exactly this token after exactly these.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._slots = np.zeros((num_blocks, block_size), dtype=np.uint64)

    @staticmethod
    def contents(tokens: NDArray[np.int32]) -> NDArray[np.uint64]:
        """The numbers of a sequence, shape (n,): sums of powers, modulo 2**64."""
        powers = np.cumprod(np.full(len(tokens), 0x9E3779B97F4A7C15, dtype=np.uint64))
        return np.cumsum((tokens.astype(np.uint64) + 1) * powers)

    def run(
        self,
        copies: Sequence[KVCacheBlockCopy],
        requests: Sequence[tuple[str, list[int], NDArray[np.uint64], int]],
    ) -> None:
        """One pass: first the copies, then all writes, then all reads.

        Args:
            requests: id, blocks, the contents up to the last token of this pass, and how many of
                these were there before.

        Raises:
            WrongKvError: a request would read something else.
        """
        if copies:
            sources = self._slots[[copy.src_block_id for copy in copies]]
            self._slots[[copy.dst_block_id for copy in copies]] = sources
        size = self._slots.shape[1]
        for _, block_ids, contents, num_before in requests:
            positions = np.arange(num_before, len(contents))
            blocks = np.array(block_ids)[positions // size]
            self._slots[blocks, positions % size] = contents[num_before:]
        for request_id, block_ids, contents, num_before in requests:
            found = self._slots[block_ids[: -(-len(contents) // size)]].reshape(-1)
            wrong = np.flatnonzero(found[: len(contents)] != contents)
            if len(wrong):
                raise WrongKvError(
                    f"request {request_id} with {num_before} tokens computed reads a wrong key and "
                    f"value for token {wrong[0]}"
                )
