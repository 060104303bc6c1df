"""When loading cached tokens from below the GPU is cheaper than computing them again.

Owns the rule and its constants, which are measured while the engine runs. Pure: no vLLM, no clock.

    to load n tokens     fixed_s + token_s * n      (a line through measured loads)
    to compute them      token_s * n                (the slope of a line through measured passes)

Computing has no fixed part, because the request runs in a forward pass either way. So loading is
cheaper from some number of tokens on, the break-even point, or never. Until both lines are known,
everything is loaded, as in vLLM.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from statistics import median

import numpy as np

KEPT = 8
"""How many measurements of each size are kept. Their median is used."""
MIN_SPREAD = 4.0
"""A line needs sizes that differ by at least this factor."""
MIN_SAMPLE_S, MAX_SAMPLE_S = 1e-6, 30.0
"""Samples outside of this range are dropped: too short to measure, or interrupted by a sleep."""
MEASURE_AGAIN = 32
"""After this many declined loads one is made anyway, because the tier may have become faster."""


@dataclass(frozen=True, slots=True)
class Line:
    """Seconds as a linear function of tokens. Both constants are 0 or more."""

    fixed_s: float
    token_s: float

    def seconds(self, num_tokens: float) -> float:
        return self.fixed_s + self.token_s * num_tokens


class MeasuredLine:
    """A line through the latest measurements.

    Measurements are grouped by size in powers of two, and the last `KEPT` of each group stay, so
    that many of one size do not replace the others. Each group counts by its median, so that
    outliers do not count. The fit minimizes relative errors. `add` is O(1); `fit` is O(groups) and
    cached.
    """

    def __init__(self) -> None:
        self._sizes: dict[int, deque[tuple[int, float]]] = {}
        self._line: Line | None = None
        self._is_current = True

    def add(self, num_tokens: int, seconds: float) -> None:
        """Add one measurement. Values that cannot be right are ignored."""
        if num_tokens < 1 or not MIN_SAMPLE_S <= seconds <= MAX_SAMPLE_S:
            return
        size = num_tokens.bit_length()
        self._sizes.setdefault(size, deque(maxlen=KEPT)).append((num_tokens, seconds))
        self._is_current = False

    def fit(self) -> Line | None:
        """The line; None while too few different sizes have been measured."""
        if not self._is_current:
            self._line = self._fit()
            self._is_current = True
        return self._line

    def _fit(self) -> Line | None:
        points = [
            (median(num for num, _ in samples), median(seconds for _, seconds in samples))
            for samples in self._sizes.values()
        ]
        sizes, times = np.transpose(points)
        if sizes.max() < MIN_SPREAD * sizes.min():
            return None
        weights = 1 / times
        token_s, fixed_s = np.polyfit(sizes, times, 1, w=weights).tolist()
        mean_num, mean_s = np.average(points, axis=0, weights=weights**2).tolist()
        if token_s < 0:
            return Line(mean_s, 0.0)
        return Line(fixed_s, token_s) if fixed_s >= 0 else Line(0.0, mean_s / mean_num)


class LoadRule:
    """Decides which loads of one connector are made.

    Args:
        min_tokens: loads of fewer tokens are never made.
        measured: also decline loads below the measured break-even point.
    """

    def __init__(self, *, min_tokens: int = 0, measured: bool = True) -> None:
        self._min_tokens = min_tokens
        self._measured = measured
        self.forget()

    def forget(self) -> None:
        """Begin again, as if nothing was measured."""
        self.loads = MeasuredLine()
        self.passes = MeasuredLine()
        self._num_declined = 0

    @property
    def break_even(self) -> float:
        """The number of tokens from which on loading is as cheap as computing. 0 while it is not
        known; `inf` if there is none."""
        load, compute = self.loads.fit(), self.passes.fit()
        if load is None or compute is None or compute.token_s <= 0:
            return 0.0
        saved_s = compute.token_s - load.token_s
        return load.fixed_s / saved_s if saved_s > 0 else math.inf

    def declines(self, num_tokens: int) -> bool:
        """Whether to compute `num_tokens` instead of loading them."""
        if num_tokens < self._min_tokens:
            return True
        if not self._measured or self._num_declined >= MEASURE_AGAIN:
            return False
        return num_tokens < self.break_even

    def declined(self) -> None:
        """Record that a request was admitted without a load that was possible."""
        self._num_declined += 1

    def loaded(self, num_tokens: int, seconds: float) -> None:
        """Record a measured load."""
        self.loads.add(num_tokens, seconds)
        self._num_declined = 0
