"""`make next` on copies of a vLLM in which hooks, drawn at random from the stubs, have moved."""

from __future__ import annotations

import ast
import random
import re
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from sgl_vllm.vllm_api.probe import problem_of
from sgl_vllm.vllm_api.stub_entries import Entry, Kind, read_entries
from sgl_vllm.vllm_api.vllm_source import VllmSource
from tests.vllm_copies import copy_of_vllm, source_of
from tools.vllm_contact.__main__ import moved_hooks, report, source_at


class Upgrade:
    """A copy of a vLLM, and by hook (module and path) where it is there; "" if it is removed."""

    def __init__(self, stock: VllmSource, folder: Path, seed: int) -> None:
        self.stock, self.copy = stock, copy_of_vllm(folder, stock=stock)
        self.random = random.Random(seed)
        self.texts = {p: p.read_text() for p in sorted((folder / "vllm").rglob("*.py"))}
        self.places: dict[tuple[str, str], str] = {}
        entries = [entry for entry in read_entries() if self._is_there(entry)]
        functions = [e for e in entries if e.kind is Kind.FUNCTION and "__" not in e.name]
        top_level = [e for e in functions if not e.owner]
        self._draw(5, functions, self._rename)
        self._draw(2, [e for e in entries if e.kind is Kind.CLASS and not e.owner], self._move)
        self._draw(1, top_level, self._move)
        self._draw(1, functions, self._rename_parameter)
        self._draw(1, [e for e in entries if e.kind is Kind.ATTRIBUTE and e.owner], self._rename)
        self._draw(1, top_level, self._remove)
        for path, text in self.texts.items():
            if text != path.read_text():
                path.unlink()
                path.write_text(text)

    def _is_there(self, entry: Entry) -> bool:
        found = self.stock.find(entry.module, entry.path.split(".")[0])
        is_needed = entry.for_release(self.stock.release) is not None
        is_here = found is not None and found[0] == entry.module
        return is_needed and is_here and problem_of(entry, self.stock) is None

    def _draw(self, number: int, entries: Sequence[Entry], change: Callable[[Entry], str]) -> None:
        """No two of one class. `change` gives the new module and path; "-" where it cannot."""
        while number:
            entry = self.random.choice(entries)
            tops = {(module, path.split(".")[0]) for module, path in self.places}
            is_new = (entry.module, entry.path.split(".")[0]) not in tops
            if is_new and (place := change(entry)) != "-":
                self.places[entry.module, entry.path] = place
                number -= 1

    def _cut(self, module: str, path: str) -> tuple[Path, list[str], list[str], list[str]]:
        """The file of a module, and its lines before, of and after a class or function."""
        source = self.stock.module(module)
        assert source is not None
        file = self.copy.root / source.path.relative_to(self.stock.root)
        node: Any = ast.parse(self.texts[file])
        for name in path.split("."):
            node = next(one for one in ast.walk(node) if getattr(one, "name", None) == name)
        start = min([node.lineno, *(one.lineno for one in node.decorator_list)]) - 1
        lines = self.texts[file].splitlines(keepends=True)
        return file, lines[:start], lines[start : node.end_lineno], lines[node.end_lineno :]

    def _sub(self, module: str, name: str, pattern: str, new: str) -> bool:
        """Replace a pattern in one class or function. Returns whether it was there."""
        path, before, lines, after = self._cut(module, name)
        text, number = re.subn(pattern, new, "".join(lines), flags=re.MULTILINE)
        self.texts[path] = "".join([*before, text, *after])
        return number > 0

    def _rename(self, entry: Entry) -> str:
        """Where a class defines it, and in its bases if they do."""
        new = f"renamed_{len(self.places)}"
        if not entry.owner:
            self._sub(entry.module, entry.name, rf"\b{entry.name}\b", new)
            return f"{entry.module}:{new}"
        owner = self.stock.find_class(entry.module, entry.owner)
        assert owner is not None
        pattern = rf"(^    |\bdef |\bself\.|\bcls\.|super\(\)\.){entry.name}\b"
        classes = [(one.module, one.name) for one in self.stock.ancestry(owner)]
        done = [one for one in classes if self._sub(*one, pattern, rf"\g<1>{new}")]
        return f"{done[0][0]}:{done[0][1]}.{new}" if done else "-"

    def _rename_parameter(self, entry: Entry) -> str:
        assert entry.signature is not None
        names = [one.name for one in entry.signature.positional if "__" not in one.name]
        owner = self.stock.find_class(entry.module, entry.owner) if entry.owner else None
        if not names or (owner is not None and entry.name not in owner.methods):
            return "-"
        self._sub(entry.module, entry.path, rf"\b{self.random.choice(names)}\b", "new_parameter")
        return f"{entry.module}:{entry.path}"

    def _move(self, entry: Entry) -> str:
        """To the end of another module, with the imports. A function gets another name, and what
        imports a class finds it there."""
        old, before, lines, after = self._cut(entry.module, entry.name)
        new = self.random.choice([p for p in self.texts if p.stem != "__init__" and p != old])
        module = ".".join(new.relative_to(self.copy.root).with_suffix("").parts)
        is_class = entry.kind is Kind.CLASS
        name = entry.name if is_class else f"renamed_{len(self.places)}"
        for path, text in self.texts.items() if is_class else ():
            if f"from {entry.module} import" in text and re.search(rf"\b{name}\b", text):
                self.texts[path] += f"\nfrom {module} import {name}\n"
        body = ast.parse(self.texts[old]).body
        imports = [ast.unparse(one) for one in body if isinstance(one, ast.ImportFrom)]
        moved = re.sub(rf"\b{entry.name}\b", name, "".join(lines))
        self.texts[old] = "".join([*before, *after])
        self.texts[new] += "\n".join(["", *imports, moved])
        return f"{module}:{name}"

    def _remove(self, entry: Entry) -> str:
        path, before, _, after = self._cut(entry.module, entry.name)
        self.texts[path] = "".join([*before, *after])
        return ""


@pytest.mark.slow
@pytest.mark.parametrize("version", ["0.32.0", pytest.param("0.33.0", marks=pytest.mark.nightly)])
def test_ten_moved_hooks_are_named_most_with_their_place(tmp_path: Path, version: str):
    upgrade = Upgrade(source_of(version), tmp_path, seed=53)
    moved = moved_hooks(upgrade.copy)
    found = {(one.module, one.path): one.place[0] if one.place else "" for one in moved}
    wrong = [hook for hook, place in upgrade.places.items() if found[hook] != place]
    assert len(wrong) <= 3
    assert not [hook for hook in wrong if not upgrade.places[hook]], (
        "nothing is like what is removed"
    )
    text = "\n".join(report("copy", upgrade.copy, moved))
    assert all(f"\n{path} of {module}: " in text for module, path in upgrade.places)


def test_a_wheel_is_read_as_its_folder_is(tmp_path: Path):
    with zipfile.ZipFile(tmp_path / "vllm-9.8.whl", "w") as wheel:
        wheel.writestr("vllm/__init__.py", "")
        wheel.writestr("vllm/_version.py", "__version__ = version = '9.8.0'")
    assert source_at(str(tmp_path / "vllm-9.8.whl"), tmp_path / "unpacked").release == (9, 8)
    with pytest.raises(ValueError, match="give a wheel, or the folder that has vllm/"):
        source_at(str(tmp_path), tmp_path)
