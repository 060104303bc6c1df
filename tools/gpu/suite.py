"""Everything that wants a GPU, by one command: tests, kernel times, the comparison with stock vLLM.

    python3 tools/gpu/suite.py                        # all steps, the most worth knowing first
    python3 tools/gpu/suite.py --list                 # their names, what each shows, its limit
    python3 tools/gpu/suite.py 'ab-*-c16' kernels     # some, by name or pattern
    python3 tools/gpu/suite.py --minutes 9            # what fits; called again, it goes on
    python3 tools/gpu/suite.py --jobs 8               # tests side by side, then what measures time

Results are in `--out` (gpu-results): per step a log, what it measured (JSON, junit) and how it
ended, and `summary.md`. A step that passed is not run again, one that failed or was stopped at its
limit is; comparisons go on with the workloads that are not there yet. No failure stops the rest.

Where vLLM is not installed, it is installed from the pieces that `tools/gpu/install.py` has
(`--pieces FOLDER ...` hands it some). Standard library only, as it runs before anything is there.

Exit status: 0 all steps passed, 1 some did not or were not run, 3 pieces are missing.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.gpu.configuration import (  # noqa: E402
    CONFIGURATION_VARIABLE,
    UNVERIFIED_VARIABLE,
    Configuration,
    all_configurations,
    on_cpu,
)

RESULTS = ROOT / "gpu-results"
LEAST_S = 45
"""With less time left no step is started."""
PATIENCE_S = 25
"""So long a step that is asked to end may take to write what it has."""

WORKLOADS = (
    "json_regex",
    "mmlu",
    "no_sharing",
    "json_schema",
    "tight_cache",
    "chat_short",
    "tree_of_thought",
)
"""Of the comparison, in the order of worth; `mmlu` is the one that asks by `select`."""
MODELS = {"7b": "shape:qwen2.5-7b", "0.5b": "shape:qwen2.5-0.5b"}
PROGRAMS = {16: 64, 1: 16, 128: 384}
"""By concurrency, in the order of worth: so many programs a round."""
ROUNDS = 3
SERVER_ARGS = "--gpu-memory-utilization 0.42"
"""Both servers stay up, and one of them at a time has work."""


@dataclass(frozen=True)
class Step:
    """One process. `arguments` are Python's; `{out}` in them stands for the step's folder, `{todo}`
    for those of its `parts` that have no PART.json there yet."""

    name: str
    shows: str
    limit_s: int
    arguments: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)
    parts: tuple[str, ...] = ()
    is_timed: bool = False
    """It measures time, so nothing else may use the GPU."""

    def todo(self, out: Path) -> list[str]:
        """The parts that have no result in the step's folder."""
        return [part for part in self.parts if read_json(out / f"{part}.json") is None]

    def command(self, python: str, out: Path) -> list[str]:
        """What is to be run for the results in the step's folder."""
        command = [python]
        for argument in self.arguments:
            if argument == "{todo}":
                command += self.todo(out)
            else:
                command.append(argument.replace("{out}", str(out)))
        return command


@dataclass(frozen=True)
class Result:
    step: str
    status: str
    """passed, failed, stopped, or skipped: its tests all were."""
    seconds: float
    figures: dict[str, str]


# -- the steps


