"""Puts the pieces of `pack.py` together on a machine without network, into this checkout's `.venv`.

    python3 tools/gpu/install.py FOLDER/piece-1            # in one call or several, in any order
    python3 tools/gpu/install.py FOLDER/piece-2 FOLDER/piece-3
    python3 tools/gpu/install.py                           # what is here, what is missing

Pieces are kept in `STORE` (outside the checkout: what a call carries, the next may remove) until
all are there; then the whole is verified and unpacked, and this package installed beside it. The
`.venv` sees all that the Python which runs this sees, but what was carried comes first. Run again,
it goes on where it stopped, and does nothing once it is done. Standard library only.

Exit status: 0 installed, 1 failed, 3 pieces are missing.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import site
import subprocess
import sys
import tarfile
import venv
from pathlib import Path
from typing import Any  # Any: JSON

ROOT = Path(__file__).resolve().parents[2]
STORE = Path("/tmp/sgl-vllm-pieces")
MISSING = 3
TRIAL = "import torch, vllm, sgl_vllm; print('vllm', vllm.__version__, 'torch', torch.__version__)"

Manifest = dict[str, Any]
"""`title`, `sha256` of the whole, and `pieces`: the SHA-256 of each by name."""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pieces", nargs="*", type=Path, help="folders that pack.py made")
    arguments = parser.parse_args(argv)
    for folder in arguments.pieces:
        keep(folder, STORE)
    manifest = stored(STORE)
    if manifest is None:
        raise SystemExit(
            f"install: there is no piece in {STORE}: make them with tools/gpu/pack.py on "
            "a machine with network, carry them here and name their folders (where there is "
            "network, `make install` is all)"
        )
    if missing := [name for name in manifest["pieces"] if not (STORE / name).exists()]:
        step(f"{manifest['title']}: missing: {', '.join(missing)}")
        return MISSING
    install(manifest, STORE, ROOT / ".venv")
    return 0


def keep(folder: Path, store: Path) -> None:
    """Copy a piece into the store, if it is what the manifest says. Pieces of another archive that
    are there go."""
    if not (folder / "manifest.json").exists():
        raise SystemExit(f"install: {folder} is no piece of pack.py")
    manifest = json.loads((folder / "manifest.json").read_text())
    digest = sha256_of(folder / "part")
    names = [name for name, expected in manifest["pieces"].items() if expected == digest]
    if not names:
        raise SystemExit(f"install: {folder}/part is damaged: carry it again")
    if (other := stored(store)) is not None and other["sha256"] != manifest["sha256"]:
        step(f"the store held another archive ({other['title']}), which goes")
        shutil.rmtree(store)
    store.mkdir(parents=True, exist_ok=True)
    shutil.copy(folder / "manifest.json", store / "manifest.json")
    shutil.copy(folder / "part", store / f".{names[0]}")
    (store / f".{names[0]}").rename(store / names[0])
    step(f"{names[0]} is here")


def stored(store: Path) -> Manifest | None:
    file = store / "manifest.json"
    return json.loads(file.read_text()) if file.exists() else None


def sha256_of(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


# -- installing


def install(manifest: Manifest, store: Path, folder: Path) -> None:
    stamp = folder / "carried.sha256"
    python = folder / "bin" / "python"
    if stamp.exists() and stamp.read_text() == manifest["sha256"]:
        step(f"{manifest['title']} is installed in {folder}")
        return
    step(f"{manifest['title']}: unpacking into {folder}")
    venv.create(folder, with_pip=False, clear=True)
    packages = next(folder.glob("lib/python*/site-packages"))
    unpack(manifest, store, packages)
    # After what was carried: all that this Python sees.
    seen = site.getsitepackages() + ([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])
    lines = [f"import site; site.addsitedir({path!r})\n" for path in seen]
    # FlashInfer is not carried, and without this vLLM imports it to sample.
    lines.append("import os; os.environ.setdefault('VLLM_USE_FLASHINFER_SAMPLER', '0')\n")
    (packages / "image.pth").write_text("".join(lines))
    step("sgl-vllm itself, editable")
    pip = [
        str(python),
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--no-index",
    ]
    options = ["--no-deps", "--no-build-isolation", "--editable", str(ROOT)]
    subprocess.run([*pip, *options], check=True)
    subprocess.run([python, "-c", TRIAL], check=True, cwd=ROOT)
    stamp.write_text(manifest["sha256"])


def unpack(manifest: Manifest, store: Path, folder: Path) -> None:
    """Raises SystemExit if the pieces together are not what was packed."""
    whole = store / "whole.tar.xz"
    with whole.open("wb") as joined:
        for name in manifest["pieces"]:
            joined.write((store / name).read_bytes())
    if sha256_of(whole) != manifest["sha256"]:
        raise SystemExit("install: the pieces together are not what was packed: pack again")
    with tarfile.open(whole) as tar:
        tar.extractall(folder, filter="data")
    whole.unlink()


def step(text: str) -> None:
    print(f"install: {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
