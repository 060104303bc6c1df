"""Puts the pieces of `pack.py` together on a machine without network, into this checkout's `.venv`.

    python3 tools/gpu/install.py FOLDER/piece-1            # in one call or several, in any order
    python3 tools/gpu/install.py FOLDER/piece-2 FOLDER/piece-3
    python3 tools/gpu/install.py                           # what is here, what is missing

Pieces are kept in `--store` (outside the checkout: what a call carries, the next may remove) until
all are there; then the whole is verified and unpacked, and this package installed beside it. The
`.venv` sees all that the Python which runs this sees, but what was carried comes first. Run again,
it goes on where it stopped, and does nothing once it is done. Standard library only.

Exit status: 0 installed, 1 failed, 3 pieces are missing.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import lzma
import shutil
import site
import subprocess
import sys
import tarfile
import venv
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
VENV = ROOT / ".venv"
STORE = Path("/tmp/sgl-vllm-pieces")
MISSING = 3
MIB = 2**20
TRIAL = "import torch, vllm, sgl_vllm; print('vllm', vllm.__version__, 'torch', torch.__version__)"


class InstallFailed(Exception):
    """The message says what failed and what to do about it."""


@dataclass(frozen=True)
class Piece:
    name: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    title: str
    sha256: str
    pieces: tuple[Piece, ...]

    @classmethod
    def read(cls, file: Path) -> Manifest:
        content = json.loads(file.read_text())
        pieces = tuple(Piece(**piece) for piece in content["pieces"])
        return cls(content["title"], content["sha256"], pieces)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pieces", nargs="*", type=Path, help="folders that pack.py made")
    parser.add_argument("--store", type=Path, default=STORE, help=f"default {STORE}")
    parser.add_argument("--venv", type=Path, default=VENV, help="default .venv of this checkout")
    arguments = parser.parse_args(argv)
    try:
        for folder in arguments.pieces:
            keep(folder, arguments.store)
        manifest = stored(arguments.store)
        if manifest is None:
            raise InstallFailed(
                f"there is no piece in {arguments.store}: make them with tools/gpu/pack.py on a "
                "machine with network, carry them here and name their folders (where there is "
                "network, `make install` is all)"
            )
        if missing := [p for p in manifest.pieces if not (arguments.store / p.name).exists()]:
            said = ", ".join(
                f"{piece.name} ({piece.size_bytes / MIB:.1f} MiB)" for piece in missing
            )
            step(f"{manifest.title}: {len(missing)} of {len(manifest.pieces)} missing: {said}")
            return MISSING
        install(manifest, arguments.store, arguments.venv)
    except (InstallFailed, OSError) as failure:
        print(f"install: {failure}", file=sys.stderr)
        return 1
    return 0


# -- pieces


def keep(folder: Path, store: Path) -> None:
    """Copy a piece into the store, if it is what the manifest says. Pieces of another archive that
    are there go."""
    try:
        manifest = Manifest.read(folder / "manifest.json")
        content = (folder / "part").read_bytes()
    except FileNotFoundError as error:
        raise InstallFailed(f"{folder} is no piece of pack.py: {error}") from None
    known = {piece.sha256: piece for piece in manifest.pieces}
    piece = known.get(hashlib.sha256(content).hexdigest())
    if piece is None:
        raise InstallFailed(f"{folder}/part is damaged ({len(content)} bytes): carry it again")
    if (other := stored(store)) is not None and other.sha256 != manifest.sha256:
        step(f"the store held another archive ({other.title}), which goes")
        shutil.rmtree(store)
    store.mkdir(parents=True, exist_ok=True)
    shutil.copy(folder / "manifest.json", store / "manifest.json")
    unfinished = store / f".{piece.name}"
    unfinished.write_bytes(content)
    unfinished.rename(store / piece.name)
    step(f"{piece.name} is here ({piece.size_bytes / MIB:.1f} MiB)")


def stored(store: Path) -> Manifest | None:
    file = store / "manifest.json"
    return Manifest.read(file) if file.exists() else None


class Joined(io.RawIOBase):
    """Files read one after the other, as if they were one; `sha256` is of what has been read."""

    def __init__(self, files: list[Path]) -> None:
        self._files = iter(files)
        self._file: io.BufferedReader | None = None
        self.sha256 = hashlib.sha256()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        while True:
            if self._file is None:
                following = next(self._files, None)
                if following is None:
                    return 0
                self._file = following.open("rb")
            if count := self._file.readinto(buffer):
                self.sha256.update(buffer[:count])
                return count
            self._file.close()
            self._file = None


# -- installing


def install(manifest: Manifest, store: Path, folder: Path) -> None:
    stamp = folder / "carried.sha256"
    python = folder / "bin" / "python"
    if stamp.exists() and stamp.read_text() == manifest.sha256:
        step(f"{manifest.title} is installed in {folder}")
        return
    step(f"{manifest.title}: unpacking into {folder}")
    venv.create(folder, with_pip=False, clear=True)
    packages = next(folder.glob("lib/python*/site-packages"))
    unpack([store / piece.name for piece in manifest.pieces], manifest.sha256, packages)
    # After what was carried: all that this Python sees.
    seen = [
        *site.getsitepackages(),
        *([site.getusersitepackages()] if site.ENABLE_USER_SITE else []),
    ]
    lines = [f"import site; site.addsitedir({path!r})\n" for path in seen]
    # FlashInfer is not carried, and without this vLLM imports it to sample.
    lines.append("import os; os.environ.setdefault('VLLM_USE_FLASHINFER_SAMPLER', '0')\n")
    (packages / "image.pth").write_text("".join(lines))
    step("sgl-vllm itself, editable")
    run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index",
        "--no-deps", "--no-build-isolation", "--editable", str(ROOT))  # fmt: skip
    step(run(python, "-c", TRIAL).strip().splitlines()[-1])
    stamp.write_text(manifest.sha256)


def unpack(parts: list[Path], sha256: str, folder: Path) -> None:
    """Raises InstallFailed if the parts together are not what was packed."""
    joined = Joined(parts)
    with io.BufferedReader(joined, MIB) as source:
        try:
            with lzma.open(source) as content, tarfile.open(fileobj=content, mode="r|") as tar:
                tar.extractall(folder, filter="data")
            source.read()
        except (lzma.LZMAError, tarfile.TarError, EOFError) as error:
            raise InstallFailed(f"the pieces do not fit together ({error}): pack again") from error
    if joined.sha256.hexdigest() != sha256:
        raise InstallFailed("the pieces together are not what was packed: pack and carry again")


def run(*command: str | Path) -> str:
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        said = "\n".join((done.stdout + done.stderr).splitlines()[-12:])
        raise InstallFailed(f"failed: {' '.join(map(str, command))}\n{said}")
    return done.stdout


def step(text: str) -> None:
    print(f"install: {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
