"""Everything that wants a GPU, by one command: tests, kernel times, the comparison with stock vLLM.

    python3 tools/gpu/suite.py                        # all steps, the most worth knowing first
    python3 tools/gpu/suite.py --list                 # their names, what each shows, its limit
    python3 tools/gpu/suite.py 'ab-*-c16' kernels     # some, by name or pattern
    python3 tools/gpu/suite.py --minutes 9            # what fits; called again, it goes on
    python3 tools/gpu/suite.py --jobs 8               # tests side by side, then what measures time

The folder gpu-results gets `summary.md` and, for each step, a log, measurements (JSON, junit) and
the outcome. Another call skips steps that have passed, repeats those that failed or reached their
limit, and continues comparisons with the missing workloads. No failure stops the rest.

Where vLLM is not installed, it is installed from the pieces that `tools/gpu/install.py` has
(`--pieces FOLDER ...` hands it some). Standard library only, as it runs before anything is there.

Exit status: 0 all steps passed, 1 some did not or were not run, 3 pieces are missing.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.gpu.configuration import UNVERIFIED_VARIABLE  # noqa: E402
from tools.gpu.steps import Step, all_steps, chosen, read_json, ready  # noqa: E402

RESULTS = ROOT / "gpu-results"
LEAST_S = 45
"""With less time left no step is started."""
PATIENCE_S = 25
"""So long a step that is asked to end may take to write what it has."""


@dataclass(frozen=True)
class Result:
    step: str
    status: str
    """passed, failed, stopped, or skipped: its tests all were."""
    seconds: float
    figures: dict[str, str]


# -- running them

RUNNING: set[subprocess.Popen[bytes]] = set()


def run_step(step: Step, python: str, out: Path, limit_s: float) -> Result:
    """Runs it until it ends or its time is up, and writes how it ended into its folder."""
    folder = out / step.name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "junit.xml").unlink(missing_ok=True)
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", **step.environment}
    begun = time.monotonic()
    with (folder / "log.txt").open("ab") as log:
        process = subprocess.Popen(
            step.command(python, folder),
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        RUNNING.add(process)
        try:
            status = "failed" if process.wait(limit_s) else "passed"
        except subprocess.TimeoutExpired:
            status = "stopped" if step.todo(folder) or not step.parts else "passed"
        finally:
            RUNNING.discard(process)
            end(process)
    tests, _ = junit(folder)
    if status == "passed" and tests and "passed" not in tests:
        status = "skipped"
    result = Result(step.name, status, round(time.monotonic() - begun, 1), figures(folder))
    (folder / "result.json").write_text(json.dumps(asdict(result), indent=2) + "\n")
    return result


def end(process: subprocess.Popen[bytes]) -> None:
    """Ends it, if it has not, and all that it started: first as Ctrl-C does, so that it writes."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            send(process, number)
            try:
                process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                continue
    send(process, signal.SIGKILL)  # what it has left behind


