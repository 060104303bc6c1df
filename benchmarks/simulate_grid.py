"""Runs many simulations of one trace, in this process or in several.

Owns what a run is, and the processes. What is run and what becomes of it is `simulate`'s; the run
itself is `simulator`'s. A run is a pure function of its arguments (but for the scheduler's CPU
time), so the number of processes changes no result.
"""

from __future__ import annotations

import concurrent.futures
import logging
import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

from benchmarks import traces
from benchmarks.comparison import Result
from benchmarks.cost_model import CostModel
from benchmarks.traces import Trace
from tools.engine_harness.settings import EngineSettings

if TYPE_CHECKING:
    from multiprocessing.sharedctypes import Synchronized

POLL_S = 0.2


Outcome_co = TypeVar("Outcome_co", covariant=True)


class Runnable(Protocol[Outcome_co]):
    """What can be run on a trace, in any process."""

    def carry_out(self, trace: Trace, on_call_done: Callable[[], object]) -> Outcome_co: ...


@dataclass(frozen=True, slots=True)
class Run:
    """One trace on one scheduler, once.

    Attributes:
        span_s: the trace's programs arrive over so many seconds; None to leave them as they are.
        seed: of the arrival times that generated programs get.
        concurrency: so many programs at a time, whenever they arrive; None for an open loop.
    """

    arm: str
    settings: EngineSettings
    cost: CostModel
    span_s: float | None = None
    seed: int = 0
    concurrency: int | None = None
    check_kv: bool = False
    sends_hints: bool = False

    def carry_out(self, trace: Trace, on_call_done: Callable[[], object]) -> Result:
        """Raises simulator.SimulationError."""
        if self.span_s is not None:
            trace = traces.with_span(trace, self.span_s, self.seed)
        from benchmarks.simulator import Simulation  # vLLM takes seconds to import

        return Simulation(
            trace,
            self.arm,
            self.settings,
            self.cost,
            concurrency=self.concurrency,
            check_kv=self.check_kv,
            sends_hints=self.sends_hints,
            on_call_done=on_call_done,
        ).run()


def silence_vllm() -> None:
    """Before vLLM is imported: errors only, unless the environment asks for more."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"])


def run_all(
    trace: Trace,
    runs: Sequence[Runnable[Outcome_co]],
    num_processes: int,
    on_calls_done: Callable[[int], object],
) -> list[Outcome_co]:
    """The results, in the order of `runs`; `on_calls_done` hears how many calls ended since it last
    did.

    Raises:
        SimulationError: of any run; the others are given up.
    """
    if min(num_processes, len(runs)) == 1:
        return [run.carry_out(trace, lambda: on_calls_done(1)) for run in runs]
    # Not forked: vLLM has threads by now.
    context = multiprocessing.get_context("spawn")
    num_done = context.Value("q", 0)
    seen = 0
    with concurrent.futures.ProcessPoolExecutor(
        min(num_processes, len(runs)), context, _set_up_worker, (trace, num_done)
    ) as executor:
        futures = [executor.submit(_run_in_worker, run) for run in runs]
        pending = set(futures)
        try:
            while pending:
                done, pending = concurrent.futures.wait(
                    pending, POLL_S, concurrent.futures.FIRST_EXCEPTION
                )
                now = num_done.value
                on_calls_done(now - seen)
                seen = now
                for future in done:
                    future.result()
        except BaseException:
            executor.shutdown(wait=False, cancel_futures=True)
            raise
    return [future.result() for future in futures]


@dataclass(frozen=True, slots=True)
class _Work:
    """What a worker process has for all its runs."""

    trace: Trace
    num_done: Synchronized[int]


_work: _Work | None = None


def _set_up_worker(trace: Trace, num_done: Synchronized[int]) -> None:
    global _work
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C: the parent alone says so
    silence_vllm()
    _work = _Work(trace, num_done)


def _run_in_worker(run: Runnable[Outcome_co]) -> Outcome_co:
    assert _work is not None
    num_done = _work.num_done

    def count() -> None:
        with num_done.get_lock():
            num_done.value += 1

    return run.carry_out(_work.trace, count)
