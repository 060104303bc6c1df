"""The wheel and the sdist, installed by pip in clean environments, with and without a vLLM.

Without a network: an environment sees chosen packages of the one that runs the tests through a
folder of links, and pip has no index. What pip would have to fetch therefore fails the
installation. `make release` runs these tests on the files that it has built.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from collections.abc import Iterator
from email import message_from_bytes
from email.message import Message
from importlib.metadata import Distribution, distribution, distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import sgl_vllm
from sgl_vllm.demo import MODEL_PATH
from tests.dockerfiles import script_of
from tests.packaged_sources import copy_of_sources
from tools.release.build import build

ROOT = Path(sgl_vllm.__file__).parent.parent
EPOCH_S = 1_750_000_000
HEAVY = re.compile(r"torch|triton|vllm|transformers|xgrammar|cuda|nvidia")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The wheel and the sdist."""
    if given := os.environ.get("SGL_VLLM_DISTRIBUTIONS"):
        (wheel,), (sdist,) = Path(given).glob("*.whl"), Path(given).glob("*.tar.gz")
        return wheel, sdist
    source = copy_of_sources(tmp_path_factory.mktemp("built") / "source")
    return build(source, tmp_path_factory.mktemp("dist"), EPOCH_S)


# -- environments ---------------------------------------------------------------------------------


