"""Sealed files: what is read is what was written, or it is an error."""

from __future__ import annotations

import mmap
import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_vllm.tiers.sealed_file import DamagedFile, read, write


def block_of(content: bytes, num_pages: int = 2) -> memoryview:
    pages = mmap.mmap(-1, num_pages * mmap.PAGESIZE)
    pages[: len(content)] = content
    return memoryview(pages)


def read_back(path: Path, name: bytes, num_pages: int = 2) -> bytes:
    block = block_of(b"", num_pages)
    read(str(path), name, block)
    return bytes(block)


@given(st.binary(max_size=2 * mmap.PAGESIZE), st.binary(max_size=40))
def test_what_was_written_is_read(content, name):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a" / "b.bin"
        block = block_of(content)
        write(str(path), name, block)
        assert read_back(path, name) == bytes(block)
        assert [each.name for each in path.parent.iterdir()] == ["b.bin"]


@given(st.data())
def test_every_damage_is_noticed_and_the_file_removed(data):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "b.bin"
        write(str(path), b"name", block_of(b"content"))
        whole = path.read_bytes()
        kind = data.draw(st.sampled_from(["flip", "cut", "insert"]))
        place = data.draw(st.integers(0, len(whole) - 1))
        if kind == "flip":
            bits = data.draw(st.integers(1, 255))
            damaged = whole[:place] + bytes([whole[place] ^ bits]) + whole[place + 1 :]
        elif kind == "cut":
            damaged = whole[:place]
        else:
            damaged = whole[:place] + b"x" + whole[place:]
        path.write_bytes(damaged)
        with pytest.raises(DamagedFile, match=r"b\.bin"):
            read_back(path, b"name")
        assert not path.exists()


def test_a_file_in_the_place_of_another_is_noticed(tmp_path):
    write(str(tmp_path / "a"), b"a", block_of(b"content"))
    os.replace(tmp_path / "a", tmp_path / "b")
    with pytest.raises(DamagedFile):
        read_back(tmp_path / "b", b"b")


def test_a_block_of_another_size_is_noticed(tmp_path):
    write(str(tmp_path / "a"), b"a", block_of(b"content", num_pages=3))
    with pytest.raises(DamagedFile):
        read_back(tmp_path / "a", b"a", num_pages=2)


def test_a_file_that_is_gone_is_an_error_of_its_own(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_back(tmp_path / "a", b"a")


def test_what_is_there_is_not_written_again(tmp_path):
    write(str(tmp_path / "a"), b"a", block_of(b"first"))
    write(str(tmp_path / "a"), b"a", block_of(b"second"))
    assert read_back(tmp_path / "a", b"a").startswith(b"first")


def test_what_cannot_be_written_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "writev", lambda file, parts: 5)
    with pytest.raises(OSError, match="5 of"):
        write(str(tmp_path / "a"), b"a", block_of(b"content"))
    assert not list(tmp_path.iterdir())
