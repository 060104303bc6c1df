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
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import venv
from pathlib import Path

from sgl_vllm.version import __version__
from tools.release.build import build, export

ROOT = Path(__file__).resolve().parents[2]
DIST = ROOT / "dist"
TOOLS = ROOT / "build" / "release-tools" / "bin"
SOURCE_URL = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["urls"][
    "Source"
]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tools.release",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--rehearsal", action="store_true", help="accept an unreleased version and open changes"
    )
    rehearsal = parser.parse_args().rehearsal
    tag = f"v{__version__}"
    changelog = (ROOT / "CHANGELOG.md").read_text("utf-8")
    version, date, notes = newest_notes(changelog, f"{SOURCE_URL}/blob/{tag}")
    if version != __version__:
        raise SystemExit(
            f"release: CHANGELOG.md begins with {version}, sgl_vllm/version.py says {__version__}: "
            "make them equal"
        )
    if not rehearsal:
        if date == "unreleased":
            raise SystemExit("release: CHANGELOG.md: put the date in place of `unreleased`")
        if subprocess.check_output(["git", "status", "--porcelain"], cwd=ROOT):
            raise SystemExit("release: commit or remove what `git status` shows")
    shutil.rmtree(DIST, ignore_errors=True)
    step("building the wheel and the sdist, twice")
    wheel, sdist = build_twice()
    step("checking their metadata (twine)")
    if not (TOOLS / "pip").exists():
        venv.create(TOOLS.parent, with_pip=True)
    run(TOOLS / "pip", "install", "--quiet", "--requirement", "constraints/release.txt")
    run(TOOLS / "twine", "check", "--strict", wheel, sdist)
    step("installing both in clean environments, with and without vLLM")
    run(
        *(sys.executable, "-m", "pytest", "-q", "-m", "slow", "tests/unit/test_installation.py"),
        SGL_VLLM_DISTRIBUTIONS=str(DIST),
    )
    step("listing what an installation of the client gets (CycloneDX)")
    write_sbom(wheel)
    notes_file = DIST / f"notes-{tag}.md"
    notes_file.write_text(notes, "utf-8")
    for file in sorted(DIST.iterdir()):
        print(f"  {hashlib.sha256(file.read_bytes()).hexdigest()}  {file.relative_to(ROOT)}")
    text, *uploaded = (str(file.relative_to(ROOT)) for file in (notes_file, wheel, sdist))
    print("To publish:")
    print(f"  git tag -a {tag} --cleanup=whitespace -F {text} && git push {SOURCE_URL} {tag}")
    print(f"  {(TOOLS / 'twine').relative_to(ROOT)} upload {' '.join(uploaded)}")


def build_twice() -> tuple[Path, Path]:
    """The wheel and the sdist of HEAD in `dist/`. Ends the command if a second build from another
    folder gives other bytes."""
    with tempfile.TemporaryDirectory() as scratch:
        first, second = Path(scratch, "one"), Path(scratch, "another", "deeper")
        epoch_s = export(ROOT, first, "HEAD")
        export(ROOT, second, "HEAD")
        built = build(first, DIST, epoch_s)
        again = build(second, Path(scratch, "again"), epoch_s)
        for one, other in zip(built, again, strict=True):
            if one.read_bytes() != other.read_bytes():
                raise SystemExit(f"release: {one.name} differs between two builds of one commit")
    return built


def newest_notes(changelog: str, link_base: str) -> tuple[str, str, str]:
    """Version, date and text of the first section below a heading like `## 0.1.0 (2026-11-30)`.
    Its relative links begin with `link_base`, which has no slash at the end.

    Raises:
        ValueError: there is no such heading, or nothing below it.
    """
    sections = re.split(r"^## (\S+) \(([^)]+)\)$", changelog, flags=re.MULTILINE)
    if len(sections) < 4 or not sections[3].strip():
        raise ValueError("CHANGELOG.md has no section `## VERSION (DATE)` with text")
    _, version, date, text, *_ = sections
    links = re.compile(r"\]\((?![a-z]+:|#)")
    return version, date, links.sub(f"]({link_base}/", text.strip()) + "\n"


def write_sbom(wheel: Path) -> None:
    """Installs the wheel from the package index, and lists what came with it."""
    with tempfile.TemporaryDirectory() as scratch:
        venv.create(scratch, with_pip=True)
        python = Path(scratch, "bin", "python")
        run(python, "-m", "pip", "install", "--quiet", wheel)
        run(python, "-m", "pip", "uninstall", "--quiet", "--yes", "pip", "setuptools")
        run(
            *(TOOLS / "cyclonedx-py", "environment", "--output-reproducible"),
            *("--pyproject", "pyproject.toml", "--output-format", "JSON"),
            *("--output-file", DIST / f"sgl_vllm-{__version__}.cdx.json", python),
        )


def run(*command: str | Path, **environment: str) -> None:
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run([*map(str, command)], cwd=ROOT, env={**inherited, **environment}, check=True)


def step(text: str) -> None:
    print(f"release: {text}", flush=True)


if __name__ == "__main__":
    main()
