"""docs/upgrades.md lists every place where the plugin changes vLLM."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

from sgl_vllm.vllm_api.vllm_source import installed_source
from tools.vllm_contact.ours import FOLDERS, ROOT, Sources, replacements

PAGE = (ROOT / "docs" / "upgrades.md").read_text()
_ROW = re.compile(r"^\| `(\S+)` \| \[[\w.]+\]\(\.\./(\S+)\) \|", re.MULTILINE)


def rows_below(heading: str) -> Counter[tuple[str, str]]:
    section = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return Counter(_ROW.findall(section))


def adopted_in(path: Path) -> list[str]:
    """The classes of the objects that a module's calls of `adopt` turn into subclasses."""
    found = []
    for function in ast.walk(ast.parse(path.read_text())):
        if isinstance(function, ast.FunctionDef):
            kinds = {one.arg: ast.unparse(one.annotation or one) for one in function.args.args}
            found += [
                kinds[ast.unparse(node.args[0])]
                for node in ast.walk(function)
                if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "adopt"
            ]
    return found


def test_the_table_of_patches_has_those_of_the_source_and_no_others() -> None:
    vllm = installed_source()
    if vllm is None:
        pytest.skip("there is no vLLM")
    patches = [one for one in replacements(Sources(vllm, FOLDERS)) if one.how != "overrides"]
    in_source = Counter(
        (f"{one.owner.name}.{one.method}", one.where.partition(":")[0]) for one in patches
    )
    for folder in FOLDERS.values():
        for path in folder.rglob("*.py"):
            in_source.update((name, str(path.relative_to(ROOT))) for name in adopted_in(path))
    assert rows_below("Patches") == in_source


def test_the_attributes_that_the_page_lists_are_set() -> None:
    rows = rows_below("Parts set on vLLM's objects")
    not_set = [name for name, path in rows if f"{name} = " not in (ROOT / path).read_text()]
    assert (not_set, rows.total()) == ([], 5)
