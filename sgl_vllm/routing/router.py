"""The choice of a worker for each request: the one where it costs the least.

Owns the workers and the choice. Pure: it uses neither Ray nor vLLM nor a network, and adapters
report to it. Not thread-safe.

    router = PrefixRouter()
    router.add_worker("a"); router.add_worker("b")
    route = router.choose(token_ids)           # a worker, and the expected cached tokens
    ...                                        # send the request to route.worker
    router.first_token(route)                  # its prompt has been computed
    router.finished(route)                     # answered, failed or canceled: always call this
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sgl_vllm.lru_per_tenant import LruPerTenant
from sgl_vllm.protocol.cache_namespace import SHARED, CacheNamespace
from sgl_vllm.routing.approx_index import ApproxCache, ApproxPrefixIndex
from sgl_vllm.routing.costs import CostModel, Load, LoadBook, Route, Worker
from sgl_vllm.routing.kv_event_index import KvEventCache, KvEventIndex
from sgl_vllm.routing.prefix_hashes import (
    PrefixHasher,
    PrefixHashes,
    Prompt,
    prefix_length,
    seed_of,
)

DEFAULT_CAPACITY_TOKENS = 1_000_000
"""The assumed size of a worker's cache."""

MAX_GROUPS = 10_000
"""How many groups keep their worker. Beyond it, the tenant with the most groups loses its least
recently used one."""

EVENT_DELAY_S = 60.0
"""How long a prompt sent to a worker with KV events counts as cached without its event."""


class _Group(NamedTuple):
    """A group of a tenant, both as hashes."""

    tenant: int
    name: int


class UnknownWorker(KeyError):
    """There is no such worker. `PrefixRouter.add_worker` adds one."""


@dataclass(slots=True, eq=False)
class _WorkerState:
    """A worker's slot, and what it has cached: by guess, and by events if it publishes any."""

    name: Worker
    slot: int
    approx: ApproxCache
    events: KvEventCache | None


