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

    A state has two halves. A pass that verifies drafts writes the first half of each token's state
    to a separate block: the *running* block and those after it in the request's block table. The
    second halves of all these states are in the running block.

    Attributes:
        blocks: of the request.
        source: the place in `blocks` of the running block of its last pass; -1 before the first.
        running: that of this pass. vLLM copies the state there before the pass.
        num_accepted: how many tokens of the last pass have been accepted; 1 if it had no drafts.
        keeps_each: whether the pass keeps the state after each of its tokens.
        before: contents of the last token before the pass; None if there is none.
        contents: of the tokens in the pass.
    """

    request_id: str
    blocks: list[int]
    source: int
    running: int
    num_accepted: int
    keeps_each: bool
    before: np.uint64 | None
    contents: NDArray[np.uint64]

    @property
    def written(self) -> list[int]:
        num_states = len(self.contents) if self.keeps_each else 1
        return self.blocks[self.running : self.running + num_states]


class KvMemory:
    """What every slot of the cache would hold: a number for a token and all before it.

    With it a pass can be checked: that it reads, for every token of a request, what was computed
    for exactly this token after exactly these. A state is the number of the last token that it was
    computed for.

    Args:
        block_size: tokens per block, of the group where they are most.
        num_drafts: in a pass, at most.
    """

    def __init__(self, num_blocks: int, block_size: int, num_drafts: int = 0) -> None:
        self._slots = np.zeros((num_blocks, block_size), dtype=np.uint64)
        self._state = np.zeros(num_blocks, dtype=np.uint64)  # the first halves
        self._after = np.zeros((num_blocks, 1 + num_drafts), dtype=np.uint64)  # the other halves

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
        for memory in (self._slots, self._state, self._after):
            if copies:
                sources = memory[[copy.src_block_id for copy in copies]]
                memory[[copy.dst_block_id for copy in copies]] = sources
        written = [block for step in states for block in step.written]
        if len({*written, _NULL_BLOCK}) <= len(written):
            raise WrongKvError("two requests keep their states in the same block, or one in none")
        self._read_states(states)
        for one in readers:
            size = self._size_for(one)
            positions = np.arange(one.num_before, len(one.contents))
            blocks = np.array(one.block_ids)[positions // size]
            self._slots[blocks, positions % size] = one.contents[one.num_before :]
            self._state[blocks] = self._after[blocks] = 0
        for step in states:
            self._slots[step.written] = 0
            self._state[step.written] = step.contents[-len(step.written) :]
            self._after[step.written[0]] = 0
            self._after[step.written[0], : len(step.written)] = step.contents[-len(step.written) :]
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

    def _read_states(self, states: Sequence[StateStep]) -> None:
        """vLLM copies states to where the pass needs them, in no particular order."""
        owners = {block: step.request_id for step in states for block in step.written}
        for step in states:
            if step.before is None or step.source < 0:
                continue
            place = step.num_accepted - 1
            if step.source == step.running and not step.keeps_each:
                place = 0  # it cannot read another
            running, source = step.blocks[step.source], step.blocks[step.source + place]
            for block in (running, source):
                if owners.get(block, step.request_id) != step.request_id:
                    raise WrongKvError("a pass overwrites a state that it copies")
            if not self._state[source] == self._after[running, place] == step.before:
                raise WrongKvError(f"request {step.request_id} goes on from a wrong state")

    def accept(self, step: StateStep, num_computed: int, num_accepted: int) -> int:
        """Apply the result of a pass: `num_accepted` tokens were accepted, and the request now has
        `num_computed`. If they reach the end of a block, vLLM copies the state at that point to the
        block. Returns `num_accepted` of the next `StateStep`."""
        size = self._slots.shape[1]
        num_before = num_computed - num_accepted
        end = num_computed // size * size
        if end <= num_before:
            return num_accepted
        place, target = end - num_before - 1, step.blocks[end // size - 1]
        running = step.blocks[step.running]
        self._state[target] = self._state[step.blocks[step.running + place]]
        after = self._after[running, place]
        self._after[target] = 0
        self._after[target, 0] = after
        return 1 if target == running else num_accepted
