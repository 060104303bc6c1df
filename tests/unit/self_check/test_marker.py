"""The file that a check leaves if its process dies, and only then."""

import contextlib
import errno
import fcntl
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from sgl_vllm.self_check import marker as marker_module
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


@pytest.mark.parametrize("error", [None, KeyboardInterrupt, SystemExit, RuntimeError, DeviceLost])
def test_it_is_there_while_the_check_runs_and_stays_only_if_the_device_is_lost(tmp_path, error):
    marker = Marker(tmp_path, FACTS)
    with contextlib.suppress(*filter(None, [error])), marker.held():
        (path,) = tmp_path.iterdir()
        assert '"device": "H100"' in path.read_text() and marker.abandoned() == []
        if error is not None:
            raise error
    assert marker.abandoned() == [*tmp_path.iterdir()] == [path] * (error is DeviceLost)
    assert Marker(tmp_path, {**FACTS, "device": "H200"}).abandoned() == []
    marker.forget()
    assert [*tmp_path.iterdir()] == []


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


@pytest.mark.parametrize("call", ["mkstemp", "flock", "write", "fsync"])
def test_a_file_that_cannot_be_made_locked_or_filled_prevents_nothing(tmp_path, monkeypatch, call):
    def fail(*args: object) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    owner = {"mkstemp": tempfile, "flock": fcntl}.get(call, os)
    monkeypatch.setattr(owner, call, fail)
    with Marker(tmp_path, FACTS).held():
        assert list(tmp_path.iterdir()) == []


def test_a_file_has_its_name_only_when_it_is_locked(tmp_path, monkeypatch):
    seen_unlocked = []
    lock = fcntl.flock

    def look_first(handle: int, how: int) -> None:
        seen_unlocked.extend(Marker(tmp_path, FACTS).abandoned())
        lock(handle, how)

    monkeypatch.setattr(marker_module.fcntl, "flock", look_first)
    with Marker(tmp_path, FACTS).held():
        pass
    assert seen_unlocked == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_process_that_is_asked_to_stop_leaves_none_and_stops_as_it_would(tmp_path, number):
    got: list[int] = []
    usual = signal.signal(number, lambda number, frame: got.append(number))
    try:
        with Marker(tmp_path, FACTS).held():
            signal.raise_signal(number)
            assert got == [number]
            assert list(tmp_path.iterdir()) == []
        signal.raise_signal(number)
        assert got == [number, number]
    finally:
        signal.signal(number, usual)


def test_where_it_is(monkeypatch):
    monkeypatch.setenv("SGL_VLLM_CACHE", "/somewhere")
    assert default_folder() == Path("/somewhere/self_check")
    monkeypatch.delenv("SGL_VLLM_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert default_folder() == Path("/cache/sgl_vllm/self_check")
