"""Where our code runs in the place of vLLM's: overrides, wrappers and added methods.

Owns how they are found in our source: methods of classes that derive from a class of vLLM's, and
calls of `wrap` and `add_method` (`sgl_vllm/vllm_api/patching.py`). Imports nothing of ours or of
vLLM's. Does not own what they are compared with (`contact.py`).
"""

from __future__ import annotations

import ast
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

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = {"sgl_vllm": ROOT / "sgl_vllm", "sgl_vllm.kernels": ROOT / "kernels"}
_PATCHING = "sgl_vllm.vllm_api.patching"
_ADDS = "add_method"


class Sources(VllmSource):
    """Our packages beside one vLLM: a class of ours has its bases there."""

    def __init__(self, vllm: VllmSource, folders: Mapping[str, Path]) -> None:
        super().__init__(vllm.root)
        self._paths = {
            ".".join((name, *path.relative_to(folder).with_suffix("").parts)): path
            for name, folder in folders.items()
            for path in sorted(folder.rglob("*.py"))
        }
        self._root_of_ours = next(iter(folders.values())).parent

    def ours(self) -> Iterator[SourceModule]:
        """Our modules that name vLLM or one another's classes."""
        for name in self._paths:
            module = self.module(name.removesuffix(".__init__"))
            if module is not None and "import " in module.text:
                yield module

    def where(self, module: SourceModule, node: ast.stmt | ast.expr) -> str:
        return f"{module.path.relative_to(self._root_of_ours)}:{node.lineno}"

    def vllm_ancestry(self, owner: SourceClass) -> list[SourceClass]:
        """A class's ancestors that are vLLM's, nearest first."""
        return [one for one in self.ancestry(owner) if one.module.partition(".")[0] == "vllm"]

    def _read(self, name: str) -> SourceModule | None:
        path = self._paths.get(name) or self._paths.get(f"{name}.__init__")
        return SourceModule(name, path, path.read_text()) if path else super()._read(name)


@dataclass(frozen=True)
class Replacement:
    """One function of ours that stands where vLLM has, or would have, its own.

    Attributes:
        how: "overrides", or what our source calls: "wrap" or "add_method".
        owner: vLLM's class, or its module if a function is wrapped.
        method: the method's name there.
        function: ours.
        signature: what callers see of it, without `self`, and without a wrapper's `original`.
        name: as in our source, such as `CacheAwareQueue.pop_request`.
        where: file and line.
    """

    how: str
    owner: SourceClass
    method: str
    function: Function
    signature: Signature
    name: str
    where: str

    @property
    def adds(self) -> bool:
        return self.how == _ADDS


def our_classes(sources: Sources) -> Iterator[tuple[SourceModule, SourceClass]]:
    """Our classes that derive from a class of vLLM's."""
    for module in sources.ours():
        for node in statements(module.tree.body):
            if isinstance(node, ast.ClassDef):
                owner = SourceClass(module.name, node.name, node)
                if sources.vllm_ancestry(owner):
                    yield module, owner


def replacements(sources: Sources) -> Iterator[Replacement]:
    """Every override, wrapper and added method.

    Raises:
        ValueError: what a call of `wrap` or `add_method` changes cannot be told from the source.
    """
    for module, owner in our_classes(sources):
        yield from _overrides(module, owner, sources)
    for module in sources.ours():
        if any(origin == _PATCHING for origin, _ in module.imported.values()):
            yield from _Patches(module, sources).inside(module.tree, None, None)


def _overrides(module: SourceModule, owner: SourceClass, sources: Sources) -> Iterator[Replacement]:
    for name, function in owner.methods.items():
        signature = signature_of(function, is_method=True)
        base = next((b for b in sources.vllm_ancestry(owner) if sources.member(b, name)), None)
        if base is not None and signature.kind != "property":
            where = sources.where(module, function)
            full_name = f"{owner.name}.{name}"
            yield Replacement("overrides", base, name, function, signature, full_name, where)


