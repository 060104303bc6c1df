"""Where our code runs in the place of vLLM's: overrides, wrappers and added methods.

Owns how they are found in our source, by `ast`: classes that derive from a class of vLLM's, and
calls of `wrap` and `add_method` (`patching.py`). Imports nothing of ours or of vLLM's. Does not own
what they are compared with (`contact.py`).
"""

from __future__ import annotations

import ast
import enum
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from sgl_vllm.vllm_api.signatures import Function, Signature, signature_of
from sgl_vllm.vllm_api.vllm_source import (
    FUNCTION_TYPES,
    SourceClass,
    SourceModule,
    VllmSource,
    statements,
)

_PATCHING = "sgl_vllm.vllm_api.patching"
_IMPORTS_US_OR_VLLM = re.compile(r"^[ ]*from (?:vllm|sgl_vllm)\b", re.MULTILINE)


class How(enum.Enum):
    """How our function gets into the place of vLLM's."""

    OVERRIDES = "overrides"
    WRAPS = "wraps"
    ADDS = "adds"


@dataclass(frozen=True)
class Replacement:
    """One function of ours that stands where vLLM has, or would have, its own.

    Attributes:
        how: whether it overrides, wraps or adds a method.
        owner: vLLM's class, or its module if a function is wrapped. With several bases, the one
            that has the method.
        reach: the classes as which vLLM may know an object with our function: those that are
            patched, or the bases of our class and of those that derive from it.
        method: the method's name there.
        function: ours.
        signature: what callers see of it, without `self`, and without a wrapper's `original`.
        where: file and line.
        name: as in our source, such as `CacheAwareQueue.pop_request`.
    """

    how: How
    owner: SourceClass
    reach: tuple[SourceClass, ...]
    method: str
    function: Function
    signature: Signature
    where: str
    name: str


@dataclass(frozen=True)
class Subclass:
    """A class of ours with vLLM's classes among its ancestors, nearest first."""

    name: str
    where: str
    node: ast.ClassDef
    bases: tuple[SourceClass, ...]
    ancestors: frozenset[str]
    """The names of the class and of its bases in our code."""
    methods: frozenset[str]
    """Theirs."""


class UnknownTarget(Exception):
    """A call of `wrap` or `add_method` that names neither class nor function in a way that can be
    read from the source. The message says where."""