def send(process: subprocess.Popen[bytes], number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def earlier(step: Step, out: Path) -> Result | None:
    content = read_json(out / step.name / "result.json")
    return None if content is None else Result(**content)


# -- what they found


def figures(folder: Path) -> dict[str, str]:
    """What is worth a line: of tests how many, and what they recorded; of a comparison the ratios
    of throughput; of kernels the ratios to vLLM's."""
    found: dict[str, str] = {}
    tests, recorded = junit(folder)
    if tests:
        passed, skipped = tests.count("passed"), tests.count("skipped")
        found["tests"] = f"{passed} of {len(tests)} passed, {skipped} skipped"
    for name, value in recorded:
        found[name] = f"{found[name]}, {value}" if name in found else value
    for file in sorted(folder.glob("*.json")):
        content = read_json(file) or {}
        if "ratio" in content:
            found[file.stem] = f"{content['ratio']['throughput']:.2f}x"
        for kernel, rows in content.get("kernels", {}).items():
            if ratios := [row["ratio"] for row in rows if "ratio" in row]:
                found[kernel] = f"{min(ratios):.2f} to {max(ratios):.2f}x"
    return found


def junit(folder: Path) -> tuple[list[str], list[tuple[str, str]]]:
    """How each test ended (passed, failed or skipped), and what tests have recorded, as pytest has
    written it. Of a test that was interrupted, pytest writes no more than a time."""
    try:
        root = ElementTree.parse(folder / "junit.xml").getroot()
    except (FileNotFoundError, ElementTree.ParseError):
        return [], []
    ends = {"failure": "failed", "error": "failed", "skipped": "skipped"}
    tests = [
        next((ends[child.tag] for child in case if child.tag in ends), "passed")
        for case in root.iter("testcase")
        if case.get("name")
    ]
    return tests, [(one.get("name", ""), one.get("value", "")) for one in root.iter("property")]


def summary(steps: Iterable[Step], out: Path) -> str:
    """A table in Markdown of all steps, those that were not run too."""
    lines = ["| step | ended | s | found |", "|---|---|---:|---|"]
    for step in steps:
        result = earlier(step, out)
        if result is None:
            lines.append(f"| {step.name} | not run | | |")
            continue
        said = "; ".join(f"{name} {value}" for name, value in result.figures.items())
        lines.append(f"| {step.name} | {result.status} | {result.seconds:.0f} | {said} |")
    return "\n".join(lines) + "\n"


# -- where vLLM is


def find_python(pieces: Sequence[Path]) -> str:
    """The interpreter that has vLLM; installed from the pieces first if there is none.

    Raises:
        SystemExit: with the status of `install.py`, which has said what is missing.
    """
    python = ROOT / ".venv" / "bin" / "python"
    if pieces or not (python.exists() or importlib.util.find_spec("vllm")):
        script = ROOT / "tools" / "gpu" / "install.py"
        if status := subprocess.run([sys.executable, script, *pieces]).returncode:
            raise SystemExit(status)
    return str(python) if python.exists() else sys.executable


def unverified_options(python: str) -> str:
    """As JSON."""
    script = "import json; from tests.gpu.configuration import *; print(json.dumps(unverified()))"
    environment = {**os.environ, UNVERIFIED_VARIABLE: "1"}
    return subprocess.check_output([python, "-c", script], cwd=ROOT, env=environment, text=True)


# -- the command


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("steps", nargs="*", metavar="STEP", help="names or patterns; else all")
    parser.add_argument("--list", action="store_true", help="show the steps and run none")
    parser.add_argument("--minutes", type=float, metavar="N", help="for all of this call")
    parser.add_argument(
        "--jobs", type=int, default=1, metavar="N", help="at once, of steps that measure no time"
    )
    parser.add_argument("--pieces", type=Path, nargs="+", default=[], metavar="FOLDER")
    arguments = parser.parse_args(argv)
    steps, out = all_steps(), RESULTS
    try:
        wanted = chosen(steps, arguments.steps)
    except ValueError as error:
        parser.error(str(error))
    if arguments.list:
        for step in wanted:
            print(f"{step.name:<56}{step.limit_s:>5} s  {step.shows}")
        return 0
    ends = time.monotonic() + 60 * (arguments.minutes or math.inf)
    python = find_python(arguments.pieces)
    wanted = ready(wanted, unverified_options(python))
    run_all(wanted, python, out, lambda: ends - time.monotonic(), jobs=arguments.jobs)
    out.mkdir(parents=True, exist_ok=True)
    table = summary(steps, out)
    (out / "summary.md").write_text(table)
    print("\n" + table)
    results = [earlier(step, out) for step in wanted]
    return 0 if all(result and result.status == "passed" for result in results) else 1


def run_all(
    steps: Sequence[Step], python: str, out: Path, left_s: Callable[[], float], *, jobs: int = 1
) -> None:
    """One after the other, as far as the time goes. With several jobs, first those that measure no
    time, side by side, each with a folder of its own for what vLLM compiles."""

    def run(number: int, step: Step) -> None:
        said = f"[{number} of {len(steps)}] {step.name}"
        before = earlier(step, out)
        if before and before.status == "passed":
            print(f"{said}: passed before", flush=True)
            return
        if left_s() < LEAST_S:
            print(f"{said}: no time left; run the same again", flush=True)
            return
        limit_s = min(step.limit_s, left_s() - PATIENCE_S)
        print(f"{said}: {step.shows} (at most {limit_s:.0f} s)", flush=True)
        result = run_step(step, python, out, limit_s)
        print(f"{said}: {result.status} after {result.seconds:.0f} s {result.figures}", flush=True)
        if result.status == "failed":
            log = (out / step.name / "log.txt").read_text(errors="replace")
            print("\n".join(f"    | {line[:200]}" for line in log.splitlines()[-12:]), flush=True)

    numbered = list(enumerate(steps, 1))
    if jobs > 1:
        together = [(number, apart(step)) for number, step in numbered if not step.is_timed]
        numbered = [(number, step) for number, step in numbered if step.is_timed]
        with ThreadPoolExecutor(jobs) as pool:
            try:
                for done in [pool.submit(run, *one) for one in together]:
                    done.result()
            except BaseException:  # Ctrl-C, above all: processes have sessions of their own
                pool.shutdown(wait=False, cancel_futures=True)
                for process in RUNNING.copy():
                    send(process, signal.SIGINT)
                raise
    for number, step in numbered:
        run(number, step)


def apart(step: Step) -> Step:
    """The same, with caches that no step beside it writes to."""
    root = Path(tempfile.gettempdir()) / "sgl-vllm-gpu" / step.name
    caches = {"VLLM_CACHE_ROOT": str(root / "vllm"), "TORCHINDUCTOR_CACHE_DIR": str(root / "torch")}
    return replace(step, environment={**step.environment, **caches})


if __name__ == "__main__":
    sys.exit(main())