def all_steps() -> list[Step]:
    """In the order of worth."""
    first, *others = all_configurations()
    synchronous = Configuration(runner="v1", scheduling="sync")
    others.remove(synchronous)
    plain = Configuration(numerics="plain")
    exact = Configuration(backend="triton", numerics="float32")
    small = "answers are stock's, in a small cache"
    answers = tests("same_answers", "answers are stock's, as by default", 420, first, only="roomy")
    streaming = tests("streaming", "streams, and clients that leave, on a server", 300, first)
    blocks = "copies inside a block, on every layout of the cache"
    return [
        Step("doctor", "what is installed, and which parts are on", 120, DOCTOR),
        tests("kernels", "the kernels against their references", 540),
        answers,
        tests("same_answers", small, 420, first, only="tight"),
        tests("partial_blocks", blocks, 420, first, only="-blocks"),
        tests("partial_blocks", f"{blocks}, by the kernel", 420, first, only="-slots"),
        tests("partial_blocks", f"{blocks}, in float32", 420, exact),
        tests("same_answers", "answers are stock's, in float32", 420, exact, only="roomy"),
        tests("same_answers", f"{small}, in float32", 420, exact, only="tight"),
        tests("same_answers", "answers are stock's, synchronously", 420, synchronous, only="roomy"),
        tests("same_answers", small, 420, synchronous, only="tight"),
        tests("approximate_reuse", "moved segments have the KV of their new place", 300, first),
        tests("approximate_reuse", "the same, in float32", 300, exact),
        tests(
            "step_time", "no loss of overlap: at most 1.01 of stock's step", 420, plain, timed=True
        ),
        Step("kernel-times", "the kernels against vLLM's own", 540, KERNEL_TIMES, is_timed=True),
        tests("prefix_backend", "prefix-grouped decode in an engine", 420, plain),
        Step("models", "made-up weights in the 7B shape, for the next step", 420, MAKE_MODEL),
        comparison("7b", 16),
        comparison("7b", 16, "-slots", ["radix_slot_copy=true"]),
        with_unverified(answers),
        with_unverified(comparison("7b", 16)),
        streaming,
        with_unverified(streaming),
        tests("same_answers", "as served: near ties alone differ", 540, plain, only="roomy"),
        tests("same_answers", "as served, in a small cache", 540, plain, only="tight"),
        comparison("0.5b", 16),
        with_unverified(comparison("0.5b", 16)),
        *(tests("same_answers", small, 300, other, only="tight") for other in others),
        tests("partial_blocks", blocks, 420, Configuration(backend="triton")),
        *(comparison(model, count) for count in PROGRAMS if count != 16 for model in MODELS),
    ]


DOCTOR = ("-m", "sgl_vllm.commands.cli", "doctor")
KERNEL_TIMES = ("-m", "benchmarks.kernels", "--json", "{out}/kernels.json")
MAKE_MODEL = ("-m", "benchmarks.models", MODELS["7b"])


def tests(
    name: str,
    shows: str,
    limit_s: int,
    configuration: Configuration | None = None,
    *,
    only: str = "",
    timed: bool = False,
) -> Step:
    """A file of tests/gpu, or those of its tests whose names contain `only`, in a process and a
    configuration of its own."""
    called, environment = name.replace("_", "-"), {}
    if configuration is not None:
        called += f"-{configuration}"
        environment = {CONFIGURATION_VARIABLE: str(configuration)}
    pytest = ["-m", "pytest", f"tests/gpu/test_{name}.py", "--junitxml={out}/junit.xml"]
    if only:
        called += f"-{only.strip('-')}"
        pytest.append(f"-k{only}")
    return Step(called, shows, limit_s, tuple(pytest), environment, is_timed=timed)


def comparison(
    model: str, concurrency: int, called: str = "", plugin_config: Sequence[str] = ()
) -> Step:
    """Stock and plugin in alternating rounds on real servers, all workloads. `called` is what the
    step's name ends with, and `plugin_config` what its plugin has of options."""
    options = {
        "--model": MODELS[model],
        "--concurrency": str(concurrency),
        "--requests": str(PROGRAMS[concurrency]),
        "--rounds": str(ROUNDS),
        "--servers-at-once": "2",
        "--json": "{out}",
    }
    flat = [word for pair in options.items() for word in pair]
    if plugin_config:
        flat += ["--plugin-config", *plugin_config]
    return Step(
        f"ab-{model}-c{concurrency}{called}",
        f"the plugin against stock, {concurrency} programs at a time",
        1800,
        ("-m", "benchmarks.ab", "{todo}", *flat, f"--server-args={SERVER_ARGS}"),
        parts=WORKLOADS,
        is_timed=True,
    )


