"""What the commands have in common: arguments, a file of results, progress, versions."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any  # Any: JSON

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

import sgl_vllm as sgl
from benchmarks.arms import Row, ratio
from sgl_vllm.vllm_api import versions as vllm_versions


def positive(text: str) -> int:
    """An argument's number, which is to be 1 or more."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return number


def new_file(text: str) -> Path:
    """Argument type: a file to write, in an existing folder."""
    if not (folder := Path(text).absolute().parent).is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {folder}")
    return Path(text)


def parser_of(
    module: str, about: str | None, json_help: str = "write the numbers there too"
) -> argparse.ArgumentParser:
    """The argument parser of `python -m benchmarks.MODULE`, with `--json`."""
    made = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{module}",
        description=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--json", type=new_file, metavar="FILE", help=json_help)
    return made


def write_json(file: Path | None, content: Any) -> None:
    """Write `content` to the file given with `--json`, if any."""
    if file is not None:
        file.write_text(json.dumps(content, indent=2, default=str) + "\n")


def figures_table(*headings: str, num_left: int = 1) -> Table:
    """A table without borders. Columns after the first `num_left` hold numbers."""
    table = Table(header_style="dim", box=None, pad_edge=False)
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="left" if number < num_left else "right", no_wrap=True)
    return table


def table_of_arms(rows: Iterable[Row], numbers: Mapping[str, Mapping[str, Any]]) -> Table:
    """A line for each row that an arm has a number for, with the ratio of two arms."""
    has_ratio = len(numbers) > 1
    table = figures_table("", *numbers, *(["ratio"] if has_ratio else []))
    for name, label, form, better in rows:
        values: list[Any] = [one.get(name) for one in numbers.values()]
        cells = ["" if value is None else format(value, form) for value in values]
        times = ratio(values[0], values[1], better) if has_ratio and None not in values else None
        if any(cells):
            table.add_row(label, *cells, "" if times is None else f"{times:.3f}")
    return table


def progress_bars(console: Console) -> Progress:
    """A line each for what is under way and what is done."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    )


def show_wait(progress: Progress, task: TaskID, label: str, waited_s: float) -> None:
    """That a server has been starting for so long."""
    progress.update(task, description=f"{label}: starting, {waited_s:.0f} s")


def versions(*packages: str) -> dict[str, str]:
    """Of what runs here, with these packages; servers that run elsewhere may have others."""
    vllm = vllm_versions.installed_vllm()
    found = {"sgl_vllm": sgl.__version__, "python": sys.version.split()[0]}
    if vllm is not None:
        found["vllm"] = f"{vllm.version} ({vllm.build})"
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
