"""What is packed arrives: made-up wheels through `pack.py` and `install.py`."""

from __future__ import annotations

import random
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture
def pack(script: Callable[[str], ModuleType]) -> ModuleType:
    return script("pack")


@pytest.fixture
def install(script: Callable[[str], ModuleType]) -> ModuleType:
    return script("install")


def wheel(folder: Path, name: str, files: dict[str, bytes]) -> Path:
    """`name` is `NAME-VERSION`."""
    file = folder / f"{name}-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as archive:
        for path, content in files.items():
            archive.writestr(path, content)
        archive.writestr(f"{name}.dist-info/METADATA", "Name: x")
    return file


@pytest.fixture
def pieces(pack: ModuleType, tmp_path: Path) -> list[Path]:
    """The folders of an archive of two wheels, in pieces of 1,000 bytes."""
    noise = random.Random(0).randbytes(3000)
    one = {"one/__init__.py": b"", "one/lib.so": noise, "one/big.so": noise}
    wheels = [
        wheel(tmp_path, "one-1.0", one),
        wheel(tmp_path, "two-2.0", {
            "two-2.0.data/purelib/two.py": b"TWO = 2",
            "two-2.0.data/scripts/two": b"#!python",
        }),
    ]  # fmt: skip
    archive = tmp_path / "site.tar.xz"
    pack.write_archive(wheels, archive, lambda name: name != "one/big.so")
    return [part.parent for part in pack.split(archive, tmp_path / "out", 1000, "a title")]


def test_pieces_are_small_and_make_the_whole_again(
    install: ModuleType, pieces: list[Path], tmp_path: Path
) -> None:
    assert len(pieces) >= 3
    sizes = [(piece / "part").stat().st_size for piece in pieces]
    assert max(sizes) <= 1000 and max(sizes) - min(sizes) < len(pieces)
    store, site = tmp_path / "store", tmp_path / "site"
    for piece in pieces:
        install.keep(piece, store)
    manifest = install.stored(store)
    assert [*manifest["pieces"]] == [piece.name for piece in pieces]
    install.unpack(manifest, store, site)
    found = sorted(str(file.relative_to(site)) for file in site.rglob("*") if file.is_file())
    assert found == [
        "one-1.0.dist-info/METADATA", "one/__init__.py", "one/lib.so",
        "two-2.0.dist-info/METADATA", "two.py",
    ]  # fmt: skip
    assert (site / "two.py").read_text() == "TWO = 2"
    assert len((site / "one" / "lib.so").read_bytes()) == 3000
