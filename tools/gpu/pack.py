"""Packs a CUDA vLLM into pieces, for a GPU machine that no network reaches.

    python tools/gpu/pack.py FOLDER

Downloads the official vLLM and the wheels it needs that the machine's image has not (`image.txt`),
lays them out as in `site-packages`, leaves out what no dense model on Ampere or Hopper loads, and
compresses all of it into one archive. FOLDER/piece-1, piece-2, ... are that archive cut into parts,
each small enough to be carried in one call beside this repository; each has the manifest, so that
they may arrive in any order. There, in one call or several:

    python3 tools/gpu/install.py FOLDER/piece-*

Why the image's torch is enough: vLLM's libraries use torch's stable interface. The metadata of vLLM
0.32.0 asks for torch 2.13, but no library that is packed needs a symbol that torch 2.11 lacks.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePosixPath

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

ROOT = Path(__file__).resolve().parents[2]
IMAGE = Path(__file__).with_name("image.txt")
PINS = ROOT / "constraints" / "common.txt"
VLLM, PYTHON = "0.32.0", "3.12"
"""The versions that the machine gets, and has."""
MIB = 2**20
PIECE_MIB = 50
"""At most: the carrier takes 64 MiB a call, this repository included."""
GLIBC_OF_WHEELS = (39, 35, 34, 31, 28, 27, 26, 24, 17, 12, 5)
"""pip takes no range: each `manylinux_2_N` that wheels are published for."""

# Of the pins, what only `make check`, the tests of pages and the site need.
NOT_NEEDED = re.compile(
    "accessible-pygments|alabaster|ast-serialize|babel|beautifulsoup4|docutils|greenlet|imagesize|"
    "librt|mypy|myst-parser|node.*|playwright|pydata-sphinx-theme|pyright|roman-numerals|ruff|"
    "snowballstemmer|soupsieve|sphinx.*"
)
# Not among the pins, as the CPU's vLLM needs another version: what xgrammar is loaded with.
ALSO_NEEDED = ("apache-tvm-ffi==0.1.11",)

# Of vLLM's wheel: libraries that are loaded on the way to a dense model, of some 330 MB compressed.
# FlashAttention 2 (124 MB) is for Ampere and Ada: `--flash-attention 2`.
LIBRARIES = (
    "vllm/_C_stable_libtorch.abi3.so",
    "vllm/cumem_allocator.abi3.so",
    "vllm/fs_io_C.abi3.so",
    "vllm/spinloop.abi3.so",
)
# And, of other wheels, translations and tokenizers that nothing here loads.
UNUSED = (
    "vllm/third_party/deep_gemm/",
    "vllm/third_party/fmha_sm100/",
    "vllm/vllm-rs",
    "pycountry/locales/",
    "mistral_common/data/",
)

Image = Mapping[str, str]
"""By name, the version of what the machine has; "" where it is not known."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="for the downloads and the pieces")
    parser.add_argument("--image", type=Path, default=IMAGE, metavar="FILE", help="what it has")
    parser.add_argument(
        "--flash-attention", type=int, choices=(2, 3), default=3, help="3 is Hopper's (default)"
    )
    arguments = parser.parse_args()
    image = image_of(arguments.image.read_text())
    downloads = arguments.folder / f"download-{VLLM}-cp{PYTHON}"
    wanted = [f"vllm=={VLLM}", *needed(PINS.read_text(), image)]
    step(f"downloading {len(wanted)} wheels for Python {PYTHON} into {downloads}")
    wheels = download(wanted, downloads)
    attention = f"vllm/vllm_flash_attn/_vllm_fa{arguments.flash_attention}_C.abi3.so"

    def is_kept(name: str) -> bool:
        if name.startswith("vllm/") and name.endswith(".so"):
            return name in (*LIBRARIES, attention)
        return not name.startswith(UNUSED)

    archive = arguments.folder / "site.tar.xz"
    step(f"compressing into {archive} (minutes)")
    write_archive(wheels, archive, is_kept)
    pieces = split(archive, arguments.folder, PIECE_MIB * MIB, f"vllm {VLLM}, Python {PYTHON}")
    archive.unlink()
    sizes = ", ".join(f"{piece.stat().st_size / MIB:.1f} MiB" for piece in pieces)
    step(f"{len(pieces)} pieces in {arguments.folder}: {sizes}")


