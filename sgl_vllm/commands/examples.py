"""`sgl-vllm examples`: lists, prints and copies the example programs and deployment files."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from rich.console import Console
from rich.table import Table

from sgl_vllm import shipped
from sgl_vllm.commands.arguments import argument, option
from sgl_vllm.commands.terminal import WIDTH_OF_FILES, Misused
from sgl_vllm.spelling import did_you_mean

FOLDERS = ("examples", "deploy")
ALL = "all"
DESCRIPTION = """\
Without a name, lists the example programs and configuration files that come
with the package.

With one, prints the file, or copies it:

  sgl-vllm examples classify.py
  sgl-vllm examples classify.py --copy .
  sgl-vllm examples deploy/compose.yaml
  sgl-vllm examples all --copy ./sgl-vllm-examples

No file is overwritten.
"""


def command(
    name: Annotated[str | None, argument("[NAME]", f"One of the list, or {ALL}.")] = None,
    copy: Annotated[
        Path | None, option("FOLDER", "Write it into this folder, made if missing.")
    ] = None,
) -> None:
    found = files()
    if name is None:
        if copy is not None:
            raise Misused(f"--copy needs a NAME, or {ALL}")
        print_summaries(found)
        return
    if copy is None and name == ALL:
        raise Misused(f"{ALL} needs --copy FOLDER")
    if name not in (ALL, *found):
        instead = did_you_mean(name, found, "; `sgl-vllm examples` lists them")
        raise Misused(f"unknown example {name}{instead}")
    if copy is None:
        print(found[name].read_text("utf-8"), end="")
        return
    targets = {found[one]: copy / one for one in (found if name == ALL else [name])}
    if existing := [target for target in targets.values() if target.exists()]:
        raise Misused(f"{existing[0]} exists already: choose another folder")
    for file, target in targets.items():
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target)
        print(target)


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


def print_summaries(files: Mapping[str, Path]) -> None:
    """Prints a line for each."""
    table = Table(box=None, pad_edge=False, show_header=False)
    for name, file in files.items():
        table.add_row(name, shipped.summary_of(file))
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = WIDTH_OF_FILES
    console.print(table)
