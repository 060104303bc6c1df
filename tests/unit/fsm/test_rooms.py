"""The automata are pure: only `fsm/vllm` imports vLLM, torch or anything above it."""

from __future__ import annotations

import ast
from pathlib import Path

import sgl_vllm.fsm

FSM = Path(sgl_vllm.fsm.__file__).parent
PURE = sorted(path for path in FSM.rglob("*.py") if FSM / "vllm" not in path.parents)
ALLOWED = ("sgl_vllm.fsm", "sgl_vllm.jit")


def imported_modules(path: Path) -> set[str]:
    modules = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            assert node.module is not None
            modules.add(node.module)
            modules |= {f"{node.module}.{alias.name}" for alias in node.names}
    return modules


def test_pure_modules_import_neither_vllm_nor_what_is_above_them() -> None:
    assert len(PURE) > 20
    for path in PURE:
        for module in imported_modules(path):
            assert module.partition(".")[0] not in ("vllm", "torch", "xgrammar", "llguidance"), path
            if module.startswith("sgl_vllm"):
                assert module.startswith(ALLOWED), path
            assert not module.startswith("sgl_vllm.fsm.vllm"), path