# -- what is needed


def image_of(text: str) -> Image:
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    pairs = (line.partition("==") for line in lines if line)
    return {canonicalize_name(name): version for name, _, version in pairs}


def needed(pins: str, image: Image) -> list[str]:
    """Of the pins (lines of `name==version`), those that the image has not."""
    lines = (line.partition("#")[0].strip() for line in pins.splitlines())
    names = {line: canonicalize_name(Requirement(line).name) for line in lines if line}
    return [
        *(
            line
            for line, one in names.items()
            if one not in image and not NOT_NEEDED.fullmatch(one)
        ),
        *ALSO_NEEDED,
    ]


def download(wanted: Sequence[str], folder: Path) -> list[Path]:
    """The wheels of `wanted` in `folder`; what is there already is not fetched again."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--disable-pip-version-check", "--only-binary=:all:", "--implementation", "cp"]
    command += ["--python-version", PYTHON, "--dest", str(folder), *wanted]
    old = ("manylinux2014", "manylinux2010", "manylinux1")
    for platform in (*(f"manylinux_2_{number}" for number in GLIBC_OF_WHEELS), *old):
        command += ["--platform", f"{platform}_x86_64"]
    subprocess.run(command, check=True)
    required = {canonicalize_name(Requirement(one).name): Requirement(one) for one in wanted}
    found = {}
    for wheel in sorted(folder.glob("*.whl")):
        name, version = parse_wheel_filename(wheel.name)[:2]
        if name in required and version in required[name].specifier:
            found[name] = wheel
    if missing := sorted(set(required) - set(found)):
        raise SystemExit(f"pack: pip left out {', '.join(missing)}: see {folder}")
    return list(found.values())


# -- one archive, cut into pieces


def place_of(member: str) -> str | None:
    """Where a wheel's member goes in `site-packages`; None for scripts and headers."""
    inside = re.match(r"[^/]+\.data/([^/]+)/(.+)", member)
    if inside is None:
        return member
    return inside[2] if inside[1] in ("purelib", "platlib") else None


def write_archive(wheels: Sequence[Path], file: Path, is_kept: Callable[[str], bool]) -> None:
    """All that the wheels put into `site-packages`. The same wheels give the same bytes."""
    with lzma.open(file, "wb") as out, tarfile.open(fileobj=out, mode="w") as tar:
        for wheel in sorted(wheels):
            with zipfile.ZipFile(wheel) as archive:
                for member in archive.infolist():
                    place = place_of(member.filename)
                    if member.is_dir() or place is None or not is_kept(place):
                        continue
                    if PurePosixPath(place).is_absolute() or ".." in PurePosixPath(place).parts:
                        raise SystemExit(f"pack: {wheel.name} holds {member.filename}")
                    entry = tarfile.TarInfo(place)
                    entry.size = member.file_size
                    with archive.open(member) as content:
                        tar.addfile(entry, content)


def split(archive: Path, folder: Path, most_bytes: int, title: str) -> list[Path]:
    """Cut into as few `folder`/piece-N/part as possible, alike in size; each piece has the manifest
    of all. Replaces older pieces."""
    for old in folder.glob("piece-*"):
        shutil.rmtree(old)
    content = archive.read_bytes()
    piece_bytes = -(-len(content) // -(-len(content) // most_bytes))
    parts = [content[at : at + piece_bytes] for at in range(0, len(content), piece_bytes)]
    manifest = {
        "title": title,
        "sha256": hashlib.sha256(content).hexdigest(),
        "pieces": {
            f"piece-{number}": hashlib.sha256(part).hexdigest()
            for number, part in enumerate(parts, 1)
        },
    }
    files = [folder / name / "part" for name in manifest["pieces"]]
    for file, part in zip(files, parts, strict=True):
        file.parent.mkdir(parents=True)
        file.write_bytes(part)
        (file.parent / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")
    return files


def step(text: str) -> None:
    print(f"pack: {text}", flush=True)


if __name__ == "__main__":
    main()
