"""Counters, gauges and timers, each declared once in the part that counts it.

A part keeps its numbers in a dataclass whose fields declare everything that is shown of them:

    @dataclass(slots=True)
    class JumpCounters:
        jumps: int = counter("Runs of forced tokens appended to an output.", unit="runs")
        errors: int = counter("Unexpected errors.", unit="errors", metric="jump_errors")

    self.counters.jumps += 1

From the declaration come the key in `/v1/sgl/stats`, the metric in `/metrics` and the row in
docs/operations.md (`make counters`). Incrementing costs what it costs for any attribute.

Owns the declarations. Does not own which counters an engine has (`scheduler/stats.py`) nor how they
are exported (`routes/metrics.py`). Pure.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast  # Any: a field is its value to type checkers

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Counters = TypeVar("Counters", bound="DataclassInstance")
Number = int | float

_DECLARATION = "sgl_vllm counter"
_SAME_AS_KEY = "(same as key)"


class Kind(enum.StrEnum):
    """What a number is, and with that how the values of several engines are merged."""

    COUNTER = "counter"
    """Only grows. Summed over engines."""
    GAUGE = "gauge"
    """The state at this moment. Summed over engines."""
    TIMER_COUNT = "timer count"
    """How many times something was timed: the `_count` of a Prometheus summary."""
    TIMER_SUM = "timer sum"
    """The seconds that it took: the `_sum` of the same summary."""
    HIGHEST = "highest"
    """The state at this moment, in `/v1/sgl/stats` only. The highest of the engines is shown."""
    INFO = "info"
    """A constant or an estimate, in `/v1/sgl/stats` only. The first engine's is shown."""

    @property
    def metric_type(self) -> str:
        """The type in Prometheus."""
        if self in (Kind.TIMER_COUNT, Kind.TIMER_SUM):
            return "summary"
        return "gauge" if self is Kind.HIGHEST else self.value


@dataclass(frozen=True, slots=True)
class Declaration:
    """What is known of one number, apart from its value.

    Attributes:
        key: its name in the JSON of `/v1/sgl/stats`.
        help: one sentence, shown in `/metrics` and in the docs.
        unit: what is counted, such as "tokens".
        metric: its name in `/metrics`, without prefix; None for a number that is not exported.
        labels: the labels of this sample, if several numbers share a metric.
    """

    key: str
    kind: Kind
    help: str
    unit: str
    metric: str | None
    labels: tuple[tuple[str, str], ...] = ()


def counter(
    help: str,
    *,
    unit: str,
    metric: str | None = _SAME_AS_KEY,
    labels: Mapping[str, str] | None = None,
) -> int:
    """A number that only grows. See `Declaration` for the arguments."""
    return _declare(Kind.COUNTER, 0, help, unit, metric, labels)


def gauge(
    help: str,
    *,
    unit: str,
    metric: str | None = _SAME_AS_KEY,
    labels: Mapping[str, str] | None = None,
) -> int:
    """The state at the moment of asking. See `Declaration` for the arguments."""
    return _declare(Kind.GAUGE, 0, help, unit, metric, labels)


def highest(help: str, *, unit: str) -> float:
    """The state at the moment of asking, of the engine in which it is highest."""
    return _declare(Kind.HIGHEST, 0.0, help, unit, None)


def timer_count(help: str, *, metric: str) -> int:
    """How many times something was timed. `timer_sum` with the same metric takes the seconds."""
    return _declare(Kind.TIMER_COUNT, 0, help, "s", metric)


def timer_sum(help: str, *, metric: str) -> float:
    """The seconds that belong to the `timer_count` of the same metric."""
    return _declare(Kind.TIMER_SUM, 0.0, help, "s", metric)


def _declare(
    kind: Kind,
    default: Any,  # int or float, as the field is annotated
    help: str,
    unit: str,
    metric: str | None,
    labels: Mapping[str, str] | None = None,
) -> Any:  # a dataclass field, which type checkers take for its value
    declaration = Declaration("", kind, help, unit, metric, tuple((labels or {}).items()))
    return dataclasses.field(default=default, metadata={_DECLARATION: declaration})


def declarations(counters: type[DataclassInstance] | DataclassInstance) -> Iterator[Declaration]:
    """The declarations of a dataclass of counters, in the order of its fields.

    A field without a declaration is a value of kind `INFO`.
    """
    for field in dataclasses.fields(counters):
        declared: Declaration | None = field.metadata.get(_DECLARATION)
        if declared is None:
            yield Declaration(field.name, Kind.INFO, "", "", None)
            continue
        metric = field.name if declared.metric == _SAME_AS_KEY else declared.metric
        yield dataclasses.replace(declared, key=field.name, metric=metric)


def merge(engines: Sequence[Counters]) -> Counters:
    """The counters of several engines as those of one; see `Kind`. At least one is needed."""
    merged = {}
    for declared in declarations(engines[0]):
        if declared.kind is not Kind.INFO:
            numbers = [cast(Number, getattr(engine, declared.key)) for engine in engines]
            merged[declared.key] = max(numbers) if declared.kind is Kind.HIGHEST else sum(numbers)
    return dataclasses.replace(engines[0], **merged)
