"""The two measurements: processor time of a step, and programs per second on a virtual clock."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any  # Any: options of the plugin

from benchmarks.arms import ARMS
from benchmarks.engine_settings import SGL, STOCK
from benchmarks.pace.devices import DEVICES, FULL, NONE, PIECEWISE
from benchmarks.pace.engine import PaceEngine, Tally
from benchmarks.pace.vocabulary import Vocabulary
from benchmarks.pace.workloads import STEADY, Program, program

PASSES_PER_ROUND = 20
_FIRST_STEADY_PASSES = 40
_OTHER_PROGRAMS = 1_000_000
"""The number of the first program that warms up: other programs than those that are measured."""


@dataclass(frozen=True)
class Setup:
    """What both measurements need to know of an engine.

    Attributes:
        plugin: options of the plugin.
        writes_text: whether programs write a given text, or any legal tokens.
        longest_query: see `Runner`.
    """

    vocabulary: Vocabulary
    plugin: dict[str, Any]
    writes_text: bool = True
    longest_query: int = 1

    def engine(self, arm: str, workload: str, batch: int, *, is_steady: bool = False) -> PaceEngine:
        """One that has served a batch of other programs."""

        def made(number: int) -> Program:
            return program(workload, number, self.vocabulary, steady=is_steady)

        warm_up = 0 if is_steady else batch
        engine = PaceEngine(
            arm,
            batch,
            self.vocabulary,
            lambda number: made(
                number - warm_up if number >= warm_up else _OTHER_PROGRAMS + number
            ),
            plugin=self.plugin if arm == SGL else None,
            writes_text=self.writes_text,
            longest_query=self.longest_query,
        )
        if is_steady:
            engine.run_passes(_FIRST_STEADY_PASSES)
        else:
            engine.run_programs(batch, to_the_end=True)
        engine.take_tally()
        return engine


@dataclass(frozen=True)
class Times:
    """Microseconds of processor time of one arm, medians over rounds.

    Attributes:
        parts_us: of a step, by part; `jump` is part of the others.
        step_us: of a step: schedule, bitmask and update.
        program_us: of a program's steps, None if none ends.
    """

    parts_us: dict[str, float]
    step_us: float
    program_us: float | None
    passes: int
    programs: int


@dataclass(frozen=True)
class Ratio:
    """The plugin's time over stock's, in each round. Less is better for the plugin."""

    median: float
    middle_half: tuple[float, float]

    @classmethod
    def of(cls, stock: Sequence[float], sgl: Sequence[float]) -> Ratio:
        ratios = sorted(mine / theirs for theirs, mine in zip(stock, sgl, strict=True))
        quarter = len(ratios) // 4
        return cls(statistics.median(ratios), (ratios[quarter], ratios[-1 - quarter]))


@dataclass(frozen=True)
class StepCost:
    """What a step costs the processor, on both arms."""

    workload: str
    batch: int
    rounds: int
    arms: dict[str, Times]
    step: Ratio
    program: Ratio | None


def step_cost(
    setup: Setup, workload: str, batch: int, rounds: int, advance: Callable[[], None]
) -> StepCost:
    """Rounds of both arms alternate in one process, with the garbage collector on. In a round a
    number of programs ends, others going on; of `STEADY`, it is a number of passes instead."""
    is_steady = workload == STEADY
    engines = {arm: setup.engine(arm, workload, batch, is_steady=is_steady) for arm in ARMS}
    tallies: dict[str, list[Tally]] = {arm: [] for arm in ARMS}
    if not is_steady:  # both are in the midst of programs when they are measured
        for engine in engines.values():
            engine.run_programs(batch)
            engine.take_tally()
    with frozen_heap():
        for number in range(rounds):
            gc.collect()
            for arm in ARMS if number % 2 else reversed(ARMS):
                engine = engines[arm]
                if is_steady:
                    engine.run_passes(PASSES_PER_ROUND)
                else:
                    engine.run_programs(batch)
                tallies[arm].append(engine.take_tally())
            advance()
    steps = {arm: [one.steps_cpu_s / one.num_passes for one in tallies[arm]] for arm in ARMS}
    programs = {
        arm: [one.steps_cpu_s / one.num_programs for one in tallies[arm] if one.num_programs]
        for arm in ARMS
    }
    return StepCost(
        workload,
        batch,
        rounds,
        {arm: _times(tallies[arm]) for arm in ARMS},
        Ratio.of(steps[STOCK], steps[SGL]),
        None if is_steady else Ratio.of(programs[STOCK], programs[SGL]),
    )


def _times(tallies: Sequence[Tally]) -> Times:
    def median_us(values: Iterator[float]) -> float:
        return round(1e6 * statistics.median(values), 1)

    parts = {part for one in tallies for part in one.cpu_s} - {"arrival"}
    num_programs = sum(one.num_programs for one in tallies)
    return Times(
        {
            part: median_us(one.cpu_s.get(part, 0.0) / one.num_passes for one in tallies)
            for part in sorted(parts)
        },
        median_us(one.steps_cpu_s / one.num_passes for one in tallies),
        median_us(one.steps_cpu_s / one.num_programs for one in tallies) if num_programs else None,
        sum(one.num_passes for one in tallies),
        num_programs,
    )


@dataclass(frozen=True)
class Modelled:
    """One arm's run on a modelled device. Times are of the virtual clock.

    Attributes:
        programs_s: programs per second.
        waited_ms: the part of a pass in which the processor waits for the device.
        cpu_ms: measured processor time of the scheduler, for a pass.
        added: rows added to the batch.
        computed_tokens: of all passes.
        jumps, forced_tokens, stale_tokens, held_passes: the plugin's counters.
    """

    programs_s: float
    pass_ms: float
    waited_ms: float
    cpu_ms: float
    passes: int
    full: int
    piecewise: int
    no_graph: int
    added: int
    computed_tokens: int
    output_tokens: int
    programs: int
    jumps: int = 0
    forced_tokens: int = 0
    stale_tokens: int = 0
    held_passes: int = 0


@dataclass(frozen=True)
class PaceOn:
    """Both arms on a modelled device; `ratio` is the plugin's programs per second over stock's."""

    workload: str
    batch: int
    device: str
    arms: dict[str, Modelled]

    @property
    def ratio(self) -> float:
        return self.arms[SGL].programs_s / self.arms[STOCK].programs_s


def pace_on(
    setup: Setup,
    workload: str,
    batch: int,
    devices: Sequence[str],
    num_programs: int,
    advance: Callable[[], None],
) -> Iterator[PaceOn]:
    """So many programs from the first to the end of the last, on one device after the other."""
    runs: dict[str, list[Modelled]] = {}
    for arm in ARMS:
        engine = setup.engine(arm, workload, batch)
        with frozen_heap():
            runs[arm] = []
            for device in devices:
                gc.collect()
                engine.run_on(DEVICES[device])
                engine.run_programs(num_programs, to_the_end=True)
                runs[arm].append(_modelled(engine, engine.take_tally()))
                advance()
    for index, device in enumerate(devices):
        yield PaceOn(workload, batch, device, {arm: runs[arm][index] for arm in ARMS})


def _modelled(engine: PaceEngine, tally: Tally) -> Modelled:
    clock, passes = engine.clock, tally.counts.passes
    names = ("jumps", "forced_tokens", "stale_tokens", "held_passes")
    return Modelled(
        programs_s=tally.num_programs / clock.now_s,
        pass_ms=1e3 * clock.now_s / tally.num_passes,
        waited_ms=1e3 * clock.waited_s / tally.num_passes,
        cpu_ms=1e3 * tally.steps_cpu_s / tally.num_passes,
        passes=tally.num_passes,
        full=passes[FULL],
        piecewise=passes[PIECEWISE],
        no_graph=passes[NONE],
        added=tally.counts.added,
        computed_tokens=tally.counts.tokens,
        output_tokens=tally.output_tokens,
        programs=tally.num_programs,
        **{name: tally.jumps[name] for name in names if name in tally.jumps},
    )


class frozen_heap:
    """The garbage collector does not look at what is there now, as in an engine that serves."""

    def __enter__(self) -> None:
        gc.collect()
        gc.freeze()

    def __exit__(self, *exc_info: object) -> None:
        gc.unfreeze()
