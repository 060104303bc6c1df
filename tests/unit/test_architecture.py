"""The package's modules depend on each other without cycles, and only as ARCHITECTURE.md allows.

The import graph is read from the source, so that nothing is imported. Imports under
``if TYPE_CHECKING:`` do not count. Imports inside functions do: they delay a dependency but do not
remove it, so they may not close a cycle either.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "sgl_vllm"

MAY_IMPORT_VLLM = (
    "sgl_vllm.plugin",
    "sgl_vllm.vllm_api",
    "sgl_vllm.self_check",
    "sgl_vllm.radix.pool",
    "sgl_vllm.radix.part",
    "sgl_vllm.radix.manager",
    "sgl_vllm.scheduler.queue",
    "sgl_vllm.scheduler.scheduler",
    "sgl_vllm.scheduler.sharing",
    "sgl_vllm.scheduler.select",
    "sgl_vllm.scheduler.control",
    "sgl_vllm.scheduler.preemption",
    "sgl_vllm.jump",
    "sgl_vllm.fsm.vllm",
    "sgl_vllm.tiers",
    "sgl_vllm.routes",
    "sgl_vllm.routing.ray",
    "sgl_vllm.routing.ranks",
    "sgl_vllm.lang.backends.engine",  # the backend that runs vLLM in the same process
    "sgl_vllm.lang.backends.engine_requests",
)

MAY_NOT_IMPORT = {
    # A package, and what it may not depend on.
    "sgl_vllm.fsm": ("sgl_vllm.radix", "sgl_vllm.scheduler", "sgl_vllm.jump", "sgl_vllm.plugin"),
    "sgl_vllm.radix": ("sgl_vllm.fsm", "sgl_vllm.scheduler", "sgl_vllm.jump", "sgl_vllm.plugin"),
    "sgl_vllm.jump": ("sgl_vllm.scheduler", "sgl_vllm.plugin"),
    "sgl_vllm.scheduler": ("sgl_vllm.plugin", "sgl_vllm.routes"),
    "sgl_vllm.protocol": ("sgl_vllm",),
    "sgl_vllm.vllm_api": ("sgl_vllm.radix", "sgl_vllm.scheduler", "sgl_vllm.fsm", "sgl_vllm.lang"),
}

LANGUAGE_MAY_IMPORT = ("sgl_vllm.lang", "sgl_vllm.protocol")

# The engine in this process has no HTTP routes: its statistics are read as the route reads them.
EXCEPTIONS = {("sgl_vllm.lang.backends.engine", "sgl_vllm.routes.engines")}

# Imports that are still to be removed. Delete an entry when its import is gone; add none.
IMPORTS_LEFT = {
    ("sgl_vllm.radix.slot_copies", "vllm"),
    ("sgl_vllm.routing.kv_events", "vllm"),
}


@dataclass
class Module:
    """What a module imports: at its top level, and inside functions."""

    eager: set[str] = field(default_factory=set)
    lazy: set[str] = field(default_factory=set)

    @property
    def all(self) -> set[str]:
        return self.eager | self.lazy


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_type_checking(test: ast.expr) -> bool:
    return "TYPE_CHECKING" in (getattr(test, "id", None), getattr(test, "attr", None))


def imports_in(
    nodes: list[ast.stmt] | list[ast.AST], *, is_lazy: bool
) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    """The import statements below `nodes`, each with whether it is inside a function."""
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node, is_lazy
        elif isinstance(node, ast.If) and is_type_checking(node.test):
            yield from imports_in(node.orelse, is_lazy=is_lazy)
        else:
            is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            children = list(ast.iter_child_nodes(node))
            yield from imports_in(children, is_lazy=is_lazy or is_function)


@cache
def modules() -> dict[str, Module]:
    paths = {name_of(path): path for path in (ROOT / PACKAGE).rglob("*.py")}
    graph = {name: Module() for name in paths}
    for name, path in paths.items():
        for statement, is_lazy in imports_in(ast.parse(path.read_text()).body, is_lazy=False):
            targets = graph[name].lazy if is_lazy else graph[name].eager
            if isinstance(statement, ast.Import):
                targets.update(alias.name for alias in statement.names)
                continue
            assert statement.level == 0, f"{path}: a relative import"
            assert statement.module is not None
            for alias in statement.names:
                submodule = f"{statement.module}.{alias.name}"
                targets.add(submodule if submodule in paths else statement.module)
        graph[name].eager.discard(name)
        graph[name].lazy.discard(name)
    return graph


def is_in(module: str, *packages: str) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def cycles(graph: dict[str, set[str]]) -> list[frozenset[str]]:
    """The strongly connected components of more than one module (Tarjan's algorithm)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[frozenset[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in graph[name]:
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            component = frozenset(stack[stack.index(name) :])
            del stack[stack.index(name) :]
            if len(component) > 1:
                found.append(component)

    for name in graph:
        if name not in index:
            visit(name)
    return found


def internal(*, lazy: bool) -> dict[str, set[str]]:
    graph = modules()
    return {
        name: {other for other in (m.all if lazy else m.eager) if other in graph}
        for name, m in graph.items()
    }


def violations() -> set[tuple[str, str]]:
    """The imports between parts that ARCHITECTURE.md does not allow, as (importer, imported)."""
    found = set()
    for name, module in modules().items():
        for other in module.all:
            if is_in(other, "vllm") and not is_in(name, *MAY_IMPORT_VLLM):
                found.add((name, "vllm"))
            for package, forbidden in MAY_NOT_IMPORT.items():
                is_own = is_in(other, package)
                if is_in(name, package) and is_in(other, *forbidden) and not is_own:
                    found.add((name, other))
            if (
                is_in(name, "sgl_vllm.lang")
                and is_in(other, PACKAGE)
                and not is_in(other, *LANGUAGE_MAY_IMPORT)
            ):
                found.add((name, other))
    return found - EXCEPTIONS


def test_no_modules_import_each_other_in_a_cycle() -> None:
    assert cycles(internal(lazy=False)) == []


def test_imports_inside_functions_close_no_cycle() -> None:
    assert cycles(internal(lazy=True)) == []


def test_parts_import_only_what_the_architecture_allows() -> None:
    assert violations() <= IMPORTS_LEFT


def test_importing_the_language_imports_neither_vllm_nor_torch() -> None:
    script = (
        "import sys, sgl_vllm as sgl\n"
        "for name in sgl.__all__: getattr(sgl, name)\n"
        "print(sorted({name.split('.')[0] for name in sys.modules} & {'vllm', 'torch'}))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert ran.stdout.strip() == "[]"


def test_a_cycle_is_found_wherever_it_is() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": {"e"}, "e": {"d"}, "f": {"a"}}
    assert set(cycles(graph)) == {frozenset("abc"), frozenset("de")}
