"""The package's modules depend on each other without cycles, and only as this file allows;
and they change vLLM only through `sgl_vllm/vllm_api/patching.py`.

The import graph is read from the source, so that nothing is imported. Imports under
``if TYPE_CHECKING:`` do not count. Imports inside functions do: they delay a dependency but do not
remove it, so they may not close a cycle either.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

from sgl_vllm.vllm_api.stub_entries import Kind, read_entries

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "sgl_vllm"

MAY_IMPORT_VLLM = (
    "sgl_vllm.plugin",
    "sgl_vllm.vllm_api",
    "sgl_vllm.self_check",
    "sgl_vllm.preview.engine",
    "sgl_vllm.preview.layers",
    "sgl_vllm.preview.gpu",
    "sgl_vllm.preview.resolve",
    "sgl_vllm.programs.programs",
    "sgl_vllm.radix.groups",
    "sgl_vllm.radix.pool",
    "sgl_vllm.radix.marked_pool",
    "sgl_vllm.radix.part",
    "sgl_vllm.radix.allocation",
    "sgl_vllm.radix.manager",
    "sgl_vllm.radix.retention",
    "sgl_vllm.approximate.chunk_rows",
    "sgl_vllm.approximate.copies",
    "sgl_vllm.approximate.part",
    "sgl_vllm.approximate.reuse",
    "sgl_vllm.scheduler.queue",
    "sgl_vllm.scheduler.refusals",
    "sgl_vllm.scheduler.scheduler",
    "sgl_vllm.scheduler.sharing",
    "sgl_vllm.scheduler.select",
    "sgl_vllm.scheduler.step_times",
    "sgl_vllm.scheduler.control",
    "sgl_vllm.jump",
    "sgl_vllm.fsm.vllm",
    "sgl_vllm.tiers",
    "sgl_vllm.routes",
    "sgl_vllm.routing.ray",
    "sgl_vllm.routing.ranks",
    "sgl_vllm.routing.kv_events",  # decodes vLLM's own messages
    "sgl_vllm.lang.backends.engine",  # the backend that runs vLLM in the same process
)

MAY_NOT_IMPORT = {
    # A package, and what it may not depend on.
    "sgl_vllm.fsm": ("sgl_vllm.radix", "sgl_vllm.scheduler", "sgl_vllm.jump", "sgl_vllm.plugin"),
    "sgl_vllm.radix": (
        *("sgl_vllm.fsm", "sgl_vllm.programs", "sgl_vllm.scheduler"),
        *("sgl_vllm.jump", "sgl_vllm.plugin"),
    ),
    "sgl_vllm.programs": ("sgl_vllm.fsm", "sgl_vllm.scheduler", "sgl_vllm.jump", "sgl_vllm.plugin"),
    "sgl_vllm.approximate": ("sgl_vllm.fsm", "sgl_vllm.scheduler", "sgl_vllm.plugin"),
    "sgl_vllm.jump": ("sgl_vllm.scheduler", "sgl_vllm.plugin"),
    "sgl_vllm.scheduler": ("sgl_vllm.plugin", "sgl_vllm.routes"),
    "sgl_vllm.protocol": ("sgl_vllm",),
    "sgl_vllm.vllm_api": ("sgl_vllm.radix", "sgl_vllm.scheduler", "sgl_vllm.fsm", "sgl_vllm.lang"),
}

LANGUAGE_MAY_IMPORT = ("sgl_vllm.lang", "sgl_vllm.pages", "sgl_vllm.protocol", "sgl_vllm.spelling")

# The engine that a program starts is given the plugin as `vllm serve --plugin` would be.
EXCEPTIONS = {("sgl_vllm.lang.backends.engine", "sgl_vllm.plugin")}


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_type_checking(test: ast.expr) -> bool:
    return "TYPE_CHECKING" in (getattr(test, "id", None), getattr(test, "attr", None))


def imports_in(node: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """The import statements below a node, those for type checkers left out."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child
        elif isinstance(child, ast.If) and is_type_checking(child.test):
            for other in child.orelse:
                yield from imports_in(other)
        else:
            yield from imports_in(child)


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def modules() -> dict[str, set[str]]:
    """What each module imports, at its top level or inside functions."""
    paths = {name_of(path): path for path in (ROOT / PACKAGE).rglob("*.py")}
    graph: dict[str, set[str]] = {name: set() for name in paths}
    for name, path in paths.items():
        for statement in imports_in(tree_of(path)):
            if isinstance(statement, ast.Import):
                graph[name].update(alias.name for alias in statement.names)
                continue
            assert statement.level == 0, f"{path}: a relative import"
            assert statement.module is not None
            for alias in statement.names:
                submodule = f"{statement.module}.{alias.name}"
                graph[name].add(submodule if submodule in paths else statement.module)
        graph[name].discard(name)
    return graph


