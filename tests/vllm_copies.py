"""Copies of vLLM's source with one thing changed, as another version might have it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from sgl_vllm.vllm_api.vllm_source import VllmSource, installed_source
from tools.vllm_versions import build_of, source


@dataclass(frozen=True)
class Edit:
    """Replace `old` by `new` in one file, given relative to the folder `vllm`; `old` must be there.

    `count` limits how many places change.
    """

    path: str
    old: str
    new: str
    count: int = -1


def source_of(version: str) -> VllmSource:
    """A supported version, downloaded the first time (up to 0.34 GB) if it is not installed."""
    return VllmSource(source(build_of(version)))


def copy_of_vllm(folder: Path, *edits: Edit, stock: VllmSource | None = None) -> VllmSource:
    """A tree of links to vLLM's Python files (the installed one's by default), with the edited
    files as real ones. Costs about 0.2 s the first time for a folder."""
    stock = stock or installed_source()
    assert stock is not None
    if not (folder / "vllm").exists():
        _link_python_files(stock.root / "vllm", folder / "vllm")
    for edit in edits:
        path = folder / "vllm" / edit.path
        text = path.read_text()
        assert edit.old in text, f"{edit.path} has no {edit.old!r}"
        path.unlink()
        path.write_text(text.replace(edit.old, edit.new, edit.count))
    return VllmSource(folder)


def _link_python_files(origin: Path, copy: Path) -> None:
    for parent, folders, files in os.walk(origin):
        folders[:] = [name for name in folders if name != "__pycache__"]
        target = copy / Path(parent).relative_to(origin)
        target.mkdir(parents=True)
        for name in files:
            if name.endswith(".py"):
                (target / name).symlink_to(Path(parent) / name)
