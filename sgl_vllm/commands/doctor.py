"""Says what is installed here, which parts would be on, and what to mend.

Owns the known traps of an installation and their remedies. Does not know why a part is on or off:
that is `plugin.probe_parts`, asked in a process of its own, because importing vLLM takes seconds,
logs, and may crash. An installation without vLLM is a healthy client.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field

from sgl_vllm import __version__
from sgl_vllm.vllm_api import metadata_shim, versions
from sgl_vllm.vllm_api.probe import PARTS

PROBE_TIMEOUT_S = 180
PROBE_MARK = "sgl_vllm.parts "
# vLLM logs to stdout: the answer is the line that begins with the mark.
PROBE = f"""
import dataclasses, json
from sgl_vllm.plugin import probe_parts
print({PROBE_MARK!r} + json.dumps([dataclasses.asdict(part) for part in probe_parts()]))
"""


@dataclass(frozen=True)
class Component:
    name: str
    version: str | None
    note: str = ""


@dataclass(frozen=True)
class Part:
    """One part of the plugin (or the client) as it would be in this environment."""

    name: str
    on: bool
    reason: str = ""


@dataclass(frozen=True)
class Problem:
    """What is wrong, the command that mends it, and how `--fix` does (None: it takes a person)."""

    text: str
    command: str
    mend: Callable[[], None] | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Report:
    components: list[Component]
    parts: list[Part]
    problems: list[Problem]
    notes: list[str]

    @property
    def healthy(self) -> bool:
        return not self.problems

    def to_json(self) -> str:
        problems = [{"text": problem.text, "command": problem.command} for problem in self.problems]
        content = {
            "healthy": self.healthy,
            "components": [asdict(component) for component in self.components],
            "parts": [asdict(part) for part in self.parts],
            "problems": problems,
            "notes": self.notes,
        }
        return json.dumps(content, indent=2)


def examine() -> Report:
    """Looks at this interpreter's environment. Takes seconds where vLLM is installed."""
    vllm = versions.installed_vllm()
    problems = list(_problems_of_installation(vllm))
    notes = []
    parts = [Part("client", True)]
    if vllm is None:
        notes.append(f"Client only, a complete installation. {versions.unsupported_message(None)}")
        parts += [Part(name, False, "vLLM is not installed") for name in PARTS]
    elif problems:
        parts += [Part(name, False, "mend the installation first") for name in PARTS]
    else:
        if message := versions.unsupported_message(vllm):
            notes.append(message)
        try:
            parts += probe_parts()
        except ProbeFailed as failure:
            parts += [Part(name, False, "could not be asked") for name in PARTS]
            problems.append(Problem(str(failure), "python -c 'import sgl_vllm.plugin'"))
    return Report(_components(vllm), parts, problems, notes)


class ProbeFailed(Exception):
    """The plugin could not be asked; the message holds the last line of its error."""


def probe_parts() -> list[Part]:
    """`plugin.probe_parts()` of this environment, from a process of its own."""
    environment = os.environ | {"VLLM_LOGGING_LEVEL": "ERROR"}
    try:
        answer = subprocess.run(
            [sys.executable, "-c", PROBE],
            capture_output=True,
            text=True,
            timeout=PROBE_TIMEOUT_S,
            env=environment,
        )
    except subprocess.TimeoutExpired:
        raise ProbeFailed(f"The plugin did not answer within {PROBE_TIMEOUT_S} s") from None
    for line in answer.stdout.splitlines():
        if line.startswith(PROBE_MARK):
            return [Part(**part) for part in json.loads(line.removeprefix(PROBE_MARK))]
    errors = answer.stderr.strip().splitlines() or [f"exit status {answer.returncode}"]
    raise ProbeFailed(f"The plugin cannot be loaded here: {errors[-1]}")


def mend(report: Report) -> list[str]:
    """Mends what can be mended without a choice; returns what was done, a line each."""
    done = []
    for problem in report.problems:
        if problem.mend is not None:
            problem.mend()
            done.append(problem.command)
    return done


def _components(vllm: versions.InstalledVllm | None) -> list[Component]:
    components = [
        Component("sgl-vllm", __version__),
        Component("Python", platform.python_version(), sys.executable),
    ]
    if vllm is None:
        components.append(Component("vLLM", None))
    else:
        note = f"{vllm.distribution}, {vllm.build} build, {vllm.support}"
        components.append(Component("vLLM", vllm.version, note))
    for name in ("torch", "xgrammar", "transformers", "openai", "httpx"):
        components.append(Component(name, versions.version_of(name)))
    return components


def _problems_of_installation(vllm: versions.InstalledVllm | None) -> Iterator[Problem]:
    if vllm is None:
        return
    if len(several := versions.installed_vllms()) > 1:
        names = " and ".join(f"{each.distribution} {each.version}" for each in several)
        yield Problem(
            f"{names} are installed over each other; keep one.",
            f"pip uninstall {' '.join(each.distribution for each in several)}, then install one",
        )
    if vllm.support is versions.Support.UNSUPPORTED:
        yield Problem(
            versions.unsupported_message(vllm) or "", f"pip install '{vllm.distribution}==0.32.0'"
        )
    yield from _problems_of_metadata(vllm)
    for requirement in versions.server_requirements():
        if requirement.problem:
            spec = f"{requirement.package}{requirement.needed}"
            yield Problem(requirement.problem, requirement.mending_command, _pip("install", spec))
    yield from _problems_of_torch_companions(vllm)


def _problems_of_metadata(vllm: versions.InstalledVllm) -> Iterator[Problem]:
    named_vllm = versions.version_of("vllm")
    if named_vllm is None:
        text = f"{vllm.distribution} has no metadata named `vllm`, so `vllm serve` cannot start."
    elif versions.release_of(named_vllm) != versions.release_of(vllm.version):
        text = f"The metadata named `vllm` says {named_vllm}, but the code is {vllm.version}."
    else:
        return
    version = metadata_shim.shim_version(vllm.version, vllm.build)
    yield Problem(
        text, "sgl-vllm doctor --fix", lambda: metadata_shim.install(version, vllm.distribution)
    )


def _problems_of_torch_companions(vllm: versions.InstalledVllm) -> Iterator[Problem]:
    """CUDA builds next to a CPU torch fail on import, and transformers imports torchvision."""
    torch = versions.version_of("torch")
    if torch is None:
        yield Problem("vLLM is installed but torch is not.", f"pip install {vllm.distribution}")
        return
    if not torch.endswith("+cpu"):
        return
    for name in ("torchvision", "torchaudio", "torchcodec"):
        version = versions.version_of(name)
        if version is not None and not version.endswith("+cpu"):
            yield Problem(
                f"{name} {version} is a CUDA build and cannot load next to torch {torch}; "
                f"vLLM's text models do without it.",
                f"pip uninstall --yes {name}",
                _pip("uninstall", "--yes", name),
            )


def _pip(*arguments: str) -> Callable[[], None]:
    def run() -> None:
        subprocess.run([sys.executable, "-m", "pip", *arguments], check=True)

    return run
