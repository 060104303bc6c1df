"""The two measurements: processor time of a step, and programs per second on a virtual clock."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any  # Any: options of the plugin

from vllm.utils.gc_utils import freeze_gc_heap

from benchmarks.arms import ARMS
from benchmarks.engine_settings import SGL, STOCK
from benchmarks.pace.devices import DEVICES, GRAPHS
from benchmarks.pace.engine import ARRIVAL, JUMP, STEP, PaceEngine, Tally
from benchmarks.pace.workloads import STEADY, Vocabulary, program

PASSES_PER_ROUND = 20
_FIRST_STEADY_PASSES = 40
_OTHER_PROGRAMS = 1_000_000
"""The number of the first program that warms up: other programs than those that are measured."""


@dataclass(frozen=True)
class Setup:
    """What both measurements need to know of an engine.

    Attributes:
        plugin: options of the plugin.
        longest_query, writes_noise: see `Runner`, `PaceEngine`.
    """

    vocabulary: Vocabulary
    plugin: dict[str, Any]
    longest_query: int = 1
    writes_noise: bool = False

    def engine(self, arm: str, workload: str, batch: int, *, is_steady: bool = False) -> PaceEngine:
        """One that has served a batch of other programs, or that decodes in the steady state."""
        engine = PaceEngine(
            arm,
            batch,
            self.vocabulary,
            lambda number: program(workload, number, self.vocabulary, steady=is_steady),
            plugin=self.plugin if arm == SGL else {},
            longest_query=self.longest_query,
            writes_noise=self.writes_noise,
        )
        if is_steady:
            engine.run_passes(_FIRST_STEADY_PASSES)
        else:
            engine.run_programs(batch, first=_OTHER_PROGRAMS)
        engine.take_tally()
        return engine


@dataclass(frozen=True)
class Case:
    """The figures of both arms in one case, by name. The plugin's include ratios to stock's.

    Attributes:
        device: the modelled one, if any.
    """

    workload: str
    batch: int
    device: str | None
    arms: dict[str, dict[str, float]]


def step_cost(
    setup: Setup, workload: str, batch: int, rounds: int, advance: Callable[[], None]
) -> Case:
    """Measure the processor time of a step, in microseconds (medians over rounds).

    Rounds of both arms alternate in one process, with the garbage collector on. In a round a number
    of programs ends, others going on; of `STEADY`, it is a number of passes instead. The ratio of a
    step comes with the middle half of the rounds'.
    """
    is_steady = workload == STEADY
    engines = {arm: setup.engine(arm, workload, batch, is_steady=is_steady) for arm in ARMS}
    tallies: dict[str, list[Tally]] = {arm: [] for arm in ARMS}

    def turn(arm: str) -> Tally:
        if is_steady:
            engines[arm].run_passes(PASSES_PER_ROUND)
        else:
            engines[arm].run_programs(batch)
        return engines[arm].take_tally()

    for arm in ARMS:  # both are in the midst of programs when they are measured
        turn(arm)
    _freeze_heap()
    for number in range(rounds):
        gc.collect()
        for arm in ARMS if number % 2 else reversed(ARMS):
            tallies[arm].append(turn(arm))
        advance()
    arms = {arm: _times(tallies[arm]) for arm in ARMS}
    steps = _ratios([_per_pass_us(tallies[arm], *STEP) for arm in ARMS])
    quarter = rounds // 4
    arms[SGL]["step_ratio"] = statistics.median(steps)
    arms[SGL]["step_ratio_low"], arms[SGL]["step_ratio_high"] = steps[quarter], steps[-1 - quarter]
    if not is_steady:
        programs = _ratios([_per_program_us(tallies[arm]) for arm in ARMS])
        arms[SGL]["program_ratio"] = statistics.median(programs)
    return Case(workload, batch, None, arms)


def _times(tallies: Sequence[Tally]) -> dict[str, float]:
    """Medians of microseconds: of a step and its parts, and of a program with its arrivals. `JUMP`
    is part of the other parts."""
    times = {"step_us": statistics.median(_per_pass_us(tallies, *STEP))}
    for part in (*STEP, JUMP, ARRIVAL):
        times[f"{part}_us"] = statistics.median(_per_pass_us(tallies, part))
    if any(one.counts["programs"] for one in tallies):
        times["program_us"] = statistics.median(_per_program_us(tallies))
    return times


def _per_pass_us(tallies: Sequence[Tally], *parts: str) -> list[float]:
    return [1e6 * sum(one.cpu_s[part] for part in parts) / one.num_passes for one in tallies]


def _per_program_us(tallies: Sequence[Tally]) -> list[float]:
    cpu_s = (one.steps_cpu_s + one.cpu_s[ARRIVAL] for one in tallies)
    return [1e6 * s / one.counts["programs"] for s, one in zip(cpu_s, tallies, strict=True)]


def _ratios(values: Sequence[Sequence[float]]) -> list[float]:
    """The plugin's over stock's in each round, the smallest first."""
    return sorted(sgl / stock for stock, sgl in zip(*values, strict=True))


def pace_on(
    setup: Setup,
    workload: str,
    batch: int,
    devices: Sequence[str],
    num_programs: int,
    advance: Callable[[], None],
) -> Iterator[Case]:
    """So many programs from the first to the end of the last, on one device after the other."""
    runs: dict[str, list[dict[str, float]]] = {arm: [] for arm in ARMS}
    for arm in ARMS:
        engine = setup.engine(arm, workload, batch)
        _freeze_heap()
        for number, device in enumerate(devices):
            gc.collect()
            engine.run_on(DEVICES[device])
            engine.run_programs(num_programs, first=number * num_programs)
            runs[arm].append(_modelled(engine, engine.take_tally()))
            advance()
    for device, stock, sgl in zip(devices, runs[STOCK], runs[SGL], strict=True):
        sgl["ratio"] = sgl["programs_s"] / stock["programs_s"]
        yield Case(workload, batch, device, {STOCK: stock, SGL: sgl})


def _modelled(engine: PaceEngine, tally: Tally) -> dict[str, float]:
    """The figures of a run on a modelled device. Times are means over passes on the virtual clock,
    except `cpu_ms`, the measured processor time of the scheduler."""
    clock, per_pass = engine.clock, 1e3 / tally.num_passes
    return {
        "programs_s": tally.counts["programs"] / clock.now_s,
        "pass_ms": per_pass * clock.now_s,
        "waited_ms": per_pass * clock.waited_s,
        "cpu_ms": per_pass * tally.steps_cpu_s,
        "passes": tally.num_passes,
        **dict.fromkeys(GRAPHS, 0),
        **tally.counts,
    }


def _freeze_heap() -> None:
    """The garbage collector does not look at what is there now, as in an engine that serves."""
    gc.unfreeze()
    freeze_gc_heap()
