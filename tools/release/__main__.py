"""Builds, checks and tests a release, and prints the commands that publish it.

    make release                               # of the present commit
    python -m tools.release --rehearsal        # the same with an `unreleased` changelog

Publishes nothing itself. Writes to `dist/`: the wheel, the sdist, an SBOM (CycloneDX) of what an
installation of the client gets today, and the release notes.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
import venv
from pathlib import Path

from sgl_vllm.version import __version__
from tools.release.build import build, export
from tools.release.notes import newest_notes

ROOT = Path(__file__).resolve().parents[2]
DIST = ROOT / "dist"
TOOLS = ROOT / "build" / "release-tools"
INSTALLATION_TESTS = "tests/unit/test_installation.py"
SOURCE_URL = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["urls"][
    "Source"
]


class ReleaseFailed(Exception):
    """What is wrong and what to do about it."""


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.release",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--rehearsal", action="store_true", help="accept an unreleased version and open changes"
    )
    options = parser.parse_args()
    try:
        release(rehearsal=options.rehearsal)
    except (ReleaseFailed, ValueError) as failure:
        print(f"release: {failure}", file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as failure:
        print(failure.stderr or "", file=sys.stderr)
        print(f"release: failed: {' '.join(map(str, failure.cmd))}", file=sys.stderr)
        return 1
    return 0


def release(*, rehearsal: bool) -> None:
    """Does everything up to publishing.

    Raises:
        ReleaseFailed: the repository is not ready for a release.
        ValueError: the changelog has no notes.
        subprocess.CalledProcessError: a step failed.
    """
    tag = f"v{__version__}"
    notes = newest_notes((ROOT / "CHANGELOG.md").read_text("utf-8"), f"{SOURCE_URL}/blob/{tag}")
    if notes.version != __version__:
        raise ReleaseFailed(
            f"CHANGELOG.md begins with {notes.version}, sgl_vllm/version.py says {__version__}: "
            "make them equal"
        )
    if not rehearsal:
        _check_ready(notes.date)
    shutil.rmtree(DIST, ignore_errors=True)
    step("building the wheel and the sdist, twice")
    wheel, sdist = build_twice()
    step("checking their metadata (twine)")
    tools = release_tools()
    run(tools / "twine", "check", "--strict", wheel, sdist)
    step("installing both in clean environments, with and without vLLM")
    run(
        *(sys.executable, "-m", "pytest", "-q", "-m", "slow", INSTALLATION_TESTS),
        SGL_VLLM_DISTRIBUTIONS=str(DIST),
    )
    step("listing what an installation of the client gets (CycloneDX)")
    write_sbom(tools, wheel)
    notes_file = DIST / f"notes-{tag}.md"
    notes_file.write_text(notes.text, "utf-8")
    for file in sorted(DIST.iterdir()):
        print(f"  {hashlib.sha256(file.read_bytes()).hexdigest()}  {file.relative_to(ROOT)}")
    print("To publish:")
    text = notes_file.relative_to(ROOT)
    print(f"  git tag -a {tag} --cleanup=whitespace -F {text} && git push {SOURCE_URL} {tag}")
    uploaded = " ".join(str(file.relative_to(ROOT)) for file in (wheel, sdist))
    print(f"  {(tools / 'twine').relative_to(ROOT)} upload {uploaded}")


def _check_ready(date: str) -> None:
    if date == "unreleased":
        raise ReleaseFailed("CHANGELOG.md: replace `unreleased` in the first heading by the date")
    status = subprocess.run(
        ["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    if status.stdout:
        raise ReleaseFailed(f"commit or remove these first:\n{status.stdout.rstrip()}")


def build_twice() -> tuple[Path, Path]:
    """The wheel and the sdist of HEAD in `dist/`.

    Raises:
        ReleaseFailed: a second build from another folder gave other bytes.
    """
    with tempfile.TemporaryDirectory() as scratch:
        first, second = Path(scratch, "one"), Path(scratch, "another", "deeper")
        epoch_s = export(ROOT, first, "HEAD")
        export(ROOT, second, "HEAD")
        built = build(first, DIST, epoch_s)
        again = build(second, Path(scratch, "again"), epoch_s)
        for one, other in zip(built, again, strict=True):
            if one.read_bytes() != other.read_bytes():
                raise ReleaseFailed(f"{one.name} differs between two builds of the same commit")
    return built


def release_tools() -> Path:
    """The folder of twine and cyclonedx-py, installed on the first use."""
    bin_folder = TOOLS / "bin"
    if not (bin_folder / "pip").exists():
        venv.create(TOOLS, with_pip=True)
    run(bin_folder / "pip", "install", "--quiet", "--requirement", "constraints/release.txt")
    return bin_folder


def write_sbom(tools: Path, wheel: Path) -> None:
    """Installs the wheel from the package index, and lists what came with it."""
    with tempfile.TemporaryDirectory() as scratch:
        venv.create(scratch, with_pip=True)
        python = Path(scratch, "bin", "python")
        run(python, "-m", "pip", "install", "--quiet", wheel)
        run(python, "-m", "pip", "uninstall", "--quiet", "--yes", "pip", "setuptools")
        run(
            *(tools / "cyclonedx-py", "environment", "--output-reproducible"),
            *("--pyproject", "pyproject.toml", "--output-format", "JSON"),
            *("--output-file", DIST / f"sgl_vllm-{__version__}.cdx.json", python),
        )


def run(*command: str | Path, **environment: str) -> None:
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run([*map(str, command)], cwd=ROOT, env={**inherited, **environment}, check=True)


def step(text: str) -> None:
    print(f"release: {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
