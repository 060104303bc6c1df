"""How many random examples the tests of pure parts try, and how many requests an engine gets.

Owns two factors, which of a test's cases are run, and which of them nightly. With
`SGL_VLLM_TEST_EFFORT=10` there are ten times as many examples as in a usual run, which is to be
short. They are other ones in each run, so that many usual runs see as much as a long one.
`SGL_VLLM_TEST_REQUESTS` is the share of requests that are sent, a quarter where a pass is slow
(`tests/platforms`).
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from typing import Any  # Any: pytest's own type is private

import pytest

REQUESTS = "SGL_VLLM_TEST_REQUESTS"
_EFFORT = int(os.environ.get("SGL_VLLM_TEST_EFFORT", "1"))


def examples(usual: int) -> int:
    """For `hypothesis.settings(max_examples=...)`."""
    return usual * _EFFORT


def requests(usual: int) -> int:
    """How many requests to send, or how often something must have happened in them."""
    return max(1, round(usual * float(os.environ.get(REQUESTS, "1"))))


def some_nightly(
    names: Iterable[Any], quick: Collection[Any], marks: Collection[Any] = (pytest.mark.nightly,)
) -> list[Any]:
    """For `params` or `parametrize`: all names, with `marks` on those that are not in `quick`."""
    return [pytest.param(name, marks=() if name in quick else marks) for name in names]


def by_turns(rows: Iterable[Any], columns: Iterable[Any], turns: Iterable[Any]) -> list[Any]:
    """For `parametrize`: each row with each column, and with one of `turns`, the next one in each
    cell. With more effort, each cell has all of them. A cell has the marks of its row and of its
    column. A tuple, or what `pytest.param` makes of several values, is several arguments."""
    rows, columns, turns = (
        [one if isinstance(one, type(pytest.param())) else _param(one) for one in axis]
        for axis in (rows, columns, turns)
    )
    cells = []
    for i, row in enumerate(rows):
        for j, column in enumerate(columns):
            for turn in turns if _EFFORT > 1 else [turns[(i + j) % len(turns)]]:
                values = (*row.values, *column.values, *turn.values)
                name = "-".join(getattr(value, "__name__", str(value)) for value in values)
                marks = (*row.marks, *column.marks)
                cells.append(pytest.param(*values, marks=marks, id=name))
    return cells


def _param(value: Any) -> Any:
    return pytest.param(*(value if isinstance(value, tuple) else (value,)))
