"""Many workers behind a router, on a trace: the loop, and what it comes to.

Owns time (a heap of arrivals and of ends of passes), the copies of the trace, and the result. The
worker is `fleet_worker`'s, the choice of one `fleet_policies`'.

As many copies of the trace as there are workers arrive over the same time, so that the load per
worker is the same for any number of them: N workers serve N times as many users. What all prompts
of the trace begin with is the same in all copies, everything else differs between them, and each
copy begins at another moment of the first tenth of the time.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks import traces
from benchmarks.cost_model import CostModel
from benchmarks.fleet_policies import POLICIES
from benchmarks.fleet_worker import Request, Worker
from benchmarks.medians import percentile
from benchmarks.traces import Tokens, Trace
from sgl_vllm.routing.prefix_hashes import PrefixHasher
from tools.engine_harness.settings import EngineSettings

START_SHARE = 0.1
"""Copies begin within this share of the time over which the trace arrives."""


@dataclass(frozen=True, slots=True)
class FleetResult:
    """What one policy came to with so many workers. Times are simulated.

    Attributes:
        imbalance: of load: the requests that a worker has, waiting or running, in the mean over
            time; the most loaded worker's over the mean of all.
        work_imbalance: the same of the prompt tokens that a worker computes.
        sent_imbalance: the same of the requests that a worker gets.
        busy_share: of the time from the first arrival to the last end, in the mean of the workers.
    """

    policy: str
    num_workers: int
    requests: int
    prompt_tokens: int
    cached_prompt_tokens: int
    hit_rate: float
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    imbalance: float
    work_imbalance: float
    sent_imbalance: float
    busy_share: float


@dataclass(frozen=True, slots=True)
class FleetRun:
    """A policy with so many workers on a trace, once. See `simulate_grid.Run`.

    `settings` are each worker's. Two runs of one `seed` get the same requests at the same times, as
    far as these do not depend on replies.
    """

    policy: str
    num_workers: int
    settings: EngineSettings
    cost: CostModel
    span_s: float
    seed: int = 0

    def carry_out(self, trace: Trace, on_call_done: Callable[[], object]) -> FleetResult:
        return Fleet(self, trace, on_call_done).run()


class Copies:
    """Prompts and block numbers of every copy of a trace, made when they are needed."""

    def __init__(self, trace: Trace, num_copies: int, block_size: int, seed: int) -> None:
        self._trace = trace
        hasher = PrefixHasher(block_size)
        self._num_common = _num_common([call.prompt for call in trace.calls()])
        self._num_common_blocks = self._num_common // block_size
        self._block_ids = [
            [
                hasher.states(hasher.blocks(np.concatenate([call.prompt, call.reply])), 0)
                for call in program.calls
            ]
            for program in trace.programs
        ]
        rng = np.random.default_rng(seed)
        self._masks = rng.integers(0, 1 << 30, num_copies, dtype=np.int32)
        self._masks[0] = 0

    def prompt(self, copy: int, program: int, call: int) -> Tokens:
        tokens = self._trace.programs[program].calls[call].prompt.copy()
        tokens[self._num_common :] ^= self._masks[copy]
        return tokens

    def request(self, copy: int, program: int, call: int) -> Request:
        one = self._trace.programs[program].calls[call]
        block_ids = self._block_ids[program][call].copy()
        block_ids[self._num_common_blocks :] ^= np.uint64(self._masks[copy]) << np.uint64(32)
        return Request(len(one.prompt), len(one.reply), block_ids.tolist())


def _num_common(prompts: list[Tokens]) -> int:
    """How many tokens all of them begin with."""
    num_common = min(map(len, prompts))
    for prompt in prompts:
        different = np.flatnonzero(prompt[:num_common] != prompts[0][:num_common])
        num_common = int(different[0]) if len(different) else num_common
    return num_common


class Fleet:
    """One run."""

    def __init__(self, run: FleetRun, trace: Trace, on_call_done: Callable[[], object]) -> None:
        self._run = run
        self._trace = trace
        self._on_call_done = on_call_done
        self._now_s = 0.0
        self._copies = Copies(trace, run.num_workers, run.settings.block_size, run.seed)
        self._workers = [Worker(run.settings, run.cost) for _ in range(run.num_workers)]
        self._policy = POLICIES[run.policy](
            run.num_workers, run.settings.cache_tokens, lambda: self._now_s
        )
        self._ties = itertools.count()
        self._events: list[tuple[float, int, Any]] = []  # heap: time, tie, worker or arrival
        self._num_awaited: dict[tuple[int, int], list[int]] = {}  # of programs that have begun
        self._under_way: dict[Request, tuple[Any, float, tuple[int, int, int]]] = {}
        self._ttfts_s: list[float] = []
        self._num_sent = np.zeros(run.num_workers)
        self._num_computed = np.zeros(run.num_workers)
        self._held_s = np.zeros(run.num_workers)  # summed over requests
        self._num_prompt = self._num_cached = 0

    def run(self) -> FleetResult:
        for arrival in self._arrivals():
            heapq.heappush(self._events, arrival)
        first_s = self._events[0][0]
        while self._events:
            self._now_s, _, event = heapq.heappop(self._events)
            if isinstance(event, int):
                if self._workers[event].end_s == self._now_s:  # else it was cut short
                    self._end_passes(event)
            else:
                self._send(*event)
        if self._under_way:
            raise RuntimeError(f"{len(self._under_way)} requests never ended")
        return self._result(self._now_s - first_s)

    def _arrivals(self) -> Iterator[tuple[float, int, Any]]:
        run = self._run
        rng = np.random.default_rng(run.seed)
        for copy in range(run.num_workers):
            timed = traces.with_span(self._trace, run.span_s, run.seed + copy)
            begin_s = rng.uniform(0.0, START_SHARE * run.span_s) if copy else 0.0
            for index, program in enumerate(timed.programs):
                assert program.arrival_s is not None
                for number, call in enumerate(program.calls):
                    if not call.after:
                        when_s = begin_s + program.arrival_s
                        yield when_s, next(self._ties), (copy, index, number)

    def _send(self, copy: int, program: int, call: int) -> None:
        prompt = self._copies.prompt(copy, program, call)
        choice = self._policy.choose(prompt)
        request = self._copies.request(copy, program, call)
        self._under_way[request] = choice, self._now_s, (copy, program, call)
        self._num_sent[choice.worker] += 1
        worker = self._workers[choice.worker]
        end_s = worker.end_s
        worker.send(request, self._now_s)
        if worker.end_s != end_s:
            self._wake(choice.worker)

    def _end_passes(self, number: int) -> None:
        ended = self._workers[number].end_passes()
        self._wake(number)
        for request in ended.first_tokens:
            choice, arrival_s, _ = self._under_way[request]
            self._policy.first_token(choice)
            self._ttfts_s.append(self._now_s - arrival_s)
            assert request.num_cached is not None
            self._num_prompt += request.num_prompt
            self._num_cached += request.num_cached
            self._num_computed[number] += request.num_prompt - request.num_cached
        for request in ended.finished:
            choice, arrival_s, where = self._under_way.pop(request)
            self._held_s[number] += self._now_s - arrival_s
            self._policy.finished(choice)
            self._send_followers(*where)
            self._on_call_done()

    def _wake(self, worker: int) -> None:
        end_s = self._workers[worker].end_s
        if end_s < math.inf:
            heapq.heappush(self._events, (end_s, next(self._ties), worker))

    def _send_followers(self, copy: int, program: int, call: int) -> None:
        calls = self._trace.programs[program].calls
        if len(calls) == 1:
            return
        awaited = self._num_awaited.setdefault(
            (copy, program), [len(other.after) for other in calls]
        )
        for number, other in enumerate(calls):
            if call in other.after:
                awaited[number] -= 1
                if not awaited[number]:
                    when_s = self._now_s + other.think_s
                    event = (when_s, next(self._ties), (copy, program, number))
                    heapq.heappush(self._events, event)

    def _result(self, span_s: float) -> FleetResult:
        busy_s = sum(worker.busy_s for worker in self._workers)
        return FleetResult(
            policy=self._run.policy,
            num_workers=self._run.num_workers,
            requests=len(self._ttfts_s),
            prompt_tokens=self._num_prompt,
            cached_prompt_tokens=self._num_cached,
            hit_rate=self._num_cached / self._num_prompt,
            ttft_mean_s=sum(self._ttfts_s) / len(self._ttfts_s),
            ttft_p50_s=percentile(self._ttfts_s, 50),
            ttft_p99_s=percentile(self._ttfts_s, 99),
            imbalance=_imbalance(self._held_s),
            work_imbalance=_imbalance(self._num_computed),
            sent_imbalance=_imbalance(self._num_sent),
            busy_share=busy_s / len(self._workers) / span_s,
        )


def _imbalance(values: NDArray[np.float64]) -> float:
    return float(values.max() / values.mean())