def with_unverified(step: Step) -> Step:
    """The same, with every part on, whatever its self-check would find."""
    return replace(
        step,
        name=f"{step.name}-unverified",
        shows=f"{step.shows}; without the self-check",
        environment={**step.environment, UNVERIFIED_VARIABLE: "1"},
    )


def ready(steps: Iterable[Step], unverified: str) -> list[Step]:
    """Servers are told of the unverified options (JSON) as well; without any, their steps go."""
    made = []
    for step in steps:
        if UNVERIFIED_VARIABLE not in step.environment:
            made.append(step)
        elif json.loads(unverified):
            environment = {**step.environment, "SGL_VLLM_CONFIG": unverified}
            made.append(replace(step, environment=environment))
        else:
            print(f"{step.name}: nothing is unverified", flush=True)
    return made


def chosen(steps: Sequence[Step], patterns: Sequence[str]) -> list[Step]:
    """Those that a pattern names, in the order of the patterns; all if there is none.

    Raises:
        ValueError: a pattern names none.
    """
    if not patterns:
        return [*steps]
    found: dict[str, Step] = {}
    for pattern in patterns:
        named = [step for step in steps if fnmatch.fnmatchcase(step.name, pattern)]
        if not named:
            raise ValueError(f"there is no step {pattern!r}: --list shows them")
        found.update((step.name, step) for step in named)
    return [*found.values()]


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
            process.wait(limit_s)
            status = "passed" if process.returncode == 0 else "failed"
        except subprocess.TimeoutExpired:
            status = "stopped" if step.todo(folder) or not step.parts else "passed"
        finally:
            RUNNING.discard(process)
            end(process)
    ended = tests_in(folder)
    if status == "passed" and ended and "passed" not in ended:
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
    if ended := tests_in(folder):
        number = ended.count("passed")
        found["tests"] = f"{number} of {len(ended)} passed, {ended.count('skipped')} skipped"
        found.update(recorded(folder))
    for file in sorted(folder.glob("*.json")):
        content = read_json(file) or {}
        if "ratio" in content:
            found[file.stem] = f"{content['ratio']['throughput']:.2f}x"
        for kernel, rows in content.get("kernels", {}).items():
            if ratios := [row["ratio"] for row in rows if "ratio" in row]:
                found[kernel] = f"{min(ratios):.2f} to {max(ratios):.2f}x"
    return found


def read_json(file: Path) -> Any:
    """Its content; None if there is no such file, or one that was not written to its end."""
    try:
        return json.loads(file.read_text())
    except (FileNotFoundError, ValueError):
        return None


def junit(folder: Path) -> ElementTree.Element:
    """What pytest has written; an empty one if it has not, or not to its end."""
    try:
        return ElementTree.parse(folder / "junit.xml").getroot()
    except (FileNotFoundError, ElementTree.ParseError):
        return ElementTree.Element("testsuites")


def tests_in(folder: Path) -> list[str]:
    """How each test ended: passed, failed or skipped. Of a test that was interrupted, pytest writes
    no more than a time."""
    ends = {"failure": "failed", "error": "failed", "skipped": "skipped"}
    return [
        next((ends[child.tag] for child in case if child.tag in ends), "passed")
        for case in junit(folder).iter("testcase")
        if case.get("name")
    ]


def recorded(folder: Path) -> dict[str, str]:
    """What tests have recorded; several values of one name side by side."""
    found: dict[str, str] = {}
    for one in junit(folder).iter("property"):
        name, value = one.get("name", ""), one.get("value", "")
        found[name] = f"{found[name]}, {value}" if name in found else value
    return found


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
    venv = ROOT / ".venv" / "bin" / "python"
    if not pieces:
        for python in (str(venv), sys.executable):
            if can_run(python):
                return python
    install = [sys.executable, str(ROOT / "tools" / "gpu" / "install.py"), *map(str, pieces)]
    status = subprocess.run(install).returncode
    if status:
        raise SystemExit(status)
    if not can_run(str(venv)):
        raise SystemExit(f"suite: {venv} has vLLM and finds no CUDA device: nvidia-smi")
    return str(venv)


