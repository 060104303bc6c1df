"""A copy of what is packaged, because building leaves its traces in the folder."""

from __future__ import annotations

import shutil
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("benchmarks", "deploy", "examples", "kernels", "sgl_vllm", "tools")
FILES = ("LICENSE", "README.md", "pyproject.toml", "setup.py")


def copy_of_sources(folder: Path) -> Path:
    """Writes the copy into a folder that does not exist yet, and returns it."""
    folder.mkdir(parents=True)
    for name in FOLDERS:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    for name in FILES:
        shutil.copy(ROOT / name, folder)
    return folder
