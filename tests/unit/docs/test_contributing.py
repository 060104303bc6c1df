"""CONTRIBUTING.md lists every package, names files that exist, and has recipes that work."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tools import source_tree

PAGE = source_tree.SECTION.page.read_text()

RECIPE = re.compile(r"^\*\*(.+?)[:.].*?^```diff\n(.*?)^```\n.*?^```python\n(.*?)^```$", re.M | re.S)
"""The name of a recipe, its patch, and its check."""


def test_the_files_named_in_recipes_exist() -> None:
    named = re.findall(r"`([\w./]+/[\w./]*\.\w+)`", PAGE)
    missing = [name for name in named if not (source_tree.ROOT / name).exists()]
    assert len(named) > 10 and missing == []


# -- recipes ---------------------------------------------------------------------------------------


def recipes() -> dict[str, tuple[str, str]]:
    """Patch and check of each recipe, by its name."""
    parts = re.split(r"(?=^\*\*)", PAGE[PAGE.index("## Recipes") :], flags=re.M)
    found = (RECIPE.search(part) for part in parts)
    return {match[1]: (match[2], match[3]) for match in found if match is not None}


@pytest.fixture(scope="module")
def copied_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    for name in ("sgl_vllm", "tools"):
        ignored = shutil.ignore_patterns("__pycache__", "model")
        shutil.copytree(source_tree.ROOT / name, folder / name, ignore=ignored)
    return folder


def test_four_recipes_are_worked_out() -> None:
    assert list(recipes()) == [
        "A counter",
        "An eviction policy",
        "A kind of constraint",
        "A vLLM version",
    ]


@pytest.mark.parametrize("name", recipes())
def test_a_recipe_that_is_followed_works(name: str, copied_source: Path) -> None:
    patch, check = recipes()[name]
    command = [sys.executable, "-c", check]
    environment = os.environ | {"PYTHONPATH": str(copied_source)}
    before = subprocess.run(command, cwd=copied_source, env=environment, capture_output=True)
    assert before.returncode != 0, "the check passes without the patch"
    for part in re.split(r"(?=^--- a/)", patch, flags=re.M)[1:]:
        subprocess.run(
            ["git", "apply", "--recount", "--unidiff-zero", "-"],
            cwd=copied_source,
            env=environment | {"GIT_CEILING_DIRECTORIES": str(copied_source.parent)},
            # git wants line numbers, but finds a place by its context.
            input=re.sub(r"^@@$", "@@ -9 +9 @@", part, flags=re.M),
            text=True,
            check=True,
        )
    subprocess.run(command, cwd=copied_source, env=environment, check=True)