@dataclass(frozen=True)
class _Patches:
    """Reads the calls of `wrap` and `add_method` in one module."""

    module: SourceModule
    sources: Sources

    def inside(
        self, node: ast.AST, owner: ast.ClassDef | None, scope: Function | None
    ) -> Iterator[Replacement]:
        """The patches below a node, which stands in a class and in a function."""
        for child in ast.iter_child_nodes(node):
            for call, function in self._patch_at(child, owner, scope):
                yield from self._made(call, function, owner, scope)
            if isinstance(child, ast.ClassDef):
                yield from self.inside(child, child, None)
            elif isinstance(child, FUNCTION_TYPES):
                yield from self.inside(child, owner, child)
            elif not isinstance(child, ast.Call) or not self._name(child.func):
                yield from self.inside(child, owner, scope)

    def _patch_at(
        self, node: ast.AST, owner: ast.ClassDef | None, scope: Function | None
    ) -> Iterator[tuple[ast.Call, Function]]:
        """What is called, and our function: `@wrap(X, "f")`, `wrap(X, "f")(ours)` or
        `add_method(X, "f", ours)`."""
        if isinstance(node, FUNCTION_TYPES):
            for decorator in node.decorator_list:
                if isinstance(decorator, ast.Call) and self._name(decorator) == "wrap":
                    yield decorator, node
        elif isinstance(node, ast.Call) and self._name(node.func) == "wrap":
            assert isinstance(node.func, ast.Call)
            yield node.func, self._function(node.args[0], owner, scope)
        elif isinstance(node, ast.Call) and self._name(node) == _ADDS:
            yield node, self._function(node.args[2], owner, scope)

    def _name(self, call: ast.expr) -> str:
        """Which function of `patching.py` a call is one of; empty for others."""
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
            return ""
        origin, name = self.module.imported.get(call.func.id, ("", ""))
        return name if origin == _PATCHING else ""

    def _made(
        self, call: ast.Call, ours: Function, owner: ast.ClassDef | None, scope: Function | None
    ) -> Iterator[Replacement]:
        """None where the vLLM lacks what is changed: the stubs report that."""
        target, is_bound = self._target(call.args[0], owner, scope)
        if target is None:
            return
        name = ast.literal_eval(call.args[1])
        is_method = owner is not None and ours in owner.body
        signature = signature_of(ours, is_method=is_method)
        member = self.sources.member(target, name)
        kind = member.signature.kind if member is not None and member.signature else ""
        num_hidden = int(self._name(call) == "wrap") + int(not is_bound and kind != "staticmethod")
        yield Replacement(
            self._name(call),
            target,
            name,
            ours,
            replace(signature, positional=signature.positional[num_hidden:], kind=kind),
            ours.name,
            self.sources.where(self.module, ours),
        )

    def _target(
        self, node: ast.expr, owner: ast.ClassDef | None, scope: Function | None
    ) -> tuple[SourceClass | None, bool]:
        """The class or module that is changed, or the class of the live object, None if this vLLM
        lacks it; and whether the function there is called without its owner as the first
        argument."""
        text = ast.unparse(node)
        if self._is_vllms(text):
            found = self._of_vllm(text)
            return found, found is not None and found.is_module
        annotations = {
            prefix + ast.unparse(one.target): one.annotation
            for prefix, body in (("", scope), ("self.", owner))
            for one in (body.body if body is not None else ())
            if isinstance(one, ast.AnnAssign)
        }
        for one in [*scope.args.posonlyargs, *scope.args.args] if scope is not None else ():
            if one.annotation is not None:
                annotations[one.arg] = one.annotation
        if text in annotations:
            name = ast.unparse(annotations[text]).strip("'").removesuffix(" | None")
            if self._is_vllms(name):
                return self._of_vllm(name), True
        raise self._unknown(node)

    def _is_vllms(self, name: str) -> bool:
        origin, _ = self.module.imported.get(name.partition(".")[0], ("", ""))
        return origin.partition(".")[0] == "vllm"

    def _of_vllm(self, name: str) -> SourceClass | None:
        """The class or module of vLLM's that an imported name stands for: `Class`, `module`,
        `module.Class`."""
        head, _, rest = name.partition(".")
        origin, imported = self.module.imported[head]
        module = f"{origin}.{imported}"
        if rest:
            return self.sources.find_class(module, rest)
        return self.sources.find_class(origin, imported) or self.sources.find_functions(module)

    def _function(
        self, node: ast.expr, owner: ast.ClassDef | None, scope: Function | None
    ) -> Function:
        """The function that an expression names: `inner`, `of_module` or `self.method`."""
        text = ast.unparse(node)
        places: list[ast.AST] = [*ast.walk(scope)] if scope is not None else []
        places += self.module.tree.body
        if owner is not None and text.startswith("self."):
            places = [*owner.body]
        for one in places:
            if isinstance(one, FUNCTION_TYPES) and one.name == text.removeprefix("self."):
                return one
        raise self._unknown(node)

    def _unknown(self, node: ast.expr) -> ValueError:
        return ValueError(
            f"{self.sources.where(self.module, node)}: name the class (or annotate the object) and "
            "the method where you patch, so that they can be compared with vLLM"
        )
