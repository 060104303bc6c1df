"""Runs many simulations of one trace, in this process or in several.

A run is a pure function of its arguments (but for the scheduler's CPU time), so the number of
processes changes no result.
"""

from __future__ import annotations

import concurrent.futures
import logging
import multiprocessing
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from tqdm import tqdm

from benchmarks import traces
from benchmarks.comparison import Result
from benchmarks.cost_model import CostModel
from benchmarks.traces import Trace
from tools.engine_harness.settings import EngineSettings


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

    def carry_out(self, trace: Trace) -> Result:
        """Raises simulator.SimulationError."""
        silence_vllm()
        from benchmarks.simulator import Simulation  # vLLM takes seconds to import

        if self.span_s is not None:
            trace = traces.with_span(trace, self.span_s, self.seed)
        return Simulation(
            trace,
            self.arm,
            self.settings,
            self.cost,
            concurrency=self.concurrency,
            check_kv=self.check_kv,
            sends_hints=self.sends_hints,
        ).run()


def silence_vllm() -> None:
    """Before vLLM is imported: errors only, unless the environment asks for more."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"])


def run_all(trace: Trace, runs: Sequence[Run], num_processes: int) -> list[Result]:
    """The results, in the order of `runs`.

    Raises:
        SimulationError: of any run; those that have not begun are given up.
    """
    bar = partial(tqdm, total=len(runs), unit="run", delay=2, leave=False, disable=None)
    if min(num_processes, len(runs)) == 1:
        return [run.carry_out(trace) for run in bar(runs)]
    # Not forked: vLLM has threads by now.
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(num_processes, context) as executor:
        futures = [executor.submit(run.carry_out, trace) for run in runs]
        try:
            return [future.result() for future in bar(futures)]
        except BaseException:
            executor.shutdown(wait=False, cancel_futures=True)
            raise
