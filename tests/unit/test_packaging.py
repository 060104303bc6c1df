"""What is published: requirements, pins and packages. test_installation.py has the wheel."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import sgl_vllm
from sgl_vllm.vllm_api import versions

ROOT = Path(sgl_vllm.__file__).parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
CUDA_ONLY = {"torchvision", "torchaudio", "torchcodec"}


def name_of(requirement: str) -> str:
    return canonicalize_name(Requirement(requirement).name)


def pins(file: str) -> Iterator[tuple[str, str]]:
    """(package, version) of every line of a constraints file and the files it includes."""
    for line in (ROOT / "constraints" / file).read_text().splitlines():
        if included := re.match(r"-[rc] (.*)", line):
            yield from pins(included.group(1))
        elif line and not line.startswith("#"):
            pin = line.partition(";")[0].strip()
            assert "==" in pin, f"{file}: {line} is not pinned"
            yield name_of(pin), pin.partition("==")[2]


def test_the_doctor_checks_what_the_server_extra_asks_for_and_xgrammar() -> None:
    checked = {
        f"{package}>={minimum}" + (f",<{end}" if end else "")
        for package, minimum, end in versions.SERVER_PACKAGES
    }
    # vLLM brings xgrammar. Asked for by the extra, it would bring torch where there is no vLLM.
    assert checked == {*PROJECT["optional-dependencies"]["server"], "xgrammar>=0.2.1,<1"}


@pytest.mark.parametrize("file", ["cpu.txt", "cuda.txt"])
def test_every_package_is_pinned_once(file: str) -> None:
    names = [name for name, _ in pins(file)]
    assert sorted(names) == sorted(set(names))
    assert (
        versions.support_of(dict(pins(file))[f"vllm{'-cpu' * (file == 'cpu.txt')}"]) == "supported"
    )


def test_the_cpu_pins_hold_nothing_that_needs_cuda() -> None:
    names = {name for name, _ in pins("cpu.txt")}
    assert not names & CUDA_ONLY
    assert not {name for name in names if name.startswith("nvidia-")}
    assert "torch" not in names  # only ever by its +cpu version
    assert all(version.endswith("+cpu") for _, version in pins("torch-cpu.txt"))


def test_the_pins_hold_what_we_and_the_tests_need() -> None:
    pinned = {name for name, _ in pins("cpu.txt")}
    extras = PROJECT["optional-dependencies"]
    needed = [*PROJECT["dependencies"], *extras["server"], *extras["dev"]]
    assert {name_of(requirement) for requirement in needed} <= pinned


def test_every_package_is_listed() -> None:
    listed = PYPROJECT["tool"]["setuptools"]["packages"]
    folders = [
        path.parent
        for name in ("sgl_vllm", "benchmarks")
        for path in (ROOT / name).rglob("__init__.py")
    ]
    names = {".".join(folder.relative_to(ROOT).parts) for folder in folders}
    own = {name for name in names if name.startswith("sgl_vllm")}
    shipped = {f"sgl_vllm.shipped.{name}" for name in (*(names - own), "deploy", "examples")}
    assert listed == sorted({*own, *shipped, "sgl_vllm.kernels"})
