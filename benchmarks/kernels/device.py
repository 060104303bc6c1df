"""What the kernels' benchmarks have in common: the device, times on it, tables."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence

import torch
from rich.table import Table

NO_CUDA = (
    "Times need a CUDA device, and there is none here: below are the bytes of each case, counted, "
    "and how far results are off on a small case of its kind in Triton's interpreter."
)

WIDTH_OF_FILES = 160
"""In characters, where output goes to no terminal."""


def prepare() -> bool:
    """Whether there is a CUDA device; without one, Triton interprets what is imported from now on.

    Raises:
        RuntimeError: Triton was imported before this could be said.
    """
    if torch.cuda.is_available():
        return True
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("without CUDA, set TRITON_INTERPRET=1 before triton is imported")
    os.environ["TRITON_INTERPRET"] = "1"
    return False


def milliseconds(call: Callable[[], object]) -> float:
    """The median over repetitions on the GPU, its L2 cache emptied before each. A call that keeps
    the GPU waiting for the CPU takes that time too."""
    from triton.testing import do_bench

    return do_bench(call, return_mode="median")


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """Columns after the first to the right; those that are empty in all rows are left out."""
    made = Table(header_style="dim", box=None, pad_edge=False)
    shown = [number for number in range(len(columns)) if any(row[number] for row in rows)]
    for number in shown:
        made.add_column(columns[number], justify="right" if number else "left", no_wrap=True)
    for row in rows:
        made.add_row(*(row[number] for number in shown))
    return made


def number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
