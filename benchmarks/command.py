"""What the commands that compare two servers have in common: arguments, progress, versions."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
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
from benchmarks.ab.servers import Arm
from benchmarks.ab.workloads.base import Texts, Vocabulary
from benchmarks.models import resolve_model
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


def one_server_arguments(
    argv: Sequence[str] | None,
    *,
    prog: str,
    description: str | None,
    rounds: int,
    quick_rounds: int,
) -> tuple[argparse.Namespace, str | Path, Texts]:
    """The arguments of a command that runs programs of random texts on one server, the model that
    they name, and its texts. Ends the process where they are wrong."""
    parser = argparse.ArgumentParser(
        prog=prog, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="shape:33m", help="demo, shape:33m, a folder, ...")
    parser.add_argument("--rounds", type=positive, default=rounds, metavar="N", help="runs of each")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument(
        "--quick", action="store_true", help=f"the demo model, {quick_rounds} of each"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there too")
    arguments = parser.parse_args(argv)
    if arguments.quick:
        arguments.model, arguments.rounds = "demo", quick_rounds
    try:
        check_folders(json=arguments.json, data=None)
        model = resolve_model(arguments.model)
        return arguments, model, Texts(Vocabulary.of(model), arguments.seed)
    except ValueError as error:
        parser.error(str(error))


def urls_of(stock: str | None, sgl_url: str | None) -> dict[Arm, str] | None:
    """Of servers that run already; None if they are to be started. ValueError for one alone."""
    if stock is None and sgl_url is None:
        return None
    if stock is None or sgl_url is None:
        raise ValueError("--stock-url and --sgl-url go together")
    return {"stock": stock.rstrip("/"), "sgl": sgl_url.rstrip("/")}


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
