"""vLLM's classes, functions and attributes, read from its source.

Owns how a name is found in a source tree: through re-exports, base classes, dataclass fields,
properties, and `self.x = ...` in any method. Imports nothing of vLLM, so it answers in milliseconds
and reads an unpacked wheel as well as the installed vLLM. Does not own which names are needed
(`stub_entries.py`).
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sgl_vllm.vllm_api.signatures import Function, Signature, signature_of

UNKNOWN_RELEASE = (99, 0)
FUNCTION_TYPES = (ast.FunctionDef, ast.AsyncFunctionDef)
_NEXT_STATEMENT = re.compile(r"^[A-Za-z_@]", re.MULTILINE)
_IMPORT = re.compile(r"^[ ]*from ([\w.]+) import (\([^)]*\)|[^\n]+)", re.MULTILINE)
_VERSION = re.compile(r"^__version__ = .*?(\d+)\.(\d+)", re.MULTILINE)


@dataclass(frozen=True)
class SourceClass:
    """A class as it is written, or a module seen as the owner of its functions.

    Attributes:
        module: the module that defines it.
        name: its name there; of a module, the last part of its name.
        node: its definition; of a module, a class with the module's body.
        is_module: its functions have no `self`.
    """

    module: str
    name: str
    node: ast.ClassDef
    is_module: bool = False

    @functools.cached_property
    def methods(self) -> dict[str, Function]:
        """The functions of its body, the last of each name (for a property, its getter)."""
        found: dict[str, Function] = {}
        for statement in statements(self.node.body):
            if isinstance(statement, FUNCTION_TYPES) and not _is_setter(statement):
                found[statement.name] = statement
        return found

    @functools.cached_property
    def attributes(self) -> frozenset[str]:
        """The names assigned or declared in its body, or set on `self` in any of its methods."""
        found: set[str] = set()
        for statement in statements(self.node.body):
            if isinstance(statement, FUNCTION_TYPES):
                found.update(_set_on_first_argument(statement))
            elif isinstance(statement, ast.ClassDef):
                found.add(statement.name)
            else:
                found.update(target.id for target in _targets(statement, ast.Name))
        return frozenset(found)

    @property
    def base_names(self) -> list[str]:
        """Dotted, as written."""
        bases = [b.value if isinstance(b, ast.Subscript) else b for b in self.node.bases]
        return [ast.unparse(base) for base in bases]


@dataclass(frozen=True)
class Member:
    """Where a class has a name from, and its signature if it is a method or a property."""

    owner: SourceClass
    signature: Signature | None


class SourceModule:
    """One module's text, of which only the definitions that are asked for are parsed."""

    def __init__(self, name: str, path: Path, text: str) -> None:
        self.name = name
        self.path = path
        self.text = text
        self._found: dict[str, ast.stmt | None] = {}

    def definition(self, name: str) -> ast.stmt | None:
        """The class, function or assignment that defines a name at the top level, also inside
        `if` and `try`. None for names that come from an import."""
        if name not in self._found:
            self._found[name] = self._parse(name)
        return self._found[name]

    @functools.cached_property
    def tree(self) -> ast.Module:
        """All of it. From then on, definitions are nodes of this tree."""
        self._found.clear()
        return ast.parse(self.text)

    def _parse(self, name: str) -> ast.stmt | None:
        if "tree" in vars(self):
            return self._top_level.get(name)
        start = re.search(rf"^(?:class|(?:async )?def) {name}\b", self.text, re.MULTILINE)
        if start is not None:
            end = _NEXT_STATEMENT.search(self.text, start.end())
            try:
                body = ast.parse(self.text[start.start() : end.start() if end else None]).body
            except SyntaxError:  # a string with text at the start of a line
                pass
            else:
                return body[0]
        if re.search(rf"^[ ]*(?:class|(?:async )?def)? ?{name}\b", self.text, re.MULTILINE) is None:
            return None
        return self._top_level.get(name)

    @functools.cached_property
    def _top_level(self) -> dict[str, ast.stmt]:
        found: dict[str, ast.stmt] = {}
        for statement in statements(self.tree.body):
            if isinstance(statement, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                found[statement.name] = statement
            else:
                found.update((target.id, statement) for target in _targets(statement, ast.Name))
        return found

    @functools.cached_property
    def imported(self) -> dict[str, tuple[str, str]]:
        """Names that come from `from module import name [as other]`: module and name."""
        package = self.name if self.path.name == "__init__.py" else self.name.rpartition(".")[0]
        found: dict[str, tuple[str, str]] = {}
        for match in _IMPORT.finditer(self.text):
            module = match[1]
            if module.startswith("."):
                ups = len(module) - len(module.lstrip(".")) - 1
                parent = package.rsplit(".", ups)[0] if ups else package
                module = f"{parent}.{module.lstrip('.')}".rstrip(".")
            names = re.sub(r"#[^\n]*", "", match[2]).strip("() \n")
            for item in names.split(","):
                words = item.split()
                if words:
                    found[words[-1]] = (module, words[0])
        return found


class VllmSource:
    """The source tree of one vLLM: `root` is the folder that holds the package `vllm`.

    Nothing is cached across instances, and what is read stays in memory.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._modules: dict[str, SourceModule | None] = {}
        self._classes: dict[tuple[str, str], SourceClass | None] = {}

    @functools.cached_property
    def release(self) -> tuple[int, int]:
        """Major and minor version; newer than any if the tree does not say."""
        path = self.root / "vllm" / "_version.py"
        found = _VERSION.search(path.read_text()) if path.is_file() else None
        return (int(found[1]), int(found[2])) if found is not None else UNKNOWN_RELEASE

    def module(self, name: str) -> SourceModule | None:
        if name not in self._modules:
            self._modules[name] = self._read(name)
        return self._modules[name]

    def _read(self, name: str) -> SourceModule | None:
        base = self.root.joinpath(*name.split("."))
        for path in (base / "__init__.py", base.with_suffix(".py")):
            if path.is_file():
                return SourceModule(name, path, path.read_text())
        return None

    def find(self, module: str, name: str) -> tuple[str, ast.stmt] | None:
        """The module that really defines `module.name`, and the definition."""
        seen: set[tuple[str, str]] = set()
        while (module, name) not in seen:
            seen.add((module, name))
            source = self.module(module)
            if source is None:
                return None
            found = source.definition(name)
            if found is not None:
                return module, found
            if name not in source.imported:
                return None
            module, name = source.imported[name]
        return None

    def find_class(self, module: str, name: str) -> SourceClass | None:
        key = (module, name)
        if key not in self._classes:
            found = self.find(module, name)
            if found is None or not isinstance(found[1], ast.ClassDef):
                self._classes[key] = None
            elif found[0] != module:
                self._classes[key] = self.find_class(found[0], found[1].name)
            else:
                self._classes[key] = SourceClass(module, name, found[1])
        return self._classes[key]

    def find_functions(self, module: str) -> SourceClass | None:
        """A module as the owner of its functions; None if there is no such module."""
        source = self.module(module)
        if source is None:
            return None
        name = module.rpartition(".")[2]
        node = ast.ClassDef(name, bases=[], keywords=[], body=source.tree.body, decorator_list=[])
        return SourceClass(module, name, node, is_module=True)

    def ancestry(self, owner: SourceClass) -> Iterator[SourceClass]:
        """The class and its bases inside vLLM, each before its own bases."""
        yield owner
        source = self.module(owner.module)
        assert source is not None
        for name in owner.base_names:
            base = self._base(source, name)
            if base is not None:
                yield from self.ancestry(base)

    def _base(self, source: SourceModule, name: str) -> SourceClass | None:
        head, _, rest = name.partition(".")
        if not rest:
            return self.find_class(source.name, name)
        if head in source.imported:  # `from vllm.x import module`, then `module.Class`
            module, imported = source.imported[head]
            return self.find_class(f"{module}.{imported}", rest)
        return None

    def member(self, owner: SourceClass, name: str) -> Member | None:
        """A method, property or attribute of a class or its bases; of a module, also a function
        that it imports from another one."""
        if owner.is_module and name not in owner.methods:
            found = self.find(owner.module, name)
            other = self.find_functions(found[0]) if found and found[0] != owner.module else None
            if other is not None:
                return self.member(other, name)
        has_it: SourceClass | None = None
        for one in self.ancestry(owner):
            if name in one.methods:
                signature = signature_of(one.methods[name], is_method=not one.is_module)
                return Member(one, signature)
            if has_it is None and name in one.attributes:
                has_it = one
        return Member(has_it, None) if has_it is not None else None

    def abstract_methods(self, owner: SourceClass) -> set[str]:
        """The methods that a subclass has to define before it can be instantiated."""
        found: set[str] = set()
        for one in reversed(list(self.ancestry(owner))):
            for name, method in one.methods.items():
                found.discard(name)
                if "abstractmethod" in map(ast.unparse, method.decorator_list):
                    found.add(name)
        return found


@functools.cache
def installed_source() -> VllmSource | None:
    """The source of the vLLM that `import vllm` would load. None if there is none."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        return None
    return VllmSource(Path(spec.submodule_search_locations[0]).parent)


# -- statements -----------------------------------------------------------------------------------


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of a body and of the blocks in it, but not of functions and classes."""
    for statement in body:
        yield statement
        if not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            for block in _blocks(statement):
                yield from statements(block)


def _blocks(statement: ast.stmt) -> Iterator[list[ast.stmt]]:
    for name in ("body", "orelse", "finalbody"):
        yield getattr(statement, name, [])
    for handler in getattr(statement, "handlers", ()):
        yield handler.body
    for case in getattr(statement, "cases", ()):
        yield case.body


def _targets(statement: ast.stmt, kind: type[ast.Name] | type[ast.Attribute]) -> Iterator[ast.Name]:
    """The targets of one kind that a statement assigns or declares."""
    if isinstance(statement, ast.Assign):
        pending: list[ast.expr] = list(statement.targets)
    elif isinstance(statement, ast.AnnAssign | ast.AugAssign | ast.For | ast.AsyncFor):
        pending = [statement.target]
    elif isinstance(statement, ast.With | ast.AsyncWith):
        pending = [item.optional_vars for item in statement.items if item.optional_vars]
    else:
        return
    while pending:
        target = pending.pop()
        if isinstance(target, ast.Tuple | ast.List):
            pending += target.elts
        elif isinstance(target, kind):
            yield target  # type: ignore[misc]


def _set_on_first_argument(function: Function) -> Iterator[str]:
    arguments = [*function.args.posonlyargs, *function.args.args]
    if not arguments:
        return
    for statement in statements(function.body):
        for target in _targets(statement, ast.Attribute):
            owner = target.value  # type: ignore[attr-defined]
            if isinstance(owner, ast.Name) and owner.id == arguments[0].arg:
                yield target.attr  # type: ignore[attr-defined]


def _is_setter(function: Function) -> bool:
    return any(
        isinstance(decorator, ast.Attribute) and decorator.attr in ("setter", "deleter")
        for decorator in function.decorator_list
    )
