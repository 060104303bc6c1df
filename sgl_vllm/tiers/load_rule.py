"""When loading cached tokens from below the GPU is cheaper than computing them again.

Owns the rule and its constants, which are measured while the engine runs. Pure: no vLLM, no clock.

    to load n tokens     fixed_s + token_s * n      (a line through measured loads)
    to compute them      token_s * n                (the slope of a line through measured passes)

Computing has no fixed part here: the request runs in a forward pass either way. So loading wins
from a number of tokens on, the break-even, or never. Until both lines are known everything is
loaded, as vLLM does.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from statistics import median

KEPT = 8
"""Measurements kept of each size; the median of them counts."""
MIN_SPREAD = 4.0
"""A line needs sizes that differ by this factor at least."""
MIN_SAMPLE_S, MAX_SAMPLE_S = 1e-6, 30.0
"""What took less was not measured; what took longer did something else too, such as sleep."""
MEASURE_AGAIN = 32
"""After so many requests whose load was declined, one loads: the tier may have become faster."""


@dataclass(frozen=True, slots=True)
class Line:
    """Seconds for so many tokens; both constants are 0 or more."""

    fixed_s: float
    token_s: float

    def seconds(self, num_tokens: float) -> float:
        return self.fixed_s + self.token_s * num_tokens


class MeasuredLine:
    """A line through the latest measurements.

    They are kept by powers of two of their size, `KEPT` of each, so that many of one size do not
    push out the others, and each size counts by its median, so that outliers do not. Errors count
    in proportion to what they are errors of. `add` is O(1), `fit` O(sizes), cached.
    """

    def __init__(self) -> None:
        self._sizes: dict[int, deque[tuple[int, float]]] = {}
        self._line: Line | None = None
        self._is_current = True

    def add(self, num_tokens: int, seconds: float) -> None:
        """One measurement. What cannot be one is passed over."""
        if num_tokens < 1 or not MIN_SAMPLE_S <= seconds <= MAX_SAMPLE_S:
            return
        size = num_tokens.bit_length()
        self._sizes.setdefault(size, deque(maxlen=KEPT)).append((num_tokens, seconds))
        self._is_current = False

    def fit(self) -> Line | None:
        """None while the sizes measured are too few or too much alike."""
        if not self._is_current:
            self._line = self._fit()
            self._is_current = True
        return self._line

    def _fit(self) -> Line | None:
        points = [
            (median(num for num, _ in samples), median(seconds for _, seconds in samples))
            for samples in self._sizes.values()
        ]
        sizes = [num for num, _ in points]
        if max(sizes) < MIN_SPREAD * min(sizes):
            return None
        # Least squares with weights 1 / seconds^2.
        weights = [1 / seconds**2 for _, seconds in points]
        total = sum(weights)
        mean_num = sum(w * num for w, (num, _) in zip(weights, points, strict=True)) / total
        mean_s = sum(w * s for w, (_, s) in zip(weights, points, strict=True)) / total
        rise = sum(
            w * (num - mean_num) * (s - mean_s) for w, (num, s) in zip(weights, points, strict=True)
        )
        run = sum(w * (num - mean_num) ** 2 for w, (num, _) in zip(weights, points, strict=True))
        token_s = max(0.0, rise / run)
        fixed_s = mean_s - token_s * mean_num
        if fixed_s < 0:
            return Line(0.0, mean_s / mean_num)
        return Line(fixed_s, token_s)


class LoadRule:
    """Whether to load, for one connector.

    Args:
        min_tokens: fewer are never loaded.
        measured: decline loads below the measured break-even too.
    """

    def __init__(self, *, min_tokens: int = 0, measured: bool = True) -> None:
        self.loads = MeasuredLine()
        self.passes = MeasuredLine()
        self._min_tokens = min_tokens
        self._measured = measured
        self._num_declined = 0

    @property
    def break_even(self) -> float:
        """From so many tokens on a load is as cheap as computing: 0 while that is not known, `inf`
        if it never is."""
        load, compute = self.loads.fit(), self.passes.fit()
        if load is None or compute is None or compute.token_s <= 0:
            return 0.0
        saved_s = compute.token_s - load.token_s
        return load.fixed_s / saved_s if saved_s > 0 else math.inf

    def declines(self, num_tokens: int) -> bool:
        """Whether so many tokens are better computed than loaded."""
        if num_tokens < self._min_tokens:
            return True
        if not self._measured or self._num_declined >= MEASURE_AGAIN:
            return False
        return num_tokens < self.break_even

    def declined(self) -> None:
        """A request was admitted without the load that it might have had."""
        self._num_declined += 1

    def loaded(self, num_tokens: int, seconds: float) -> None:
        """A load of so many tokens was measured."""
        self.loads.add(num_tokens, seconds)
        self._num_declined = 0
