"""A stand-in for the memory of the KV cache, in which every slot knows what it was computed for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from vllm.v1.core.kv_cache_utils import KVCacheBlockCopy


class WrongKvError(Exception):
    """A pass would read a key and value that were computed for other tokens."""


class Reader(NamedTuple):
    """What a request computes and reads in a pass, in one of its KV-cache groups.

    Attributes:
        contents: of every token up to the last of this pass.
        num_before: how many of these were there before.
        num_unread: so many tokens from the first on are read by none that is computed. Their blocks
            may be any.
    """

    request_id: str
    block_ids: list[int]
    contents: NDArray[np.uint64]
    num_before: int
    num_unread: int = 0


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
        readers: Sequence[Reader],
    ) -> None:
        """One pass: first the copies, then all writes, then all reads.

        Raises:
            WrongKvError: a request would read something else.
        """
        if copies:
            sources = self._slots[[copy.src_block_id for copy in copies]]
            self._slots[[copy.dst_block_id for copy in copies]] = sources
        size = self._slots.shape[1]
        for one in readers:
            positions = np.arange(one.num_before, len(one.contents))
            blocks = np.array(one.block_ids)[positions // size]
            self._slots[blocks, positions % size] = one.contents[one.num_before :]
        for one in readers:
            found = self._slots[one.block_ids[: -(-len(one.contents) // size)]].reshape(-1)
            is_wrong = found[: len(one.contents)] != one.contents
            wrong = np.flatnonzero(is_wrong[one.num_unread :]) + one.num_unread
            if len(wrong):
                raise WrongKvError(
                    f"request {one.request_id} with {one.num_before} tokens computed reads a wrong "
                    f"key and value for token {wrong[0]}"
                )
