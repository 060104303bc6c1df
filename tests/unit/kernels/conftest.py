"""The kernels' tests run in Triton's interpreter, on the CPU, all in one process of their own.

`triton.jit` reads TRITON_INTERPRET when it decorates, and triton decorates its own library when it
is imported. Another test of this process may have imported it by then, and what vLLM decorates
afterwards must not be interpreted. What wants the compiler instead, or no Triton, is named below.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import sgl_vllm

ROOT = Path(__file__).parents[3]
VARIABLE = "TRITON_INTERPRET"
IS_INTERPRETING = os.environ.get(VARIABLE) == "1"
COMPILED = "test_compiles.py"
PURE = ("test_attention_backend.py", "test_decode_step.py", "test_prefix_plan.py")


class InInterpreter(pytest.File):
    """A file whose tests run in that process."""

    def collect(self) -> Iterator[pytest.Item]:
        run = Run.from_parent(self, name=f"{self.path.stem} in Triton's interpreter")
        run.add_marker(pytest.mark.slow)
        yield run


class Run(pytest.Item):
    def runtest(self) -> None:
        pytest.importorskip("triton", reason="there is no Triton for this machine")
        done = run_interpreted(*(item.path for item in self.session.items if isinstance(item, Run)))
        at_fault = re.findall(r"^(?:FAILED|ERROR) .*?(test_\w+\.py)", done.stdout, re.MULTILINE)
        if done.returncode and (self.path.name in at_fault or not at_fault):
            raise Failed(done.stdout + done.stderr)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException]) -> str:  # type: ignore[override]
        return str(excinfo.value)

    def reportinfo(self) -> tuple[Path, None, str]:
        return self.path, None, self.name


class Failed(Exception):
    """The message is what pytest printed."""


@functools.cache
def run_interpreted(*files: Path) -> subprocess.CompletedProcess[str]:
    """Once for all files: to import torch and triton takes longer than most tests."""
    environment = {"OMP_NUM_THREADS": "1", **os.environ, VARIABLE: "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *map(str, files)]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


if IS_INTERPRETING:
    collect_ignore = [COMPILED]
else:

    def pytest_pycollect_makemodule(
        module_path: Path, parent: pytest.Collector
    ) -> InInterpreter | None:
        if module_path.name in (COMPILED, *PURE):
            return None
        # As if all were of one file, so that pytest-xdist gives them to one worker.
        return InInterpreter.from_parent(parent, path=module_path, nodeid="tests/unit/kernels")


def _import_from_the_checkout() -> None:
    """Only an installation gives the folder its name `sgl_vllm.kernels`; and the one that is
    installed may be another checkout's."""
    name, folder = "sgl_vllm.kernels", ROOT / "kernels"
    found = importlib.util.find_spec(name)
    if found is None or found.origin != str(folder / "__init__.py"):
        spec = importlib.util.spec_from_file_location(
            name, folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        assert spec is not None and spec.loader is not None
        sys.modules[name] = sgl_vllm.kernels = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sgl_vllm.kernels)


_import_from_the_checkout()
