"""What one engine reports at `/v1/sgl/stats`: its counters, and which parts are on.

Owns the shape of the report and how reports of several engines become one. Does not own the
counters, which each part declares itself (`counters.py`).
"""

from __future__ import annotations

import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any  # Any: JSON

from sgl_vllm.approximate.reuse import ApproximateCounters
from sgl_vllm.counters import Declaration, counter, declarations, merge, timer_count, timer_sum
from sgl_vllm.fsm.vllm.backend import BackendCounters
from sgl_vllm.jump.counters import JumpCounters
from sgl_vllm.programs.admission import AdmissionGauges
from sgl_vllm.programs.states import ProgramGauges
from sgl_vllm.radix.misses import MissCounters
from sgl_vllm.radix.stats import EvictionCounters, RadixCounters, RadixGauges
from sgl_vllm.scheduler.queue import OrderCounters
from sgl_vllm.scheduler.select import SelectCounters
from sgl_vllm.tiers.connector import TierStats

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

ON = "on"
"""The state of a part that works. Any other state is the reason why it is off."""


@dataclass(slots=True)
class StepCounters:
    """Steps since start."""

    forward_passes: int = counter("Steps in which the model ran.", unit="steps")


@dataclass(slots=True)
class StepTimes:
    """Seconds of the engine core's loop, by what it does (`step_times.py`)."""

    schedule_s: float = counter("Time spent scheduling.", unit="s", metric="schedule_seconds")
    execute_s: float = counter(
        "Time spent starting forward passes.", unit="s", metric="execute_seconds"
    )
    sample_s: float = counter("Time spent starting sampling.", unit="s", metric="sample_seconds")
    wait_s: float = counter("Time spent waiting for a pass.", unit="s", metric="wait_seconds")
    update_s: float = counter(
        "Time spent updating requests with their tokens.", unit="s", metric="update_seconds"
    )


@dataclass(slots=True)
class GraphPasses:
    """Passes since start by their CUDA graph. vLLM tells it with `--cudagraph-metrics`."""

    full_graph_passes: int = counter(
        "Passes in a full CUDA graph, with `--cudagraph-metrics`.", unit="passes"
    )
    piecewise_graph_passes: int = counter(
        "Passes in piecewise CUDA graphs, with `--cudagraph-metrics`.", unit="passes"
    )
    no_graph_passes: int = counter(
        "Passes in no CUDA graph, with `--cudagraph-metrics`.", unit="passes"
    )


@dataclass(slots=True)
class BitmaskCounters:
    """Bitmasks since start, of every structured-output backend."""

    masked_steps: int = timer_count(
        "Time that a step with structured requests waits for their bitmasks, of any backend.",
        metric="mask_seconds",
    )
    mask_s: float = timer_sum("Total time spent waiting for bitmasks.", metric="mask_seconds")


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The report of one engine, or the merged report of several.

    Attributes:
        parts: for each part `ON`, or why it is off.

    All other fields are counters, None for a part that the engine does not have. A part that was
    switched off while serving keeps those that it had. `SECTIONS` says where they are in the JSON.
    """

    version: str = ""
    parts: Mapping[str, str] = field(default_factory=dict)
    steps: StepCounters | None = None
    times: StepTimes | None = None
    graphs: GraphPasses | None = None
    radix: RadixCounters | None = None
    evictions: EvictionCounters | None = None
    cache: RadixGauges | None = None
    misses: MissCounters | None = None
    programs: ProgramGauges | None = None
    tiers: TierStats | None = None
    schedule: OrderCounters | None = None
    admission: AdmissionGauges | None = None
    fsm: BackendCounters | None = None
    structured_output: BitmaskCounters | None = None
    jump_forward: JumpCounters | None = None
    select: SelectCounters | None = None
    approximate: ApproximateCounters | None = None

    def sections(self) -> Iterator[tuple[str, DataclassInstance]]:
        """The counters of the parts that are on, with their key in the JSON."""
        for name, key in SECTIONS.items():
            if (counters := getattr(self, name)) is not None:
                yield key, counters

    def to_json(self) -> dict[str, Any]:
        """The body of `/v1/sgl/stats`. A part that is off has an empty object."""
        body: dict[str, Any] = {"version": self.version, "parts": dict(self.parts)}
        for key in SECTIONS.values():
            if key:
                body[key] = {}
        for key, counters in self.sections():
            values = {one.key: getattr(counters, one.key) for one in declarations(counters)}
            (body[key] if key else body).update(values)
        return body


_FLATTENED = {"steps": "", "times": "", "graphs": "", "evictions": "radix", "cache": "radix"}

SECTIONS: Mapping[str, str] = {
    one.name: _FLATTENED.get(one.name, one.name)
    for one in fields(EngineStats)
    if one.name not in ("version", "parts")
}
"""The key in the JSON for each field of `EngineStats` that holds counters. With an empty key its
numbers are at the top of the JSON."""


def merge_stats(engines: Sequence[EngineStats]) -> EngineStats:
    """The reports of all engines of a server as one. A part that is off in one engine is off."""
    parts: dict[str, str] = {}
    for engine in engines:
        for part, state in engine.parts.items():
            if parts.get(part, ON) == ON:
                parts[part] = state
    merged = {}
    for name in SECTIONS:
        reported = [one for engine in engines if (one := getattr(engine, name)) is not None]
        if reported:
            merged[name] = merge(reported)
    version = next((engine.version for engine in engines if engine.version), "")
    return EngineStats(version, parts, **merged)


def declared_counters() -> Iterator[tuple[str, Declaration]]:
    """Every counter that an engine can report, with the key of its section in the JSON."""
    types = typing.get_type_hints(EngineStats)
    for name, key in SECTIONS.items():
        (counters,) = (one for one in typing.get_args(types[name]) if one is not type(None))
        for declared in declarations(counters):
            yield key, declared
