"""What the commands that compare two servers have in common: arguments, progress, versions."""

from __future__ import annotations

import argparse
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

import sgl_vllm as sgl
from sgl_vllm.vllm_api import versions as vllm_versions


def positive(text: str) -> int:
    """An argument's number, which is to be 1 or more."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return number


def check_folders(*, json: Path | None, data: Path | None) -> None:
    """Raises ValueError if there is no folder to write to or to read from."""
    if json and not json.absolute().parent.is_dir():
        raise ValueError(f"--json: there is no folder {json.absolute().parent}")
    if data and not data.is_dir():
        raise ValueError(f"--data: there is no folder {data}")


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