def is_in(module: str, *packages: str) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def violations() -> set[tuple[str, str]]:
    """The imports that `MAY_NOT_IMPORT` and `MAY_IMPORT_VLLM` forbid, as (importer, imported)."""
    found = set()
    for name, imported in modules().items():
        for other in imported:
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
    own = {name: imported & modules().keys() for name, imported in modules().items()}
    TopologicalSorter(own).prepare()


def test_parts_import_only_what_the_architecture_allows() -> None:
    assert violations() == set()


# -- patches --------------------------------------------------------------------------------------


def patches_in(tree: ast.Module) -> list[str]:
    """The statements of a module that may change what vLLM's code does, other than through
    `patching.py`:

    - an attribute of another object set by a computed name, or its `__class__`,
    - an attribute of a class or a module that is imported from vLLM,
    - an attribute with the name of a method that our stubs of vLLM have, of anything but `self`.
    """
    nodes = list(ast.walk(tree))
    of_vllm = {
        alias.asname or alias.name.partition(".")[0]
        for node in nodes
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
        if f"{getattr(node, 'module', None) or alias.name}.".startswith("vllm.")
    }
    found = []
    for node in nodes:
        is_patch = False
        if isinstance(node, ast.Call):
            name = str(getattr(node.func, "id", getattr(node.func, "attr", "")))
            is_patch = name.strip("_") in ("setattr", "delattr")
            is_patch &= bool(node.args) and ast.unparse(node.args[0]) != "self"
        elif isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
            owner = ast.unparse(node.value)
            is_method = node.attr in vllm_methods() and owner != "self"
            is_patch = is_method or node.attr in ("__class__", "__dict__")
            is_patch |= owner.partition(".")[0] in of_vllm
        if is_patch:
            found.append(ast.unparse(node))
    return found


@cache
def vllm_methods() -> frozenset[str]:
    return frozenset(
        entry.name for entry in read_entries() if entry.kind is Kind.FUNCTION and entry.owner
    )


def test_nothing_patches_vllm_but_the_functions_for_it() -> None:
    paths = [
        path
        for package in (PACKAGE, "kernels")
        for path in (ROOT / package).rglob("*.py")
        if path != ROOT / PACKAGE / "vllm_api" / "patching.py"
    ]
    found = {str(path.relative_to(ROOT)): patches_in(tree_of(path)) for path in paths}
    assert {path: patches for path, patches in found.items() if patches} == {}


# -- the deprecated model runner ------------------------------------------------------------------

V1_MODULES = {"sgl_vllm/vllm_api/runners/v1.py", "sgl_vllm/vllm_api/runners/__init__.py"}
V1_STUBS = ("gpu_model_runner", "gpu_input_batch")


def test_nothing_but_its_own_module_and_the_choice_know_the_v1_runner() -> None:
    """So that it can be cut off: these two modules, and the stubs that only `v1.py` imports."""
    names = re.compile(rf"\b(V1|_update_states|{'|'.join(V1_STUBS)})\b")
    globs = ("kernels/*.py", "sgl_vllm/**/*.py", "sgl_vllm/**/*.pyi")
    files = (file for glob in globs for file in ROOT.glob(glob))
    knowing = [one for one in files if names.search(one.read_text()) and one.stem not in V1_STUBS]
    assert {str(one.relative_to(ROOT)) for one in knowing} == V1_MODULES


# -- the language ---------------------------------------------------------------------------------


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
