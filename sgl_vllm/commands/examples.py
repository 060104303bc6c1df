"""`sgl-vllm examples`: lists, prints and copies the example programs and deployment files."""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from sgl_vllm import shipped
from sgl_vllm.commands.terminal import WIDTH_OF_FILES
from sgl_vllm.spelling import did_you_mean

FOLDERS = ("examples", "deploy")
DESCRIPTION = """\
Without a name, lists the example programs and configuration files that come with
the package. With one, prints the file, or copies it:

  sgl-vllm examples classify.py
  sgl-vllm examples classify.py --copy .
  sgl-vllm examples deploy/compose.yaml
  sgl-vllm examples all --copy ./sgl-vllm-examples
"""
ALL = "all"


def declare(command: argparse.ArgumentParser) -> None:
    command.add_argument("name", nargs="?", metavar="NAME", help=f"one of the list, or {ALL}")
    command.add_argument(
        "--copy", type=Path, metavar="FOLDER", help="write it into this folder, made if missing"
    )


def main(options: argparse.Namespace) -> int:
    found = files()
    if options.name is None and options.copy is None:
        table = Table(box=None, pad_edge=False, show_header=False)
        for name, file in found.items():
            table.add_row(name, shipped.summary_of(file))
        console = Console(highlight=False)
        if not console.is_terminal:
            console.width = WIDTH_OF_FILES
        console.print(table)
        return 0
    names = list(found) if options.name == ALL else [options.name]
    if options.copy is None and options.name == ALL:
        return _misused(f"{ALL} needs --copy FOLDER")
    if unknown := [name for name in names if name not in found]:
        instead = did_you_mean(unknown[0], found, "; `sgl-vllm examples` lists them")
        return _misused(f"unknown example {unknown[0]}{instead}")
    if options.copy is None:
        print(found[options.name].read_text("utf-8"), end="")
        return 0
    targets = {found[name]: options.copy / name for name in names}
    if existing := [target for target in targets.values() if target.exists()]:
        return _misused(f"{existing[0]} exists already: choose another folder")
    for file, target in targets.items():
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target)
        print(target)
    return 0


def files() -> dict[str, Path]:
    """The files by the name that the command gives them: programs by their path below `examples`,
    others by that below the repository's root."""
    root, found = shipped.folder(), {}
    for folder in FOLDERS:
        base = root / folder if folder == "examples" else root
        for file in sorted((root / folder).rglob("*")):
            if file.is_file() and "__pycache__" not in file.parts:
                found[file.relative_to(base).as_posix()] = file
    return found


def _misused(message: str) -> int:
    print(f"sgl-vllm examples: {message}", file=sys.stderr)
    return 2