def can_run(python: str) -> bool:
    check = "import torch, vllm, sgl_vllm"
    if not on_cpu():
        check += "; assert torch.cuda.is_available()"
    try:
        return subprocess.run([python, "-c", check], cwd=ROOT, capture_output=True).returncode == 0
    except OSError:
        return False


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
        "--limit", type=int, metavar="SECONDS", help="for each step, instead of its own"
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=1,
        metavar="N",
        help="at once, of steps that measure no time",
    )
    parser.add_argument("--again", action="store_true", help="from nothing, what has passed too")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="FOLDER")
    parser.add_argument("--archive", type=Path, metavar="FILE", help="results as one .tar.gz, too")
    parser.add_argument("--pieces", type=Path, nargs="+", default=[], metavar="FOLDER")
    arguments = parser.parse_args(argv)
    steps = all_steps()
    try:
        wanted = chosen(steps, arguments.steps)
    except ValueError as error:
        parser.error(str(error))
    if arguments.list:
        for step in wanted:
            print(f"{step.name:<56}{step.limit_s:>5} s  {step.shows}")
        return 0
    ends = time.monotonic() + 60 * arguments.minutes if arguments.minutes else float("inf")
    python = find_python(arguments.pieces)
    wanted = ready(wanted, unverified_options(python))
    run_all(wanted, python, arguments, lambda: ends - time.monotonic())
    arguments.out.mkdir(parents=True, exist_ok=True)
    table = summary(steps, arguments.out)
    (arguments.out / "summary.md").write_text(table)
    print("\n" + table)
    if arguments.archive:
        with tarfile.open(arguments.archive, "w:gz") as tar:
            tar.add(arguments.out, arcname=arguments.out.name)
    results = [earlier(step, arguments.out) for step in wanted]
    return 0 if all(result and result.status == "passed" for result in results) else 1


def run_all(
    steps: Sequence[Step],
    python: str,
    arguments: argparse.Namespace,
    left_s: Callable[[], float],
) -> None:
    """One after the other, as far as the time goes. With `--jobs N`, first those that measure no
    time, N at once, each with a folder of its own for what vLLM compiles."""

    def run(number: int, step: Step) -> None:
        said = f"[{number} of {len(steps)}] {step.name}"
        if arguments.again:
            shutil.rmtree(arguments.out / step.name, ignore_errors=True)
        before = earlier(step, arguments.out)
        if before and before.status == "passed":
            print(f"{said}: passed before", flush=True)
            return
        if left_s() < LEAST_S:
            print(f"{said}: no time left; run the same again", flush=True)
            return
        limit_s = min(arguments.limit or step.limit_s, left_s() - PATIENCE_S)
        print(f"{said}: {step.shows} (at most {limit_s:.0f} s)", flush=True)
        result = run_step(step, python, arguments.out, limit_s)
        ended = f"    {result.status} after {result.seconds:.0f} s {result.figures}"
        print(f"{said}\n{ended}" if arguments.jobs > 1 else ended, flush=True)
        if result.status == "failed":
            log = (arguments.out / step.name / "log.txt").read_text(errors="replace")
            print("\n".join(f"    | {line[:200]}" for line in log.splitlines()[-12:]), flush=True)

    numbered = list(enumerate(steps, 1))
    if arguments.jobs > 1:
        together = [(number, apart(step)) for number, step in numbered if not step.is_timed]
        numbered = [(number, step) for number, step in numbered if step.is_timed]
        with ThreadPoolExecutor(arguments.jobs) as pool:
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
