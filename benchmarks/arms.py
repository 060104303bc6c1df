"""The two arms of a comparison, and their numbers beside each other.

A ratio above 1 is better for the plugin, always.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from benchmarks.engine_settings import SGL, STOCK

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


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest of the values that at least `percent` of them do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]