class PrefixRouter:
    """Sends requests to the worker where they cost the least (`CostModel`).

    What a worker has cached is known from its engine's KV events, if it publishes them
    (`apply_events`). Otherwise the router assumes that it holds the prompts sent to it most
    recently (`capacity_tokens`, `max_age_s`).

    Cost: a choice takes about 0.1 ms, and up to 0.5 ms for a prompt of 99,000 tokens.

    Memory is bounded by the workers' caches. Without events a worker takes about 600 bytes per
    remembered request (at most one per `block_size` tokens of `capacity_tokens`) and 8 per prefix
    hash; with events about 280 bytes per block it holds.

    Args:
        block_size: tokens per KV block of the engines.
        capacity_tokens: the size of each worker's cache.
        max_age_s: without events, prompts sent longer ago do not count as cached.
        cost: see `CostModel`.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        *,
        block_size: int = 16,
        capacity_tokens: int = DEFAULT_CAPACITY_TOKENS,
        max_age_s: float = 3600.0,
        cost: CostModel | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.block_size = block_size
        self.capacity_tokens = capacity_tokens
        self.max_age_s = max_age_s
        self.cost = cost or CostModel()
        self._clock = clock
        self._hasher = PrefixHasher(block_size)
        self._approx_index = ApproxPrefixIndex()
        self._event_index = KvEventIndex()
        self._book = LoadBook()
        self._workers: dict[Worker, _WorkerState] = {}
        self._slots: list[_WorkerState | None] = []
        self._groups: LruPerTenant[_Group, _WorkerState] = LruPerTenant(MAX_GROUPS)
        self._expire_next = 0

    # -- workers --------------------------------------------------------------------------------

    @property
    def workers(self) -> list[Worker]:
        """In the order in which they were added."""
        return list(self._workers)

    def add_worker(self, worker: Worker, *, has_events: bool = False) -> None:
        """Adds a worker, which can be chosen from now on.

        Raises:
            ValueError: it has been added already.
        """
        if worker in self._workers:
            raise ValueError(f"worker {worker!r} has been added already")
        slot = next((i for i, state in enumerate(self._slots) if state is None), len(self._slots))
        if slot == len(self._slots):
            self._slots.append(None)
        bit = 1 << slot
        approx = ApproxCache(self._approx_index, bit, self.capacity_tokens // self.block_size)
        events = KvEventCache(self._event_index, worker, bit, self._hasher) if has_events else None
        self._slots[slot] = self._workers[worker] = _WorkerState(worker, slot, approx, events)
        self._book.open_slot(slot)

    def remove_worker(self, worker: Worker) -> None:
        """Removes a worker and everything known about it. Its open routes may still be reported.

        Cost: O(its cached tokens).

        Raises:
            UnknownWorker: there is no such worker.
        """
        state = self._state(worker)
        del self._workers[worker]
        self._slots[state.slot] = None
        state.approx.clear()
        if state.events is not None:
            state.events.clear()
        self._book.close_slot(state.slot)
        for group in [group for group, one in self._groups.items() if one is state]:
            self._groups.pop(group)

    def set_workers(self, workers: Mapping[Worker, bool]) -> None:
        """Replaces all workers; the values say which ones publish KV events.

        A worker stays as it is unless its value has changed; then it starts with an empty cache.
        """
        for worker, state in list(self._workers.items()):
            if workers.get(worker) is not (state.events is not None):
                self.remove_worker(worker)
        for worker, has_events in workers.items():
            if worker not in self._workers:
                self.add_worker(worker, has_events=has_events)

    # -- a request ------------------------------------------------------------------------------

    def choose(
        self,
        prompt: Prompt,
        loads: Mapping[Worker, Load] | None = None,
        *,
        max_output_tokens: int | None = None,
        group: Hashable = None,
        namespace: CacheNamespace = SHARED,
    ) -> Route:
        """The worker for a request, which counts as sent there until `finished`.

        Args:
            prompt: token ids, shape (n,), or text in UTF-8. The router matches tokens only with
                tokens and text only with text, so always pass the same kind.
            loads: loads of workers that are known better than from this router's own routes.
            max_output_tokens: the request's own limit, if it has one.
            group: requests of one group, such as a program's, stay at one worker while that costs
                little more (`CostModel.group_patience_tokens`).
            namespace: which requests may share its cached tokens.

        Raises:
            LookupError: there are no workers.
        """
        if not self._workers:
            raise LookupError("there are no workers to choose from: call add_worker first")
        now_s = self._clock()
        self._expire_some(now_s)
        hashed = self._hasher.hash_prompt(prompt, namespace)
        cached = self._cached(hashed)
        known = {
            self._workers[worker].slot: load
            for worker, load in (loads or {}).items()
            if worker in self._workers
        }
        waiting = self._book.waiting(known, self.cost.output_tokens)
        slot = self._pick(hashed.num_tokens, cached, waiting)
        costs = hashed.num_tokens - cached + waiting
        if group is not None:
            named = _Group(seed_of(namespace, ""), seed_of(namespace, repr(group)))
            slot = self._pick_for_group(named, slot, costs)
        state = self._slots[slot]
        assert state is not None
        output_tokens = self.cost.output_tokens
        route = Route(
            state.name,
            hashed.num_tokens,
            int(cached[slot]),
            output_tokens if max_output_tokens is None else min(max_output_tokens, output_tokens),
            float(costs[slot]),
        )
        state.approx.insert(hashed.hashes, now_s)
        self._book.start(route, slot)
        return route

    def first_token(self, route: Route) -> None:
        """Its prompt has been computed. Optional; calling it twice has no effect."""
        self._book.first_token(route)

    def finished(self, route: Route) -> None:
        """It was answered, failed or canceled, and is no load any more."""
        self._book.finish(route)

    def load(self, worker: Worker) -> Load:
        """The requests that this router has sent to a worker and that have not finished."""
        return self._book.load(self._state(worker).slot)

    def cached_tokens(
        self, prompt: Prompt, namespace: CacheNamespace = SHARED
    ) -> dict[Worker, int]:
        """The tokens of a prompt that the router expects to be cached at each worker."""
        cached = self._cached(self._hasher.hash_prompt(prompt, namespace))
        return {name: int(cached[state.slot]) for name, state in self._workers.items()}

    def _cached(self, hashed: PrefixHashes) -> NDArray[np.float64]:
        """By slot. Never the whole prompt, because engines always compute its last token."""
        num_slots = len(self._slots)
        num_bytes = -(-num_slots // 8)
        matches = self._approx_index.match_prefix(hashed.hashes)
        matches += self._event_index.match_prefix(hashed.hashes)
        most = max(0, hashed.num_tokens - 1)
        nums = np.array([min(prefix_length(n) * self.block_size, most) for n, _ in matches], float)
        sets = b"".join(workers.to_bytes(num_bytes, "little") for _, workers in matches)
        bits = np.frombuffer(sets, np.uint8).reshape(len(matches), num_bytes)
        has_it = np.unpackbits(bits, axis=1, count=num_slots, bitorder="little")
        return np.maximum.reduce(nums[:, None] * has_it, axis=0, initial=0.0)

    def _pick(
        self, num_tokens: int, cached: NDArray[np.float64], waiting: NDArray[np.float64]
    ) -> int:
        """The slot with the least cost; among equals, the one with the least waiting, then the one
        that was sent the fewest uncached tokens."""
        costs = num_tokens - cached + waiting
        slots = np.flatnonzero(costs == costs.min())
        if len(slots) > 1:
            slots = slots[np.lexsort((self._book.sent[slots], waiting[slots]))]
        return int(slots[0])

    def _pick_for_group(self, group: _Group, cheapest: int, costs: NDArray[np.float64]) -> int:
        """The slot of the group's worker, or the cheapest one if the group moves there."""
        state = self._groups.get(group)
        slot = cheapest if state is None else state.slot
        if costs[slot] > costs[cheapest] + self.cost.group_patience_tokens:
            slot = cheapest
        chosen = self._slots[slot]
        assert chosen is not None
        self._groups.put(group, chosen)
        return slot

    def _expire_some(self, now_s: float) -> None:
        """Expires old prompts of one worker per choice, so each of N workers every N choices."""
        self._expire_next = (self._expire_next + 1) % len(self._slots)
        state = self._slots[self._expire_next]
        if state is not None:
            age_s = self.max_age_s if state.events is None else EVENT_DELAY_S
            state.approx.expire(now_s - age_s)

    # -- KV events ------------------------------------------------------------------------------

    def apply_events(
        self, worker: Worker, events: Iterable[object], number: int | None = None
    ) -> bool:
        """Applies one batch of a worker's KV events, as vLLM publishes them.

        Args:
            events: objects with the class and field names of `vllm.distributed.kv_events`:
                `BlockStored`, `BlockRemoved`, `AllBlocksCleared`. Blocks in GPU memory count; if a
                model has several KV-cache groups, those of full attention, which a hit needs from
                the first token on. Blocks with images or embeddings do not.
            number: the batch's number, as published with it. After a gap everything known from
                events is dropped, and a warning logged. A batch that was applied before is skipped.
                Number 0 means that the worker has restarted.

        Returns:
            False after a gap. The adapter may then replay old batches, from any number on.

        Raises:
            UnknownWorker: there is no such worker.
            ValueError: it was added without events, or its blocks are larger than `block_size`.
        """
        cache = self._state(worker).events
        if cache is None:
            raise ValueError(f"worker {worker!r} was added without has_events")
        return cache.apply(events, number)

    @property
    def num_gaps(self) -> int:
        """Gaps in the batch numbers of the present workers' events."""
        return sum(state.events.num_gaps for state in self._workers.values() if state.events)

    def _state(self, worker: Worker) -> _WorkerState:
        try:
            return self._workers[worker]
        except KeyError:
            raise UnknownWorker(f"there is no worker {worker!r}") from None
