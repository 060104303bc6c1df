"""Rounds of a measurement on two arms, put together: medians, and a table of them.

Pure. A ratio above 1 is better for the plugin, always.
"""

from __future__ import annotations

import math
import statistics
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from rich.table import Table

from sgl_vllm.server_process import Counters
from tools.engine_harness.settings import SGL, STOCK

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Figures = TypeVar("Figures", bound="DataclassInstance")
FiguresOfRound = TypeVar("FiguresOfRound", bound="DataclassInstance", covariant=True)
Ratios = TypeVar("Ratios")

ARMS = (STOCK, SGL)

Row = tuple[str, str, str, int]
"""What a table shows: the figure, the words, the format, and which way is better: 1 if more is, -1
if less is, 0 if it is only said."""


def ratio(stock: float, sgl: float, better: int) -> float | None:
    """How much better the plugin is, above 1; None where there is nothing to divide.

    Args:
        better: 1 if more is better, -1 if less is, 0 if neither.
    """
    over, under = (sgl, stock) if better > 0 else (stock, sgl)
    return over / under if better and under else None


class Round(Protocol[FiguresOfRound]):
    """One arm's turn."""

    @property
    def figures(self) -> FiguresOfRound: ...


class ByTurns(ABC, Generic[Figures, Ratios]):
    """What has alternating rounds of both arms: `stock[i]` ran just before `sgl[i]`."""

    stock: tuple[Round[Figures], ...]
    sgl: tuple[Round[Figures], ...]

    @staticmethod
    @abstractmethod
    def ratios_between(stock: Figures, sgl: Figures) -> Ratios: ...

    @property
    def arms(self) -> dict[str, tuple[Round[Figures], ...]]:
        return {"stock": self.stock, "sgl": self.sgl}

    def median(self, arm: str) -> Figures:
        return median_figures([one.figures for one in self.arms[arm]])

    @property
    def ratios(self) -> Ratios:
        return self.ratios_between(self.median("stock"), self.median("sgl"))

    @property
    def ratios_of_rounds(self) -> tuple[Ratios, ...]:
        """Of each two neighbouring turns: their spread says how far the medians' can be trusted."""
        pairs = zip(self.stock, self.sgl, strict=True)
        return tuple(self.ratios_between(stock.figures, sgl.figures) for stock, sgl in pairs)


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest of the values that at least `percent` of them do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def median_figures(rounds: Sequence[Figures]) -> Figures:
    """Figure by figure. The median of counts is one that occurred, the lower of the middle two;
    that of a figure which some round does not have is None."""
    medians: dict[str, Any] = {}
    for field in fields(rounds[0]):
        values = [getattr(one, field.name) for one in rounds]
        if None in values:
            medians[field.name] = None
            continue
        of_counts = all(isinstance(value, int) for value in values)
        medians[field.name] = (statistics.median_low if of_counts else statistics.median)(values)
    return type(rounds[0])(**medians)


def counted(counters: Counters) -> dict[str, int]:
    """The figures that are the server's own counts, by their names."""
    return {
        "forward_passes": counters.forward_passes,
        "prompt_tokens": counters.prompt_tokens,
        "computed_prompt_tokens": counters.computed_prompt_tokens,
        "cached_prompt_tokens": counters.cached_prompt_tokens,
        "output_tokens": counters.output_tokens,
        "forced_tokens": counters.forced_tokens,
        "preemptions": counters.preemptions,
    }


def figures_table(rows: Sequence[Row], stock: Figures, sgl: Figures) -> Table:
    """A line for each row that both arms have a value for."""
    table = Table(header_style="dim", box=None, pad_edge=False)
    table.add_column("")
    for name in ("stock", "sgl", "ratio"):
        table.add_column(name, justify="right")
    for name, label, form, better in rows:
        values = getattr(stock, name), getattr(sgl, name)
        if None not in values:
            shown = (format(value, form) for value in values)
            times = ratio(*values, better)
            table.add_row(label, *shown, "" if times is None else f"{times:.3f}")
    return table
