"""The modules of tools/gpu, which are scripts and in no package."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

TOOLS = Path(__file__).parents[3] / "tools" / "gpu"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """`script("pack")` is tools/gpu/pack.py, loaded anew."""

    def load(name: str) -> ModuleType:
        module_name = f"tools_gpu_{name}"
        spec = importlib.util.spec_from_file_location(module_name, TOOLS / f"{name}.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, module_name, module)  # dataclasses look there
        spec.loader.exec_module(module)
        return module

    return load