class OurSource:
    """Our modules, as they relate to one vLLM.

    Args:
        vllm: resolves the names that we import from it.
        folders: by package name, its folder.
    """

    def __init__(self, vllm: VllmSource, folders: Mapping[str, Path]) -> None:
        self._vllm = vllm
        self._modules: dict[str, SourceModule] = {}
        self._roots = {package: folder.parent for package, folder in folders.items()}
        for package, folder in folders.items():
            for path in sorted(folder.rglob("*.py")):
                parts = path.relative_to(folder).with_suffix("").parts
                name = ".".join((package, *parts)).removesuffix(".__init__")
                self._modules[name] = SourceModule(name, path, path.read_text())

    def subclasses(self) -> Iterator[Subclass]:
        """Our classes that derive from a class of vLLM's."""
        for module, source in self._modules.items():
            if not _IMPORTS_US_OR_VLLM.search(source.text):
                continue
            for node in statements(source.tree.body):
                if isinstance(node, ast.ClassDef) and (bases := self._vllm_bases(module, node)):
                    yield Subclass(
                        name=node.name,
                        where=self._where(module, node),
                        node=node,
                        bases=bases,
                        ancestors=frozenset(one.name for one in self._ours(module, node)),
                        methods=frozenset(
                            statement.name
                            for one in self._ours(module, node)
                            for statement in one.body
                            if isinstance(statement, FUNCTION_TYPES)
                        ),
                    )

    def replacements(self) -> Iterator[Replacement]:
        """Every override, wrapper and added method.

        Raises:
            UnknownTarget: what a call of `wrap` or `add_method` changes cannot be told.
        """
        subclasses = [*self.subclasses()]
        for subclass in subclasses:
            reach = [
                base for one in subclasses if subclass.name in one.ancestors for base in one.bases
            ]
            yield from self._overrides(subclass, tuple(reach))
        for module, source in self._modules.items():
            if _PATCHING in source.text and self._patching_names(module):
                yield from _PatchReader(self, module).read(source.tree)

    # -- classes ------------------------------------------------------------------------------

    def _overrides(
        self, subclass: Subclass, reach: tuple[SourceClass, ...]
    ) -> Iterator[Replacement]:
        for statement in subclass.node.body:
            if not isinstance(statement, FUNCTION_TYPES):
                continue
            signature = signature_of(statement, is_method=True)
            if signature.kind == "property":
                continue
            owners = [
                one for one in subclass.bases if self._vllm.member(one, statement.name) is not None
            ]
            if not owners and not _calls_super(statement):
                continue
            yield Replacement(
                how=How.OVERRIDES,
                owner=(owners or subclass.bases)[0],
                reach=reach,
                method=statement.name,
                function=statement,
                signature=signature,
                where=f"{subclass.where.partition(':')[0]}:{statement.lineno}",
                name=f"{subclass.name}.{statement.name}",
            )

    def _vllm_bases(self, module: str, node: ast.ClassDef) -> tuple[SourceClass, ...]:
        found: list[SourceClass] = []
        for base in node.bases:
            name = ast.unparse(base.value if isinstance(base, ast.Subscript) else base)
            of_vllm = self.vllm_class(module, name)
            if of_vllm is not None:
                found.append(of_vllm)
            elif (ours := self._our_class(module, name)) is not None:
                found += self._vllm_bases(*ours)
        return tuple(found)

    def _ours(self, module: str, node: ast.ClassDef) -> Iterator[ast.ClassDef]:
        """The class and its bases in our code."""
        yield node
        for base in node.bases:
            ours = self._our_class(module, ast.unparse(base))
            if ours is not None:
                yield from self._ours(*ours)

    def _our_class(self, module: str, name: str) -> tuple[str, ast.ClassDef] | None:
        source = self._modules[module]
        definition = source.definition(name) if name.isidentifier() else None
        if isinstance(definition, ast.ClassDef):
            return module, definition
        if name in source.imported and source.imported[name][0] in self._modules:
            return self._our_class(*source.imported[name])
        return None

    # -- names --------------------------------------------------------------------------------

    def vllm_module(self, module: str, name: str) -> SourceClass | None:
        """The module of vLLM's that a name in one of our modules stands for."""
        imported = self._modules[module].imported.get(name)
        if imported is None or imported[0].partition(".")[0] != "vllm":
            return None
        return self._vllm.find_functions(".".join(imported))

    def vllm_class(self, module: str, name: str) -> SourceClass | None:
        """The class of vLLM's that a name in one of our modules stands for."""
        head, _, rest = name.partition(".")
        imported = self._modules[module].imported.get(head)
        if imported is None or imported[0].partition(".")[0] != "vllm":
            return None
        if not rest:
            return self._vllm.find_class(*imported)
        return self._vllm.find_class(".".join(imported), rest)

    def function(self, module: str, name: str) -> Function | None:
        found = self._modules[module].definition(name)
        return found if isinstance(found, FUNCTION_TYPES) else None

    def _patching_names(self, module: str) -> dict[str, str]:
        """What a module calls `wrap` and `add_method`."""
        return {
            alias: name
            for alias, (origin, name) in self._modules[module].imported.items()
            if origin == _PATCHING and name in ("wrap", "add_method")
        }

    def _where(self, module: str, node: ast.stmt | ast.expr) -> str:
        path = self._modules[module].path
        root = self._roots[module if module in self._roots else self._package_of(module)]
        return f"{path.relative_to(root)}:{node.lineno}"

    def _package_of(self, module: str) -> str:
        return max((one for one in self._roots if module.startswith(f"{one}.")), key=len)


