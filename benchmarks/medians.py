"""Rounds of a measurement, put together."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Figures = TypeVar("Figures", bound="DataclassInstance")


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
