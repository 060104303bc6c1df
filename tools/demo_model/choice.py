"""Skewed random choice, shared by all writers of training text."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import TypeVar

T = TypeVar("T")


def pick(rng: Random, options: Sequence[T], skew: float = 2.0) -> T:
    """One of `options`, earlier ones more often: position = length * u ** skew, u uniform."""
    return options[int(len(options) * rng.random() ** skew)]
