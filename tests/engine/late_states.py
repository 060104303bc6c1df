"""Where a runner without a model keeps the states of recurrent layers, by vLLM's rules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tests.engine.kv_memory import KvMemory, StateStep


class Place(NamedTuple):
    """Where a request's state is in a pass: see `StateStep`."""

    source: int
    running: int
    num_accepted: int


class LateStates:
    """The running column of each request's block tables.

    Args:
        memory: what the blocks hold.
        block_size: of the recurrent groups.
    """

    def __init__(self, memory: KvMemory, block_size: int) -> None:
        self._memory = memory
        self._block_size = block_size
        self._running: dict[str, int] = {}
        self._num_accepted: dict[str, int] = {}  # in its last pass

    def begin(self, request_id: str, num_computed: int) -> None:
        """A request begins after so many tokens, which are cached."""
        self._running[request_id] = (num_computed - 1) // self._block_size
        self._num_accepted[request_id] = 1

    def forget(self, request_id: str) -> None:
        self._running.pop(request_id, None)

    def move(self, request_id: str, start: int, end: int) -> Place:
        """By `preprocess_mamba`: a pass computes tokens `[start, end)`."""
        if request_id not in self._running:
            self.begin(request_id, start)
        source, running = self._running[request_id], (end - 1) // self._block_size
        place = Place(source, running, self._num_accepted[request_id])
        self._running[request_id] = running
        if source != running:
            self._num_accepted[request_id] = 1
        return place

    def accept(
        self,
        steps: Sequence[tuple[StateStep, int]],
        sampled: Mapping[str, Sequence[int]],
        verified: Mapping[str, Sequence[int]],
    ) -> None:
        """By `postprocess_mamba`: what was sampled in a pass after the last token that is not a
        draft, and after each accepted draft. Each step comes with where it ends."""
        for step, end in steps:
            name = step.request_id
            num_accepted = max(1, len(sampled[name]))
            num_computed = end - len(verified[name]) + num_accepted - 1
            self._num_accepted[name] = self._memory.accept(step, num_computed, num_accepted)
