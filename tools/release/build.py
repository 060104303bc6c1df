"""Builds the wheel and the sdist so that the same sources give the same bytes.

Owns what setuptools leaves to chance: times, owners and modes of files. Does not own what is
packaged (pyproject.toml).
"""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

UMASK = 0o022


def build(source: Path, into: Path, epoch_s: int) -> tuple[Path, Path]:
    """The paths of the wheel and the sdist in `into`.

    The wheel is built from the sdist, as an installation from the sdist would. It needs setuptools
    in this environment.

    Args:
        source: a folder with the sources; building leaves files in it.
        into: where the two files go.
        epoch_s: the time that all their content gets, in seconds since 1970.

    Raises:
        subprocess.CalledProcessError: setuptools failed; `stderr` says why.
    """
    into.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        raw = _run_hook("build_sdist", source, Path(scratch), epoch_s)
        sdist = into / raw.name
        _normalize(raw, sdist, epoch_s)
        unpacked = Path(scratch) / "unpacked"
        with tarfile.open(sdist) as archive:
            archive.extractall(unpacked, filter="data")
        (folder,) = unpacked.iterdir()
        return _run_hook("build_wheel", folder, into, epoch_s), sdist


def export(root: Path, into: Path, commit: str) -> int:
    """Writes the files of a commit of the repository at `root`, and returns its time in seconds
    since 1970."""
    into.mkdir(parents=True)
    archive = subprocess.run(["git", "archive", commit], cwd=root, capture_output=True, check=True)
    subprocess.run(["tar", "-x", "-C", str(into)], input=archive.stdout, check=True)
    shown = subprocess.run(
        ["git", "show", "-s", "--format=%ct", commit],
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
    )
    return int(shown.stdout)


def _run_hook(hook: str, source: Path, into: Path, epoch_s: int) -> Path:
    """Calls a hook of the build backend, as pip does, and returns the file that it wrote."""
    code = f"from setuptools import build_meta; print(build_meta.{hook}({str(into)!r}))"
    answer = subprocess.run(
        [sys.executable, "-c", code],
        cwd=source,
        env={**os.environ, "SOURCE_DATE_EPOCH": str(epoch_s)},
        capture_output=True,
        text=True,
        check=True,
        umask=UMASK,
    )
    return into / answer.stdout.splitlines()[-1]


def _normalize(raw: Path, into: Path, epoch_s: int) -> None:
    """Writes a tar.gz again: sorted, without owners, with one time for everything."""
    with (
        tarfile.open(raw) as source,
        into.open("wb") as file,
        gzip.GzipFile("", "wb", fileobj=file, mtime=epoch_s) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as target,
    ):
        for member in _normalized(source, epoch_s):
            target.addfile(member, source.extractfile(member) if member.isfile() else None)


def _normalized(source: tarfile.TarFile, epoch_s: int) -> Iterator[tarfile.TarInfo]:
    for member in sorted(source.getmembers(), key=lambda member: member.name):
        is_executable = member.isdir() or bool(member.mode & 0o100)
        member.mode = (0o777 if is_executable else 0o666) & ~UMASK
        member.mtime = epoch_s
        member.uid = member.gid = 0
        member.uname = member.gname = ""
        member.pax_headers = {}
        yield member
