"""Rounds of a measurement on two arms, put together: medians, and a table of them.

Pure. A ratio above 1 is better for the plugin, always.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from rich.table import Table

from benchmarks.engine_settings import SGL, STOCK
from sgl_vllm.server_process import Counters

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Figures = TypeVar("Figures", bound="DataclassInstance")

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


@dataclass(frozen=True)
class Round(Generic[Figures]):
    """One arm's turn."""

    figures: Figures


class ByTurns(Generic[Figures]):
    """What has alternating rounds of both arms: `stock[i]` ran just before `sgl[i]`.

    `RATIOS` are names of ratios, each with the figure that it is of, and which way is better.
    """

    RATIOS: ClassVar[Mapping[str, tuple[str, int]]]
    stock: tuple[Round[Figures], ...]
    sgl: tuple[Round[Figures], ...]

    @property
    def arms(self) -> dict[str, tuple[Round[Figures], ...]]:
        return {"stock": self.stock, "sgl": self.sgl}

    def median(self, arm: str) -> Figures:
        return median_figures([one.figures for one in self.arms[arm]])

    @property
    def ratios(self) -> dict[str, float | None]:
        return self._between(self.median("stock"), self.median("sgl"))

    @property
    def ratios_of_rounds(self) -> list[dict[str, float | None]]:
        """Of each two neighbouring turns: their spread says how far the medians' can be trusted."""
        pairs = zip(self.stock, self.sgl, strict=True)
        return [self._between(stock.figures, sgl.figures) for stock, sgl in pairs]

    def _between(self, stock: Figures, sgl: Figures) -> dict[str, float | None]:
        return {
            name: ratio(getattr(stock, figure), getattr(sgl, figure), better)
            for name, (figure, better) in self.RATIOS.items()
        }

    def spread(self, name: str) -> str:
        """From the least ratio of a round to the greatest; "" of a single round."""
        found = [one[name] for one in self.ratios_of_rounds]
        known = [one for one in found if one is not None]
        return f"{min(known):.3f} to {max(known):.3f}" if len(known) > 1 else ""


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
