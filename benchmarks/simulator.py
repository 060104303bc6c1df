"""Runs a trace through vLLM's real scheduler and KV-cache manager, without a model.

Owns the loop of vLLM's engine core (`step`, and `step_with_batch_queue` for asynchronous
scheduling) with a virtual clock, and the model's stand-in: a cost for every step, and the reply
that the trace holds. Everything else is what serves: `Scheduler` and `AsyncScheduler`, or the
plugin's two classes over them. See docs/benchmarks.md.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import math
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from benchmarks.arms import percentile
from benchmarks.comparison import Result
from benchmarks.cost_model import CostModel
from benchmarks.engine_settings import EngineSettings
from benchmarks.schedulers import engine_request, make_block_hasher, make_scheduler, runner_output
from benchmarks.traces import Call, Trace
from sgl_vllm.protocol.request_keys import ENDS, PROGRAM
from sgl_vllm.radix.invariants import check_pool
from sgl_vllm.scheduler.scheduler import SglSchedulerMixin


class SimulationError(Exception):
    """The scheduler lost or kept something that it should not have, or cannot go on."""


# -- the engine -----------------------------------------------------------------------------------


class Clock:
    """Stands in for the module `time`, and shows `now_s` whatever it is asked for."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def time(self) -> float:
        return self.now_s

    monotonic = perf_counter = time

    def time_ns(self) -> int:
        return round(self.now_s * 1e9)

    monotonic_ns = perf_counter_ns = time_ns

    @contextmanager
    def rules(self, *packages: str) -> Iterator[None]:
        """While inside, every loaded module of `packages` that has imported `time` reads this."""
        modules = [
            module
            for name, module in sys.modules.items()
            if f"{name}.".startswith(tuple(f"{package}." for package in packages))
            and vars(module).get("time") is time  # without what modules load on demand
        ]
        for module in modules:
            module.time = self  # type: ignore[attr-defined]
        try:
            yield
        finally:
            for module in modules:
                module.time = time  # type: ignore[attr-defined]


# -- a run --------------------------------------------------------------------------------------


def _continued(trace: Trace) -> set[tuple[int, int]]:
    """Program and index of each call whose prompt a call that waits for it extends."""
    return {
        (number, before)
        for number, program in enumerate(trace.programs)
        for call in program.calls
        for before in call.after
        if np.array_equal(
            call.prompt[: len(program.calls[before].prompt)], program.calls[before].prompt
        )
    }


@dataclass(slots=True)
class Served:
    """What happened to one call so far."""

    call: Call
    arrival_s: float
    admitted_s: float | None = None
    admitted_step: int = 0
    first_token_s: float | None = None
    cached_tokens: int = 0
    ended_s: float | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """A pass that has been scheduled: when it will end and what it will sample."""

    scheduled: SchedulerOutput
    output: ModelRunnerOutput
    end_s: float


