"""Which worker a request goes to: the one where it costs the least compute.

Owns the choice, the book of what was sent where, and who the workers are. Pure: it knows neither
Ray nor vLLM nor a network; adapters tell it what happens. One thread at a time.

    router = PrefixRouter()
    router.add_worker("a"); router.add_worker("b")
    route = router.choose(token_ids)           # a worker, and what it is expected to compute
    ...                                        # the request is sent to route.worker
    router.first_token(route)                  # its prompt is computed
    router.finished(route)                     # answered, failed or given up: always call it
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sgl_vllm.routing.prefix_hashes import (
    NO_NAMESPACE,
    Namespace,
    Prefixes,
    PrefixHasher,
    Units,
    ladder_length,
)
from sgl_vllm.routing.prefix_index import ApproxPrefixIndex, KvEventIndex, SentCache, ToldCache

logger = logging.getLogger(__name__)

Worker = Hashable
"""How the caller calls a worker: a replica's id, an address, a rank."""

MAX_GROUPS = 100_000
"""So many fork groups are remembered; the least recently used go first."""

MEDIUM_GPU = "GPU"
"""As KV events call the memory that prompts are computed from."""

PROMISED_AGE_S = 60.0
"""How long a worker with KV events is taken to have what was sent to it, but is not told yet."""


class UnknownWorker(KeyError):
    """There is no such worker; `add_worker` makes one."""


@dataclass(frozen=True, slots=True)
class Load:
    """What a worker has to do already.

    Attributes:
        num_queued_tokens: of prompts that were sent to it, are not cached there, and are not
            computed yet.
        num_running: requests that it has and has not finished.
    """

    num_queued_tokens: int = 0
    num_running: int = 0


@dataclass(frozen=True, slots=True)
class CostModel:
    """What a choice costs, in the time that one uncached prompt token takes to compute.

        cost = uncached tokens + queued tokens + tokens that its running requests still write

    A prompt's tokens are computed by whoever gets it, the rest is waited for: with nothing waiting
    a request goes where its prefix is, with much waiting there it goes where computing the prefix
    again is the shorter wait, and that worker has it too from then on. So a hot prefix spreads, and
    a request that has no prefix anywhere goes where the least waits.

    Attributes:
        output_tokens: what a running request is taken to write, where its own limit is not less.
        group_patience_tokens: a request of a fork group leaves its group's worker if another is
            cheaper by more than this.
    """

    output_tokens: int = 500
    group_patience_tokens: float = 8192.0


@dataclass(frozen=True, slots=True, eq=False)
class Route:
    """A choice.

    Attributes:
        worker: where the request goes.
        num_tokens: of its prompt (of text, estimated).
        num_cached_tokens: of these, expected to be cached there.
        num_output_tokens: taken to be written for it.
        cost: see `CostModel`.
    """

    worker: Worker
    num_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    cost: float

    @property
    def num_uncached_tokens(self) -> int:
        return self.num_tokens - self.num_cached_tokens


class _Worker:
    """A worker's place in the arrays, and what it has cached."""

    __slots__ = ("expects_number", "has_gap", "name", "sent", "slot", "told")

    def __init__(self, name: Worker, slot: int, sent: SentCache, told: ToldCache | None) -> None:
        self.name = name
        self.slot = slot
        self.sent = sent
        self.told = told
        self.expects_number: int | None = None  # of the next batch of events
        self.has_gap = False  # just before the last one


