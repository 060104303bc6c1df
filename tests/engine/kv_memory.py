"""A stand-in for the memory of the KV cache, in which every slot knows what it was computed for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from vllm.v1.core.kv_cache_utils import KVCacheBlockCopy

_NULL_BLOCK = 0


class WrongKvError(Exception):
    """A pass would read a key and value, or a state, that were computed for other tokens."""


class Reader(NamedTuple):
    """What a request computes and reads in a pass, in one of its KV-cache groups.

    Attributes:
        contents: of every token up to the last of this pass.
        num_before: how many of these were there before.
        num_unread: so many tokens from the first on are read by none that is computed. Their blocks
            may be any.
        block_size: tokens per block of the group; None for the memory's.
    """

    request_id: str
    block_ids: list[int]
    contents: NDArray[np.uint64]
    num_before: int
    num_unread: int = 0
    block_size: int | None = None


class StateStep(NamedTuple):
    """What a request makes of its state in a pass, in one of its recurrent groups.

    Attributes:
        source: the block that its last pass has left the state in; None before the first.
        block: where the layers find the state, and leave it. vLLM copies it there before the pass.
        before, after: contents of the last token before the pass, None if there is none, and of the
            last one in it.
    """

    request_id: str
    source: int | None
    block: int
    before: np.uint64 | None
    after: np.uint64


class KvMemory:
    """What every slot of the cache would hold: a number for a token and all before it.

    With it a pass can be checked: that it reads, for every token of a request, what was computed
    for exactly this token after exactly these. A state fills its block with the number of the last
    token that it was computed for.

    Args:
        block_size: tokens per block, of the group where they are most.
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
        states: Sequence[StateStep] = (),
    ) -> None:
        """One pass: first the copies of blocks, then those of states, then all reads of states, all
        writes, and all other reads.

        Raises:
            WrongKvError: a request would read something else.
        """
        if copies:
            sources = self._slots[[copy.src_block_id for copy in copies]]
            self._slots[[copy.dst_block_id for copy in copies]] = sources
        self._move(states)
        for step in states:
            if step.before is not None and (self._slots[step.block] != step.before).any():
                raise WrongKvError(f"request {step.request_id} goes on from a wrong state")
        for one in readers:
            size = self._size_for(one)
            positions = np.arange(one.num_before, len(one.contents))
            blocks = np.array(one.block_ids)[positions // size]
            self._slots[blocks, positions % size] = one.contents[one.num_before :]
        for step in states:
            self._slots[step.block] = step.after
        for one in readers:
            size = self._size_for(one)
            num_blocks = -(-len(one.contents) // size)
            found = self._slots[one.block_ids[:num_blocks], :size].reshape(-1)
            is_wrong = found[: len(one.contents)] != one.contents
            wrong = np.flatnonzero(is_wrong[one.num_unread :]) + one.num_unread
            if len(wrong):
                raise WrongKvError(
                    f"request {one.request_id} with {one.num_before} tokens computed reads a wrong "
                    f"key and value for token {wrong[0]}"
                )

    def _size_for(self, reader: Reader) -> int:
        return reader.block_size or self._slots.shape[1]

    def _move(self, states: Sequence[StateStep]) -> None:
        """Copy states to where the pass needs them, in no particular order."""
        moved = [(one.source, one.block) for one in states if one.source is not None]
        moved = [(source, block) for source, block in moved if source != block]
        written = [step.block for step in states]
        if len({*written, _NULL_BLOCK}) <= len(written):
            raise WrongKvError("two requests keep their states in the same block, or one in none")
        if not {source for source, _ in moved}.isdisjoint(written):
            raise WrongKvError("a pass overwrites a state that it copies")
        self._slots[[block for _, block in moved]] = self._slots[[source for source, _ in moved]]