class Simulation:
    """One trace on one scheduler, once.

    With `concurrency`, so many programs run at a time (closed loop); otherwise each comes at its
    `arrival_s` (open loop), which every program of the trace then has.

    With `sends_hints`, requests say which program they belong to, and that no later one extends
    them if that is so.

    While a pass runs, an asynchronous scheduler schedules the next:

        synchronous     schedule 1 | pass 1 | update 1, schedule 2 | pass 2 | update 2 …
        asynchronous    schedule 1, 2 | pass 1 | update 1, schedule 3 | pass 2 | update 2 …
    """

    def __init__(
        self,
        trace: Trace,
        arm: str,
        settings: EngineSettings,
        cost: CostModel,
        *,
        concurrency: int | None = None,
        sends_hints: bool = False,
    ) -> None:
        if concurrency is None and not trace.is_timed:
            raise ValueError("without a concurrency, every program needs an arrival time")
        self._trace = trace
        self._cost = cost
        self._clock = Clock()
        self.scheduler = make_scheduler(arm, settings)
        self._block_hasher = make_block_hasher(self.scheduler)
        self._continued = _continued(trace) if sends_hints else None
        self._depth = 2 if settings.async_scheduling else 1
        self._num_usable_blocks = settings.num_blocks
        self.served: dict[str, Served] = {}
        self._arrivals: list[tuple[float, int, int, int]] = []  # heap: when, tie, program, call
        self._ties = itertools.count()
        self._num_unfinished = [len(program.calls) for program in trace.programs]
        self._num_awaited = [[len(c.after) for c in program.calls] for program in trace.programs]
        self._waiting_programs: Iterator[int] = iter(())
        self._busy_until_s = 0.0
        self._num_steps = self._num_preemptions = self._num_copies = self._num_computed = 0
        self._cpu_s = 0.0
        if concurrency is None:
            for index, program in enumerate(trace.programs):
                self._start_program(index, program.arrival_s or 0.0)
        else:
            self._waiting_programs = iter(range(len(trace.programs)))
            for index in itertools.islice(self._waiting_programs, concurrency):
                self._start_program(index, 0.0)

    def run(self) -> Result:
        """Serve every call.

        Raises:
            SimulationError: the scheduler is stuck, or an invariant does not hold at the end.
        """
        with self._clock.rules("sgl_vllm", "vllm.v1"):
            self._serve()
            self._check_nothing_is_left()
        return self._result()

    # -- the loop of the engine core -----------------------------------------------------------

    def _serve(self) -> None:
        scheduler = self.scheduler
        in_flight: deque[Step] = deque()
        num_idle = 0
        while True:
            self._send_arrived()
            if scheduler.has_requests():
                step = self.schedule()
                in_flight.append(step)
                num_idle = 0 if step.scheduled.total_num_scheduled_tokens else num_idle + 1
                if len(in_flight) < self._depth and (not num_idle or scheduler.has_requests()):
                    continue
            if in_flight:
                self._finish(in_flight.popleft())
            elif not self._arrivals:
                return
            if num_idle > 2 * self._depth or not (in_flight or scheduler.has_requests()):
                # Nothing to do before the next arrival.
                if self._arrivals:
                    self._clock.now_s = max(self._clock.now_s, self._arrivals[0][0])
                elif scheduler.has_unfinished_requests():
                    raise SimulationError("no request can be scheduled, and none will come")
                num_idle = 0

    def _start_program(self, program: int, arrival_s: float) -> None:
        for index, call in enumerate(self._trace.programs[program].calls):
            if not call.after:
                self._arrive(program, index, arrival_s)

    def _arrive(self, program: int, call: int, arrival_s: float) -> None:
        heapq.heappush(self._arrivals, (arrival_s, next(self._ties), program, call))

    def _send_arrived(self) -> None:
        while self._arrivals and self._arrivals[0][0] <= self._clock.now_s:
            arrival_s, _, program, index = heapq.heappop(self._arrivals)
            call = self._trace.programs[program].calls[index]
            request_id = f"{program}.{index}"
            self.served[request_id] = Served(call, arrival_s)
            params = SamplingParams(
                temperature=0.0,
                max_tokens=len(call.reply),
                ignore_eos=True,
                extra_args=self._hints_of(program, index),
            )
            request = engine_request(
                params,
                request_id=request_id,
                prompt_token_ids=call.prompt.tolist(),
                arrival_time=arrival_s,
            )
            self.scheduler.add_request(
                Request.from_engine_core_request(request, self._block_hasher)
            )

    def _hints_of(self, program: int, index: int) -> dict[str, object] | None:
        if self._continued is None:
            return None
        return {PROGRAM: program, ENDS: int((program, index) not in self._continued)}

    def schedule(self) -> Step:
        cpu_s = time.thread_time()
        scheduled = self.scheduler.schedule()
        self._cpu_s += time.thread_time() - cpu_s
        self._num_steps += scheduled.total_num_scheduled_tokens > 0
        self._num_preemptions += len(scheduled.preempted_req_ids or ())
        self._num_copies += len(scheduled.kv_cache_block_copies or ())
        for new in scheduled.scheduled_new_reqs:
            served = self.served[new.req_id]
            if served.admitted_s is None:
                served.admitted_s = self._clock.now_s
                served.admitted_step = self._num_steps
        sampled: list[list[int]] = []
        tokens: list[tuple[int, int]] = []  # before the pass, and in it
        for request_id, num_new in scheduled.num_scheduled_tokens.items():
            request = self.scheduler.requests[request_id]
            end = request.num_computed_tokens  # it counts this pass already
            num_prompt = request.num_prompt_tokens
            tokens.append((end - num_new, num_new))
            self._num_computed += max(0, min(end, num_prompt) - (end - num_new))
            reply = self.served[request_id].call.reply
            sampled.append([] if request.is_prefill_chunk else [int(reply[end - num_prompt])])
        seconds = self._cost.pass_s(tokens) if tokens else 0.0
        self._busy_until_s = max(self._busy_until_s, self._clock.now_s) + seconds
        request_ids = list(scheduled.num_scheduled_tokens)
        output = runner_output(request_ids, sampled)
        return Step(scheduled, output, self._busy_until_s)

    def _finish(self, step: Step) -> None:
        self._clock.now_s = max(self._clock.now_s, step.end_s)
        cpu_s = time.thread_time()
        results = self.scheduler.update_from_output(step.scheduled, step.output)
        self._cpu_s += time.thread_time() - cpu_s
        for result in results.values():
            for output in result.outputs:
                served = self.served[output.request_id]
                if served.first_token_s is None and output.new_token_ids:
                    served.first_token_s = self._clock.now_s
                    assert output.prefill_stats is not None
                    served.cached_tokens = output.prefill_stats.num_cached_tokens
                if output.finish_reason is not None:
                    self.after_call(output.request_id)

    def after_call(self, request_id: str) -> None:
        """Send what waited for this call, and with a limited concurrency the next program."""
        program, index = map(int, request_id.split("."))
        self.served[request_id].ended_s = self._clock.now_s
        for other, call in enumerate(self._trace.programs[program].calls):
            if index in call.after:
                self._num_awaited[program][other] -= 1
                if not self._num_awaited[program][other]:
                    self._arrive(program, other, self._clock.now_s + call.think_s)
        self._num_unfinished[program] -= 1
        if not self._num_unfinished[program]:
            for following in itertools.islice(self._waiting_programs, 1):
                self._start_program(following, self._clock.now_s)

    # -- the end -------------------------------------------------------------------------------

    def _check_nothing_is_left(self) -> None:
        scheduler = self.scheduler
        num_done = sum(served.ended_s is not None for served in self.served.values())
        if num_done != self._trace.num_calls:
            raise SimulationError(f"{num_done} of {self._trace.num_calls} calls ended")
        if scheduler.requests or scheduler.has_unfinished_requests():
            raise SimulationError("the scheduler still holds requests")
        num_free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        if num_free != self._num_usable_blocks:
            raise SimulationError(f"{num_free} of {self._num_usable_blocks} blocks are free")
        radix = scheduler.parts.radix if isinstance(scheduler, SglSchedulerMixin) else None
        if radix is not None:
            if radix.tree is None:
                raise SimulationError("the radix tree was switched off by an error: see the log")
            check_pool(radix.pool)

    def _result(self) -> Result:
        served = list(self.served.values())
        ttfts = [(one.first_token_s or 0.0) - one.arrival_s for one in served]
        prompt_tokens = sum(len(one.call.prompt) for one in served)
        cached_tokens = sum(one.cached_tokens for one in served)
        span_s = self._clock.now_s - min(one.arrival_s for one in served)
        waits_s = {
            request_id: one.admitted_s - one.arrival_s
            for request_id, one in self.served.items()
            if one.admitted_s is not None  # it may have been aborted before
        }
        is_plugin = isinstance(self.scheduler, SglSchedulerMixin)
        return Result(
            hit_rate=cached_tokens / prompt_tokens,
            ttft_mean_s=sum(ttfts) / len(ttfts),
            ttft_p50_s=percentile(ttfts, 50),
            ttft_p99_s=percentile(ttfts, 99),
            ttft_p999_s=percentile(ttfts, 99.9),
            max_wait_s=max(waits_s.values(), default=0.0),
            max_passes=_max_passes(served),
            computed_prompt_tokens=self._num_computed,
            cached_prompt_tokens=cached_tokens,
            prompt_tokens=prompt_tokens,
            throughput_requests_s=len(served) / span_s,
            requests=len(served),
            steps=self._num_steps,
            preemptions=self._num_preemptions,
            copied_blocks=self._num_copies,
            step_cpu_us_mean=self._cpu_s / self._num_steps * 1e6,
            parts=self.scheduler.sgl_vllm.stats().parts if is_plugin else {},
            waits_s=waits_s,
            program_times_s=self._program_times_s(),
        )

    def _program_times_s(self) -> dict[int, float]:
        intervals: dict[int, list[tuple[float, float]]] = {}
        for request_id, one in self.served.items():
            program, _ = request_id.split(".")
            assert one.ended_s is not None
            intervals.setdefault(int(program), []).append((one.arrival_s, one.ended_s))
        return {program: _covered_s(some) for program, some in intervals.items()}


def _covered_s(intervals: Sequence[tuple[float, float]]) -> float:
    """The length of the intervals' union."""
    length = 0.0
    until = -math.inf
    for begin, end in sorted(intervals):
        length += max(0.0, end - max(begin, until))
        until = max(until, end)
    return length


def _max_passes(served: Sequence[Served]) -> int:
    """See `Result.max_passes`; O(n log n) comparisons."""
    arrivals_before: list[float] = []  # sorted: of those admitted in earlier steps
    most = 0
    in_order = sorted(served, key=lambda one: one.admitted_step)
    for _, group in itertools.groupby(in_order, key=lambda one: one.admitted_step):
        arrivals = [one.arrival_s for one in group]
        for arrival_s in arrivals:
            num_earlier = bisect.bisect_right(arrivals_before, arrival_s)
            most = max(most, len(arrivals_before) - num_earlier)
        for arrival_s in arrivals:
            bisect.insort(arrivals_before, arrival_s)
    return most
