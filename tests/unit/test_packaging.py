"""What is published: metadata, requirements, pins, entry points, and the wheel's content."""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import sgl_vllm
from sgl_vllm.vllm_api import versions
from tests.packaged_sources import copy_of_sources

ROOT = Path(sgl_vllm.__file__).parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
CUDA_ONLY = {"torchvision", "torchaudio", "torchcodec"}


def name_of(requirement: str) -> str:
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert match
    return match.group().lower().replace("_", "-")


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


def test_the_ray_extra_asks_for_what_make_ray_tests_and_for_no_vllm() -> None:
    asked = [Requirement(line) for line in PROJECT["optional-dependencies"]["ray"]]
    pinned = dict(pins("ray.txt")) | dict(pins("cpu.txt"))
    for requirement in asked:
        if requirement.name != "sgl-vllm":
            assert requirement.specifier.contains(pinned[name_of(requirement.name)])
    ray = next(requirement for requirement in asked if requirement.name == "ray")
    assert ray.extras == {"serve"}  # `llm` pins a vLLM


def test_one_registry_address_in_the_project() -> None:
    """Everything else comes from whatever index the user's pip is set up with."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    address = "download.pytorch" + ".org"
    holders = [
        name
        for name in listed.stdout.split("\0")
        if name.endswith((".py", ".toml", ".txt", ".md", "Makefile", "run"))
        and address in (ROOT / name).read_text()
    ]
    assert holders == ["tools/install.py"]


@pytest.mark.parametrize("group", ["vllm.general_plugins", "vllm.endpoint_plugins"])
def test_entry_points_resolve(group: str) -> None:
    value = PROJECT["entry-points"][group]["sgl_vllm"]
    assert callable(EntryPoint("sgl_vllm", value, group).load())


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return copy_of_sources(tmp_path / "source")


def build(hook: str, source: Path, into: Path) -> Path:
    """What pip asks of the build backend, without its isolation."""
    code = f"from setuptools import build_meta; build_meta.{hook}({str(into)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=source, capture_output=True, check=True)
    (built,) = (path for path in into.iterdir() if path.is_file())
    return built


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


def test_the_wheel_holds_the_package_and_nothing_else(source: Path, tmp_path: Path) -> None:
    wheel = build("build_wheel", source, tmp_path)
    assert wheel.name.startswith(f"sgl_vllm-{sgl_vllm.__version__}-py3")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0].partition("-")[0] for name in names} == {"sgl_vllm"}
    assert {"sgl_vllm/py.typed", "sgl_vllm/commands/cli.py", "sgl_vllm/_guard.py"} <= set(names)
    assert "sgl_vllm/demo/model/config.json" in names
    assert "sgl_vllm/demo/model/model.safetensors" in names
    kernels = {name for name in names if name.startswith("sgl_vllm/kernels/")}
    assert kernels == {f"sgl_vllm/kernels/{path.name}" for path in (ROOT / "kernels").glob("*.py")}
    for folder in ("deploy", "examples"):
        files = {path for path in (ROOT / folder).rglob("*") if path.is_file()}
        found = {path.relative_to(ROOT) for path in files if path.suffix != ".pyc"}
        assert {f"sgl_vllm/shipped/{path}" for path in found} <= set(names)
    pages = {path for path in (ROOT / "sgl_vllm" / "pages").rglob("*.*") if path.suffix != ".pyc"}
    assert {str(path.relative_to(ROOT)) for path in pages} <= set(names)
    assert "sgl_vllm/pages/tree/tree.css" in names
    shipped = "sgl_vllm/shipped/benchmarks/"
    assert {f"{shipped}report/page.html", f"{shipped}results/counts.json"} <= set(names)


def test_an_editable_installation_finds_the_kernels_in_the_checkout(
    source: Path, tmp_path: Path
) -> None:
    site = tmp_path / "site"
    zipfile.ZipFile(build("build_editable", source, tmp_path)).extractall(site)
    code = (
        f"import site, sys; sys.path += {[str(site), sysconfig.get_path('purelib')]!r}\n"
        f"site.addsitedir({str(site)!r})\n"
        "import sgl_vllm, sgl_vllm.kernels; print(sgl_vllm.__file__, sgl_vllm.kernels.__file__)"
    )
    command = [sys.executable, "-I", "-S", "-c", code]
    answer = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    places = [source / "sgl_vllm" / "__init__.py", source / "kernels" / "__init__.py"]
    assert answer.stdout.split() == [str(place) for place in places], answer.stderr
