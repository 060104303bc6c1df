"""`sgl-vllm doctor`: what is installed, which parts can be on, and how to repair the rest.

Owns the known problems of an installation and their remedies. Why a part is off is
`probe.missing_hooks`'s to say, or, for a model and flags, `doctor_model`'s. An installation without
vLLM is a healthy client.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Annotated

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sgl_vllm import __version__, flags
from sgl_vllm.commands import doctor_model
from sgl_vllm.commands.arguments import SERVE_FLAGS, PrintsJson, argument, check_model_first, flag
from sgl_vllm.commands.terminal import Misused
from sgl_vllm.vllm_api import metadata_shim, versions
from sgl_vllm.vllm_api.probe import PARTS, missing_hooks

PARSING = SERVE_FLAGS
AS_ON_GPU = "--as-on-gpu"

DESCRIPTION = """\
Without a model, checks this Python environment: the versions, which parts of
the plugin can be on, and what is wrong. Exit status: 0 if everything that is
installed works, 1 if something has to be repaired. Without vLLM this is a
client, which is healthy.

With a model, says which parts `vllm serve MODEL FLAGS --plugin sgl_vllm`
would have on this machine, and why the others are off. It reads the model's
config.json, not its weights, and takes about ten seconds:

    sgl-vllm doctor Qwen/Qwen3-8B --max-model-len 32768

The same for a GPU that this machine does not have:

    sgl-vllm doctor --as-on-gpu ./my-model --tensor-parallel-size 2

Exit status with a model: 0 if every part is on, checked at start or switched
off by its option, 1 if another part is off, 2 if vLLM would not start.
"""


def command(
    serve: Annotated[
        list[str] | None, argument("[MODEL [FLAGS ...]]", "As for `vllm serve`.")
    ] = None,
    as_on_gpu: Annotated[
        bool, flag(AS_ON_GPU, "Predict what vLLM would choose on an NVIDIA H100.")
    ] = False,
    as_json: PrintsJson = False,
    fix: Annotated[
        bool, flag("--fix", "Run the commands that repair problems, then check again.")
    ] = False,
) -> int:
    if serve:
        model, *flags = serve
        check_model_first(model, (AS_ON_GPU, "--json", "--fix"))
        return doctor_model.main(model, flags, as_on_gpu=as_on_gpu, as_json=as_json)
    if as_on_gpu:
        raise Misused(f"{AS_ON_GPU} needs a model")
    report = examine()
    if fix and not report.healthy:
        for line in repair(report):
            print(f"repaired by: {line}", file=sys.stderr)
        report = examine()
    if as_json:
        print(report.to_json())
    else:
        _print(report, Console())
    return 0 if report.healthy else 1


@dataclass(frozen=True)
class Component:
    """An installed package; `version` is None if it is missing."""

    name: str
    version: str | None
    note: str = ""


@dataclass(frozen=True)
class Part:
    """A part of the plugin, or the client: whether it can be on here, and if not, why."""

    name: str
    on: bool
    reason: str = ""


@dataclass(frozen=True)
class Problem:
    """What is wrong, the command that repairs it, and the function with which `--fix` does.

    `repair` is None where a person has to decide.
    """

    text: str
    command: str
    repair: Callable[[], None] | None = field(default=None, repr=False)


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
    """Checks this interpreter's environment."""
    vllm = versions.installed_vllm()
    problems = list(_problems_of_installation(vllm))
    notes = []
    parts = [Part("client", True)]
    if vllm is None:
        notes.append(f"This is a client, and complete. {versions.unsupported_message(None)}")
        parts += [Part(name, False, "vLLM is not installed") for name in PARTS]
    elif problems:
        parts += [Part(name, False, "repair the installation first") for name in PARTS]
    else:
        if message := versions.unsupported_message(vllm):
            notes.append(message)
        if frontend := flags.other_frontend(Namespace(subparser="serve")):
            notes.append(f"VLLM_USE_RUST_FRONTEND is set: {frontend}, {flags.NOT_SERVED}.")
        lacking = {name: ", ".join(missing_hooks(name)) for name in PARTS}
        parts += [
            Part(name, not missing, f"this vLLM lacks {missing}" if missing else "")
            for name, missing in lacking.items()
        ]
    return Report(_components(vllm), parts, problems, notes)


def repair(report: Report) -> list[str]:
    """Repairs every problem that needs no decision. Returns the commands that did."""
    commands = []
    for problem in report.problems:
        if problem.repair is not None:
            problem.repair()
            commands.append(problem.command)
    return commands


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
            f"{names} are installed over each other: keep only one.",
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
        text = (
            f"{vllm.distribution} has no package metadata named vllm, so `vllm serve` cannot start."
        )
    elif versions.release_of(named_vllm) != versions.release_of(vllm.version):
        text = f"The package metadata named vllm says {named_vllm}, but the code is {vllm.version}."
    else:
        return
    version = metadata_shim.shim_version(vllm.version, vllm.build)
    yield Problem(
        text, "sgl-vllm doctor --fix", lambda: metadata_shim.install(version, vllm.distribution)
    )


def _problems_of_torch_companions(vllm: versions.InstalledVllm) -> Iterator[Problem]:
    """CUDA builds fail to import next to a CPU torch, and transformers imports torchvision."""
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
                f"vLLM's text models do not need it.",
                f"pip uninstall --yes {name}",
                _pip("uninstall", "--yes", name),
            )


def _pip(*arguments: str) -> Callable[[], None]:
    def run() -> None:
        subprocess.run([sys.executable, "-m", "pip", *arguments], check=True)

    return run


def _print(report: Report, console: Console) -> None:
    installed = Table(box=None, pad_edge=False, show_header=False)
    for component in report.components:
        installed.add_row(component.name, component.version or "-", f"[dim]{component.note}[/dim]")
    console.print("[bold]Installed[/bold]")
    console.print(installed)

    states = {True: ("on", "green"), False: ("off", "yellow")}
    console.print("\n[bold]Parts[/bold]")
    console.print(
        doctor_model.parts_table((one.name, *states[one.on], one.reason) for one in report.parts)
    )

    for note in report.notes:
        console.print(f"\n{note}", highlight=False, markup=False, soft_wrap=True)
    for problem in report.problems:
        console.print(f"\n[red]![/red] {escape(problem.text)}", highlight=False, soft_wrap=True)
        console.print(f"  {problem.command}", highlight=False, markup=False, soft_wrap=True)
    if report.healthy:
        console.print("\n[green]No problems found.[/green]")
