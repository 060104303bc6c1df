"""Policies that choose a worker for each request of a fleet.

Owns the policies that `fleet` compares with the router, and their names. Each learns of a request's
first token and end at once, like a single router in front of all workers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from benchmarks.traces import Tokens
from sgl_vllm.routing.router import PrefixRouter


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """Where a request goes: a `Route` of policies that do not look at the prompt."""

    worker: int


class Policy(Protocol):
    """Workers are numbered from 0."""

    def choose(self, prompt: Tokens) -> Any: ...

    def first_token(self, choice: Any) -> None: ...

    def finished(self, choice: Any) -> None: ...


class RoundRobin:
    def __init__(self, num_workers: int) -> None:
        self._next = itertools.cycle(range(num_workers))

    def choose(self, prompt: Tokens) -> Choice:
        return Choice(next(self._next))

    def first_token(self, choice: Choice) -> None:
        pass

    def finished(self, choice: Choice) -> None:
        pass


class LeastLoaded:
    """The worker with the fewest unfinished requests; a random one of equals."""

    def __init__(self, num_workers: int) -> None:
        self._num_open = np.zeros(num_workers, dtype=np.int64)
        self._rng = np.random.default_rng(0)

    def choose(self, prompt: Tokens) -> Choice:
        workers = np.flatnonzero(self._num_open == self._num_open.min())
        choice = Choice(int(self._rng.choice(workers)))
        self._num_open[choice.worker] += 1
        return choice

    def first_token(self, choice: Choice) -> None:
        pass

    def finished(self, choice: Choice) -> None:
        self._num_open[choice.worker] -= 1


class PrefixAffinity(PrefixRouter):
    """The `cache_aware` policy of SGLang's router (sgl-router/src/policies/cache_aware.rs).

    It has the documented defaults, and the same index of prefixes as ours.

    If one worker has over `abs_threshold` requests more than another, and over `rel_threshold`
    times as many: the one with the fewest. Else the one with the longest match, if that is over
    `cache_threshold` of the prompt; else the one with the smallest (guessed) cache.
    """

    cache_threshold = 0.3
    abs_threshold = 64
    rel_threshold = 1.5

    def _pick(
        self, num_tokens: int, cached: NDArray[np.float64], waiting: NDArray[np.float64]
    ) -> int:
        running = self._book.running
        most, fewest = running.max(), running.min()
        if most - fewest > self.abs_threshold and most > self.rel_threshold * fewest:
            return int(running.argmin())
        if cached.max() > self.cache_threshold * num_tokens:
            return int(cached.argmax())
        return int(np.argmin([state.approx.num_blocks for state in self._workers.values()]))


def _routers(kind: type[PrefixRouter]) -> Callable[[int, int, Callable[[], float]], Policy]:
    def make(num_workers: int, cache_tokens: int, clock: Callable[[], float]) -> Policy:
        router = kind(capacity_tokens=cache_tokens, clock=clock)
        for worker in range(num_workers):
            router.add_worker(worker)
        return router

    return make


POLICIES: dict[str, Callable[[int, int, Callable[[], float]], Policy]] = {
    "round-robin": lambda num_workers, cache_tokens, clock: RoundRobin(num_workers),
    "least-loaded": lambda num_workers, cache_tokens, clock: LeastLoaded(num_workers),
    "prefix-affinity": _routers(PrefixAffinity),
    "cost": _routers(PrefixRouter),
}
"""By name: makes a policy from the number of workers, the cache tokens of each, and a clock (s)."""