class Environment:
    """A virtual environment that sees some packages of this one, by links."""

    def __init__(self, folder: Path, packages: set[str]) -> None:
        self.folder = folder
        venv.create(folder / "venv", with_pip=True)
        self.run("python", "-m", "pip", "uninstall", "--quiet", "--yes", "setuptools")
        links = folder / "links"
        links.mkdir()
        for name in packages:
            for path in top_level(distribution(name)):
                if not (links / path.name).is_symlink():
                    (links / path.name).symlink_to(path)
        own = Path(sysconfig.get_path("purelib", vars={"base": str(folder / "venv")}))
        (own / "links.pth").write_text(f"{links}\n")

    def install(self, what: str) -> set[str]:
        """Installs without an index, and returns the names of the packages that were added."""
        report = self.folder / "report.json"
        pip = ["-m", "pip", "install", "--quiet", "--no-index", "--no-build-isolation"]
        self.run("python", *pip, "--report", str(report), what)
        installed = json.loads(report.read_text())["install"]
        return {canonicalize_name(one["metadata"]["name"]) for one in installed}

    def run(self, command: str, *arguments: str) -> str:
        programs = self.folder / "venv" / "bin"
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        environment["PATH"] = f"{programs}{os.pathsep}{os.environ['PATH']}"
        answer = subprocess.run(
            [shutil.which(command, path=environment["PATH"]) or command, *arguments],
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert answer.returncode == 0, answer.stderr + answer.stdout
        return answer.stdout


def top_level(package: Distribution) -> Iterator[Path]:
    """What a package has in the folder of packages."""
    site = Path(sysconfig.get_path("purelib"))
    for name in {file.parts[0] for file in package.files or ()} - {".."}:
        if (site / name).exists() and name != "__pycache__":
            yield site / name


def closure(requirements: list[str], extras: frozenset[str] = frozenset()) -> set[str]:
    """The names of the packages that these need, at the versions installed here."""
    found: set[str] = set()
    waiting = [(Requirement(one), extras) for one in requirements]
    while waiting:
        requirement, wanted = waiting.pop()
        markers = [{"extra": extra} for extra in wanted or ("",)]
        if requirement.marker and not any(map(requirement.marker.evaluate, markers)):
            continue
        name = canonicalize_name(requirement.name)
        if name in found:
            continue
        found.add(name)
        own = frozenset(requirement.extras)
        waiting += [(Requirement(one), own) for one in distribution(name).requires or ()]
    return found


def requirements_of(wheel: Path, extra: str = "") -> set[str]:
    """All packages that an installation of the wheel needs where there is nothing."""
    required = metadata_of(wheel).get_all("Requires-Dist") or []
    return closure(required, frozenset([extra] if extra else []))


def metadata_of(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        return message_from_bytes(archive.read(name))


@pytest.fixture(scope="module")
def client(built: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """With what the client and `[server]` require, and no vLLM."""
    wheel, _ = built
    needed = requirements_of(wheel, "server") | requirements_of(wheel)
    environment = Environment(tmp_path_factory.mktemp("client"), needed)
    assert environment.install(f"{wheel}[server]") == {"sgl-vllm"}
    return environment


@pytest.fixture(scope="module")
def next_to_vllm(built: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """With all that is installed here, vLLM included. From the sdist."""
    names: set[str] = {canonicalize_name(one.metadata["Name"]) for one in distributions()}
    environment = Environment(tmp_path_factory.mktemp("server"), names - {"sgl-vllm", "pip"})
    assert environment.install(f"{built[1]}[server]") == {"sgl-vllm"}
    return environment


# -- tests ----------------------------------------------------------------------------------------


def test_the_wheel_holds_the_package_and_nothing_else(built: tuple[Path, Path]) -> None:
    wheel, sdist = built
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
    data = ("results/counts.json", "schemas.jsonl")
    assert {f"{shipped}{name}" for name in data} <= set(names)
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    assert {"kernels/__init__.py", "sgl_vllm/__init__.py", "pyproject.toml"} <= inside


def test_an_editable_installation_finds_the_kernels_in_the_checkout(
    tmp_path: Path,
) -> None:
    source, site = copy_of_sources(tmp_path / "source"), tmp_path / "site"
    hook = f"from setuptools import build_meta; build_meta.build_editable({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", hook], cwd=source, capture_output=True, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(site)
    code = (
        f"import site, sys; sys.path += {[str(site), sysconfig.get_path('purelib')]!r}\n"
        f"site.addsitedir({str(site)!r})\n"
        "import sgl_vllm, sgl_vllm.kernels; print(sgl_vllm.__file__, sgl_vllm.kernels.__file__)"
    )
    command = [sys.executable, "-I", "-S", "-c", code]
    answer = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    places = [source / "sgl_vllm" / "__init__.py", source / "kernels" / "__init__.py"]
    assert answer.stdout.split() == [str(place) for place in places], answer.stderr


@pytest.mark.parametrize("extra", ["", "server"])
def test_nothing_heavy_is_required(built: tuple[Path, Path], extra: str) -> None:
    needed = requirements_of(built[0], extra)
    assert {"httpx", "openai"} <= needed
    assert ("numba" in needed) == (extra == "server")
    assert {name for name in needed if HEAVY.search(name)} == set()


def test_without_vllm_it_is_a_client(client: Environment) -> None:
    assert client.run("sgl-vllm", "--version") == (
        f"sgl-vllm {sgl_vllm.__version__}, no vLLM (client)\n"
    )
    report = client.run("sgl-vllm", "doctor")
    assert "vLLM is not installed" in report and "No problems found" in report
    client.run("python", "-c", "import sgl_vllm as sgl; sgl.gen('a', regex='[0-9]')")


def test_examples_and_benchmarks_come_with_it(client: Environment) -> None:
    listed = client.run("sgl-vllm", "examples")
    assert all(f"\n{name}" in f"\n{listed}" for name in ("classify.py", "serving/ray.yaml"))
    shown = client.run("sgl-vllm", "examples", "classify.py")
    assert shown == (ROOT / "examples" / "classify.py").read_text()
    client.run("sgl-vllm", "examples", "all", "--copy", "copies")
    assert (client.folder / "copies" / "tutorial.ipynb").is_file()
    assert "\nab " in f"\n{client.run('sgl-vllm', 'bench')}"


def test_next_to_vllm_all_parts_are_found(next_to_vllm: Environment) -> None:
    report = json.loads(next_to_vllm.run("sgl-vllm", "doctor", "--json"))
    assert report["healthy"]
    assert {part["name"] for part in report["parts"] if not part["on"]} == set()
    found = next_to_vllm.run(
        "python", "-c", "import sgl_vllm.kernels, vllm; print(sgl_vllm.__file__, vllm.__file__)"
    )
    ours, of_vllm = found.splitlines()[-1].split()
    assert Path(ours).is_relative_to(next_to_vllm.folder / "venv")
    assert Path(of_vllm).is_relative_to(next_to_vllm.folder / "links")
    assert "--model" in next_to_vllm.run("sgl-vllm", "bench", "ab", "--help")


def test_without_numba_only_what_runs_compiled_loops_is_off(next_to_vllm: Environment) -> None:
    links, away = next_to_vllm.folder / "links", next_to_vllm.folder / "away"
    away.mkdir()
    for path in links.glob("numba*"):
        path.rename(away / path.name)
    try:
        answer = next_to_vllm.run("sh", "-c", f"sgl-vllm doctor --json {MODEL_PATH} || true")
    finally:
        for path in away.iterdir():
            path.rename(links / path.name)
    off = {part["name"]: part["reason"] for part in json.loads(answer)["parts"] if part["reason"]}
    assert {*off} == {"fsm", "jump_forward"}
    assert all(reason.startswith("numba cannot be imported") for reason in off.values())


def test_the_steps_of_the_dockerfile_install_it(
    built: tuple[Path, Path], next_to_vllm: Environment, tmp_path: Path
) -> None:
    """In the place of an image, which needs Docker. pip stands for uv, without an index."""
    next_to_vllm.run("python", "-m", "pip", "uninstall", "--quiet", "--yes", "sgl-vllm")
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    shutil.copy(built[0], wheels)
    uv = next_to_vllm.folder / "venv" / "bin" / "uv"
    uv.write_text(
        '#!/bin/sh\n[ "$1 $2 $3 $4" = "pip install --system --no-cache" ] && shift 4 &&\n'
        'exec python -m pip install --quiet --no-index --no-cache-dir "$@"\n'
    )
    uv.chmod(0o755)
    script = script_of(ROOT / "deploy" / "Dockerfile").replace("/tmp/wheels", str(wheels))
    next_to_vllm.run("sh", "-euc", script)
    assert not wheels.exists()
    installed = next_to_vllm.run("sgl-vllm", "--version")
    assert installed.startswith(f"sgl-vllm {sgl_vllm.__version__}, vllm")
