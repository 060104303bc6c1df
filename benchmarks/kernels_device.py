"""What the kernels' benchmarks have in common: the device, times on it, the command's frame."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.command import check_folders, versions

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


def run_command(
    module: str,
    explanation: str | None,
    measure_all: Callable[[bool], list[dict[str, Any]]],
    show: Callable[[Sequence[dict[str, Any]]], Table],
    argv: Sequence[str] | None,
) -> int:
    """Parse, measure, print, write. `measure_all` is told whether there is CUDA."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {module}",
        description=explanation,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there too")
    arguments = parser.parse_args(argv)
    try:
        check_folders(json=arguments.json, data=None)
    except ValueError as error:
        parser.error(str(error))
    has_cuda = prepare()
    console = Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = WIDTH_OF_FILES
    console.print(torch.cuda.get_device_name() if has_cuda else NO_CUDA)
    rows = measure_all(has_cuda)
    console.print(show(rows))
    if arguments.json:
        content = {
            "device": torch.cuda.get_device_name() if has_cuda else None,
            "versions": versions("torch", "triton"),
            "rows": rows,
        }
        arguments.json.write_text(json.dumps(content, indent=2) + "\n")
    return 0
