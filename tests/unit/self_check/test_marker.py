"""The file that a check leaves if its process dies, and only then."""

import subprocess
import sys
from pathlib import Path

import pytest

from sgl_vllm.self_check.marker import DeviceLost, Marker, default_folder

FACTS = {"model": "m", "device": "H100"}

CHILD = """
import os, sys
from pathlib import Path
from sgl_vllm.self_check.marker import Marker
with Marker(Path(sys.argv[1]), {"model": "m", "device": "H100"}).held():
    print("held", flush=True)
    sys.stdin.readline()
    os._exit(1)
"""


def test_it_is_there_while_the_check_runs_and_gone_after(tmp_path: Path):
    marker = Marker(tmp_path, FACTS)
    with marker.held():
        (path,) = tmp_path.iterdir()
        assert '"device": "H100"' in path.read_text()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, RuntimeError])
def test_it_goes_if_the_check_ends_in_any_ordinary_way(tmp_path: Path, error):
    with pytest.raises(error), Marker(tmp_path, FACTS).held():
        raise error
    assert list(tmp_path.iterdir()) == []


def test_it_stays_if_the_device_is_lost(tmp_path: Path):
    marker = Marker(tmp_path, FACTS)
    with pytest.raises(DeviceLost), marker.held():
        raise DeviceLost
    assert marker.abandoned() == [*tmp_path.iterdir()] != []
    assert Marker(tmp_path, {**FACTS, "device": "H200"}).abandoned() == []
    marker.forget()
    assert list(tmp_path.iterdir()) == []


def test_it_counts_once_its_process_is_dead(tmp_path: Path):
    marker = Marker(tmp_path, FACTS)
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "held\n"
    assert marker.abandoned() == []  # another engine is being checked right now
    child.communicate("\n")
    assert len(marker.abandoned()) == 1


def test_a_folder_that_cannot_be_written_prevents_nothing(tmp_path: Path):
    (tmp_path / "file").write_text("")
    marker = Marker(tmp_path / "file" / "folder", FACTS)
    with marker.held():
        assert marker.abandoned() == []


def test_where_it_is(monkeypatch):
    monkeypatch.setenv("SGL_VLLM_CACHE", "/somewhere")
    assert default_folder() == Path("/somewhere/self_check")
    monkeypatch.delenv("SGL_VLLM_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert default_folder() == Path("/cache/sgl_vllm/self_check")


def test_a_user_without_a_home_has_a_folder(monkeypatch):
    for name in ("SGL_VLLM_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    assert default_folder().parts[-2:] == ("sgl_vllm", "self_check")