class _PatchReader:
    """Reads the calls of `wrap` and `add_method` in one module."""

    def __init__(self, ours: OurSource, module: str) -> None:
        self._ours = ours
        self._module = module
        self._names = ours._patching_names(module)
        self._applied: set[ast.Call] = set()

    def read(self, tree: ast.Module) -> Iterator[Replacement]:
        yield from self._in(tree, None, None)

    def _in(
        self, node: ast.AST, owner: ast.ClassDef | None, function: Function | None
    ) -> Iterator[Replacement]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef):
                yield from self._in(child, child, None)
                continue
            if isinstance(child, FUNCTION_TYPES):
                for decorator in child.decorator_list:
                    if self._is(decorator, "wrap"):
                        assert isinstance(decorator, ast.Call)
                        self._applied.add(decorator)
                        yield self._wrapped(decorator, child, False, function)
                yield from self._in(child, owner, child)
                continue
            if isinstance(child, ast.Call):
                yield from self._of_call(child, owner, function)
            yield from self._in(child, owner, function)

    def _of_call(
        self, call: ast.Call, owner: ast.ClassDef | None, function: Function | None
    ) -> Iterator[Replacement]:
        if self._is(call.func, "wrap"):
            assert isinstance(call.func, ast.Call)
            self._applied.add(call.func)
            wrapper, is_method = self._function(call.args[0], owner, function)
            yield self._wrapped(call.func, wrapper, is_method, function)
        elif self._is(call, "wrap") and call not in self._applied:
            raise self._unknown(call)
        elif self._is(call, "add_method"):
            added, _ = self._function(call.args[2], owner, function)
            yield self._made(How.ADDS, call, added, False, function)

    def _wrapped(
        self, call: ast.Call, wrapper: Function, is_method: bool, function: Function | None
    ) -> Replacement:
        return self._made(How.WRAPS, call, wrapper, is_method, function)

    def _made(
        self, how: How, call: ast.Call, ours: Function, is_method: bool, scope: Function | None
    ) -> Replacement:
        target, is_bound = self._target(call, scope)
        name = call.args[1]
        if not isinstance(name, ast.Constant) or not isinstance(name.value, str):
            raise self._unknown(call)
        signature = signature_of(ours, is_method=is_method)
        member = self._ours._vllm.member(target, name.value)
        kind = member.signature.kind if member is not None and member.signature else ""
        gets_owner = not is_bound and kind != "staticmethod"
        num_hidden = int(how is How.WRAPS) + int(gets_owner)
        return Replacement(
            how=how,
            owner=target,
            reach=(target,),
            method=name.value,
            function=ours,
            signature=replace(signature, positional=signature.positional[num_hidden:], kind=kind),
            where=self._ours._where(self._module, ours),
            name=ours.name,
        )

    def _target(self, call: ast.Call, scope: Function | None) -> tuple[SourceClass, bool]:
        """The class or module that is changed, or the class of the live object; and whether the
        function there is called without its owner as the first argument."""
        text = ast.unparse(call.args[0])
        found = self._ours.vllm_class(self._module, text)
        if found is not None:
            return found, False
        found = self._ours.vllm_module(self._module, text)
        if found is not None:
            return found, True
        for one in [*scope.args.posonlyargs, *scope.args.args] if scope is not None else ():
            if one.arg == text and one.annotation is not None:
                found = self._ours.vllm_class(self._module, ast.unparse(one.annotation).strip("'"))
                if found is not None:
                    return found, True
        raise self._unknown(call)

    def _function(
        self, node: ast.expr, owner: ast.ClassDef | None, scope: Function | None
    ) -> tuple[Function, bool]:
        """The function that an expression names, and whether it comes bound to its object."""
        if isinstance(node, ast.Name):
            for one in ast.walk(scope) if scope is not None else ():
                if isinstance(one, FUNCTION_TYPES) and one.name == node.id:
                    return one, False
            found = self._ours.function(self._module, node.id)
            if found is not None:
                return found, False
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self" and owner:
            for statement in owner.body:
                if isinstance(statement, FUNCTION_TYPES) and statement.name == node.attr:
                    return statement, True
        raise self._unknown(node)

    def _is(self, node: ast.expr, name: str) -> bool:
        return (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and self._names.get(node.func.id) == name
        )

    def _unknown(self, node: ast.expr) -> UnknownTarget:
        where = self._ours._where(self._module, node)
        return UnknownTarget(
            f"{where}: name the class (or annotate the object) and the method where you patch, so "
            "that they can be compared with vLLM"
        )


def _calls_super(function: Function) -> bool:
    """Whether it calls the method of its own name in its base class."""
    return any(
        isinstance(node, ast.Attribute)
        and node.attr == function.name
        and isinstance(node.value, ast.Call)
        and isinstance(node.value.func, ast.Name)
        and node.value.func.id == "super"
        for node in ast.walk(function)
    )