class PrefixRouter:
    """Sends requests to the worker where they cost the least (`CostModel`).

    What a worker has cached is known from its engine's KV events, if it has them (`apply_events`),
    and is otherwise taken to be what was sent there, the least recently sent forgotten first
    (`capacity_tokens`, `max_age_s`).

    Before 64 workers with 1M cached tokens each a choice takes 40 to 50 us in the median, and some
    100 us on a prompt of 99,000 tokens (`benchmarks.routing`). Making one takes up to a second or
    two: loops are compiled, or loaded.

    Memory is bounded by the workers' caches: of one without events, some 600 bytes for each request
    that is not forgotten (at most one for each `block_size` tokens of `capacity_tokens`) and 8 for
    each numbered beginning; of one with events, some 160 bytes for each block that it holds.

    Args:
        block_size: tokens per block of the engines, which events are about.
        capacity_tokens: of a worker's cache, where `add_worker` does not say.
        max_age_s: what was sent to a worker without events so long ago is not counted on.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        *,
        block_size: int = 16,
        capacity_tokens: int = 1_000_000,
        max_age_s: float = 3600.0,
        cost: CostModel | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.block_size = block_size
        self.capacity_tokens = capacity_tokens
        self.max_age_s = max_age_s
        self.cost = cost or CostModel()
        self.num_gaps = 0  # in the numbers of event batches
        self._clock = clock
        self._hasher = PrefixHasher(block_size)
        self._sent_tree = ApproxPrefixIndex()
        self._told_index = KvEventIndex()
        self._workers: dict[Worker, _Worker] = {}
        self._slots: list[_Worker | None] = []
        self._expire_next = 0
        self._queued = np.zeros(0)
        self._running = np.zeros(0)
        self._writing = np.zeros(0)  # tokens that those which run still write, at most
        self._sent = np.zeros(0)  # uncached tokens ever
        self._closed = np.zeros(0)  # infinite where a slot has no worker
        self._in_queue: dict[Route, _Worker] = {}
        self._open: dict[Route, _Worker] = {}
        self._groups: OrderedDict[tuple[Namespace, Hashable], _Worker] = OrderedDict()

    # -- who there is ---------------------------------------------------------------------------

    @property
    def workers(self) -> list[Worker]:
        """In the order in which they came."""
        return list(self._workers)

    def add_worker(
        self, worker: Worker, *, capacity_tokens: int | None = None, has_events: bool = False
    ) -> None:
        """It is chosen from now on. Raises ValueError if it is there already."""
        if worker in self._workers:
            raise ValueError(f"there is a worker {worker!r} already")
        slot = next((i for i, one in enumerate(self._slots) if one is None), len(self._slots))
        if slot == len(self._slots):
            self._slots.append(None)
            for name in ("_queued", "_running", "_writing", "_sent", "_closed"):
                setattr(self, name, np.append(getattr(self, name), 0.0))
        bit = 1 << slot
        capacity = self.capacity_tokens if capacity_tokens is None else capacity_tokens
        entry = _Worker(
            worker,
            slot,
            SentCache(self._sent_tree, bit, capacity // self.block_size),
            ToldCache(self._told_index, bit, self._hasher) if has_events else None,
        )
        self._slots[slot] = self._workers[worker] = entry
        self._queued[slot] = self._running[slot] = self._writing[slot] = self._closed[slot] = 0.0
        # As if it had had its share: a new worker is not sent all that nobody has cached.
        others = [self._sent[one.slot] for one in self._workers.values() if one is not entry]
        self._sent[slot] = min(others, default=0.0)

    def remove_worker(self, worker: Worker) -> None:
        """It is not chosen any more, and all that was known of it is forgotten; its open routes may
        still be told about. O(what it has cached). Raises UnknownWorker."""
        entry = self._entry(worker)
        del self._workers[worker]
        self._slots[entry.slot] = None
        self._closed[entry.slot] = np.inf
        entry.sent.clear()
        if entry.told is not None:
            entry.told.clear()
        for book in (self._in_queue, self._open):
            for route in [route for route, one in book.items() if one is entry]:
                del book[route]
        for group in [group for group, one in self._groups.items() if one is entry]:
            del self._groups[group]

    def set_workers(self, workers: Mapping[Worker, bool]) -> None:
        """These are the workers from now on, each with whether it has events. One for which that
        has changed begins anew."""
        for worker, entry in list(self._workers.items()):
            if workers.get(worker) is not (entry.told is not None):
                self.remove_worker(worker)
        for worker, has_events in workers.items():
            if worker not in self._workers:
                self.add_worker(worker, has_events=has_events)

    # -- a request ------------------------------------------------------------------------------

    def choose(
        self,
        units: Units,
        loads: Mapping[Worker, Load] | None = None,
        *,
        max_output_tokens: int | None = None,
        group: Hashable = None,
        namespace: Namespace = NO_NAMESPACE,
    ) -> Route:
        """The worker for a request, which is booked as sent there.

        Args:
            units: token ids, shape (n,), or text in UTF-8. Of either a router knows only its own
                kind again: send it one of them.
            loads: of workers of which more is known than this router's own book holds. It counts
                instead; who is not in it has what the book says.
            max_output_tokens: the request's own limit, if it has one.
            group: requests with one group belong to one program: they stay at one worker while
                that is not much dearer (`CostModel.group_patience_tokens`).
            namespace: who may share the request's cached tokens.

        Raises:
            LookupError: there is no worker.
        """
        if not self._workers:
            raise LookupError("there is no worker to choose from: add_worker makes one")
        now_s = self._clock()
        self._expire_some(now_s)
        prefixes = self._hasher.prefixes(units, namespace)
        cached = self._cached(prefixes)
        waiting = self._waiting(loads)
        slot = self._pick(prefixes.num_tokens, cached, waiting)
        costs = prefixes.num_tokens - cached + waiting
        if group is not None:
            slot = self._stay((namespace, group), slot, costs)
        entry = self._slots[slot]
        assert entry is not None
        output_tokens = self.cost.output_tokens
        route = Route(
            entry.name,
            prefixes.num_tokens,
            int(cached[slot]),
            output_tokens if max_output_tokens is None else min(max_output_tokens, output_tokens),
            float(costs[slot]),
        )
        entry.sent.send(prefixes.keys, now_s)
        self._in_queue[route] = self._open[route] = entry
        self._queued[slot] += route.num_uncached_tokens
        self._sent[slot] += route.num_uncached_tokens
        self._running[slot] += 1
        self._writing[slot] += route.num_output_tokens
        return route

    def first_token(self, route: Route) -> None:
        """Its prompt is computed. Told twice, or not at all, does no harm."""
        entry = self._in_queue.pop(route, None)
        if entry is not None:
            self._queued[entry.slot] -= route.num_uncached_tokens

    def finished(self, route: Route) -> None:
        """It is answered, failed or given up: it is no load any more."""
        self.first_token(route)
        entry = self._open.pop(route, None)
        if entry is not None:
            self._running[entry.slot] -= 1
            self._writing[entry.slot] -= route.num_output_tokens

    def load(self, worker: Worker) -> Load:
        """What this router has sent to it and not heard the end of."""
        slot = self._entry(worker).slot
        return Load(int(self._queued[slot]), int(self._running[slot]))

    def cached_tokens(self, units: Units, namespace: Namespace = NO_NAMESPACE) -> dict[Worker, int]:
        """How long a prefix of a request each worker is taken to have, in tokens. Changes
        nothing."""
        cached = self._cached(self._hasher.prefixes(units, namespace))
        return {name: int(cached[entry.slot]) for name, entry in self._workers.items()}

    def _cached(self, prefixes: Prefixes) -> NDArray[np.float64]:
        """By slot. Less than all of the prompt: its last token is computed in any case."""
        num_slots = len(self._slots)
        num_bytes = -(-num_slots // 8)
        found = self._sent_tree.matches(prefixes.keys) + self._told_index.matches(prefixes.keys)
        most = max(0, prefixes.num_tokens - 1)
        nums = np.array([min(ladder_length(n) * self.block_size, most) for n, _ in found], float)
        sets = b"".join(workers.to_bytes(num_bytes, "little") for _, workers in found)
        bits = np.frombuffer(sets, np.uint8).reshape(len(found), num_bytes)
        has_it = np.unpackbits(bits, axis=1, count=num_slots, bitorder="little")
        return np.maximum.reduce(nums[:, None] * has_it, axis=0, initial=0.0)

    def _waiting(self, loads: Mapping[Worker, Load] | None) -> NDArray[np.float64]:
        """What a request would have to wait for, by slot; infinite where there is no worker."""
        waiting: NDArray[np.float64] = self._queued + self._writing + self._closed
        for worker, load in (loads or {}).items():
            if (entry := self._workers.get(worker)) is not None:
                slot = entry.slot
                own = self._running[slot]
                of_each = self._writing[slot] / own if own else self.cost.output_tokens
                waiting[slot] = load.num_queued_tokens + load.num_running * of_each
        return waiting

    def _pick(
        self, num_tokens: int, cached: NDArray[np.float64], waiting: NDArray[np.float64]
    ) -> int:
        """The slot with the least cost; of equals the one where the least waits, then the one that
        was sent the least to compute."""
        costs = num_tokens - cached + waiting
        slots = np.flatnonzero(costs == costs.min())
        if len(slots) > 1:
            slots = slots[np.lexsort((self._sent[slots], waiting[slots]))]
        return int(slots[0])

    def _stay(
        self, group: tuple[Namespace, Hashable], cheapest: int, costs: NDArray[np.float64]
    ) -> int:
        """The slot where the group is, or where it moves to."""
        entry = self._groups.get(group)
        slot = cheapest if entry is None else entry.slot
        if costs[slot] > costs[cheapest] + self.cost.group_patience_tokens:
            slot = cheapest
        moved_to = self._slots[slot]
        assert moved_to is not None
        self._groups[group] = moved_to
        self._groups.move_to_end(group)
        if len(self._groups) > MAX_GROUPS:
            self._groups.popitem(last=False)
        return slot

    def _expire_some(self, now_s: float) -> None:
        """One worker's turn: with N workers, what is too old is counted on for N more choices."""
        self._expire_next = (self._expire_next + 1) % len(self._slots)
        entry = self._slots[self._expire_next]
        if entry is not None:
            age_s = self.max_age_s if entry.told is None else PROMISED_AGE_S
            entry.sent.expire(now_s - age_s)

    # -- KV events ------------------------------------------------------------------------------

    def apply_events(
        self, worker: Worker, events: Iterable[Any], number: int | None = None
    ) -> bool:
        """One batch of a worker's KV events, as vLLM publishes them.

        Args:
            events: objects named and made as in `vllm.distributed.kv_events`: `BlockStored`,
                `BlockRemoved`, `AllBlocksCleared`. Blocks in the GPU's memory count, of the first
                group of a model with several; what holds images or embeddings is left out.
            number: of the batch, as published with it. After a gap all that was told of the worker
                is forgotten, and a warning logged; a batch that was seen is left out, and a 0 is a
                worker that has started anew.

        Returns:
            False after a gap. The adapter may have the batches told again, from any number on that
            the worker remembers, if it applies them next.

        Raises:
            UnknownWorker: there is no such worker.
            ValueError: it was added without events, or has larger blocks than this router.
        """
        entry = self._entry(worker)
        told = entry.told
        if told is None:
            raise ValueError(f"worker {worker!r} was added without has_events")
        is_whole = True
        if number is not None:
            expected = entry.expects_number
            if expected is not None and number != expected:
                is_old = number < expected
                if is_old and number > 0 and not entry.has_gap:
                    return True
                told.clear()
                if not is_old:
                    is_whole = False
                    self.num_gaps += 1
                    logger.warning(
                        "KV events %d to %d of worker %r are missing: what it has cached is "
                        "learnt anew",
                        expected,
                        number - 1,
                        worker,
                    )
            entry.expects_number = number + 1
            entry.has_gap = not is_whole
        for event in events:
            self._apply(told, event)
        return is_whole

    def _apply(self, told: ToldCache, event: Any) -> None:
        kind = type(event).__name__
        if kind == "AllBlocksCleared":
            told.clear()
        elif event.medium not in (None, MEDIUM_GPU) or event.group_idx:
            return
        elif kind == "BlockRemoved":
            told.remove(event.block_hashes)
        elif kind == "BlockStored":
            if event.block_size > self.block_size:
                raise ValueError(
                    f"the engine's blocks have {event.block_size} tokens, this router's "
                    f"{self.block_size}: make it with block_size={event.block_size}"
                )
            if event.block_size < self.block_size:
                return  # the begun block at the end of a prompt
            extra_keys = event.extra_keys or [None] * len(event.block_hashes)
            num_blocks = next(
                (i for i, keys in enumerate(extra_keys) if not _is_text(keys)), len(extra_keys)
            )
            if not num_blocks:
                return
            tokens = np.array(event.token_ids[: num_blocks * self.block_size], dtype=np.int32)
            told.store(
                event.block_hashes[:num_blocks],
                event.parent_block_hash,
                tokens,
                _namespace(event.lora_name, extra_keys[0]),
            )

    def _entry(self, worker: Worker) -> _Worker:
        try:
            return self._workers[worker]
        except KeyError:
            raise UnknownWorker(f"there is no worker {worker!r}") from None


def _is_text(keys: Iterable[Any] | None) -> bool:
    """Whether a block's content is its tokens alone: no image, no embeddings."""
    return all(isinstance(key, str) for key in keys or ())


def _namespace(lora: str | None, keys: Iterable[Any] | None) -> Namespace:
    """From the extra keys of a first block: the adapter's name, and the tenant's salt."""
    names = list(keys or ())
    if lora is not None and lora in names:
        names.remove(lora)
    return Namespace(lora, names[0] if names else None)
