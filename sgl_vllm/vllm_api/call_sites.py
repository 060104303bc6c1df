"""How vLLM calls methods: every call of some names in its source, with what it passes.

Owns the search. A method of a common name (`build`, `forward`, `touch`) is called on many objects:
`calls_of` keeps those whose receiver is, or may be, of a given class. Does not own what a call is
compared with (`contact.py`). Costs about 3 s of CPU time, most of it to parse the files that
mention one of the names.
"""

from __future__ import annotations

import ast
import bisect
import functools
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from sgl_vllm.vllm_api.overrides import How, Replacement
from sgl_vllm.vllm_api.receivers import Inference, Scope
from sgl_vllm.vllm_api.signatures import Argument, Function
from sgl_vllm.vllm_api.vllm_source import (
    FUNCTION_TYPES,
    SourceClass,
    SourceModule,
    VllmSource,
    statements,
)


@dataclass(frozen=True)
class Call:
    """A call in vLLM's source.

    Attributes:
        where: file and line.
        arguments: what it passes, up to the first `*args`, and by keyword.
        is_complete: it has neither `*args` nor `**kwargs`.
    """

    where: str
    arguments: tuple[Argument, ...]
    is_complete: bool


@dataclass(frozen=True)
class _Found:
    node: ast.Call
    scope: Scope


class CallSites:
    """All calls of some methods, and of some classes, in one vLLM.

    Args:
        methods: their names.
        functions: what is called by its name alone: functions of modules, and classes whose
            construction is a call of `__init__`.
    """

    def __init__(
        self, source: VllmSource, methods: Collection[str], functions: Collection[str]
    ) -> None:
        self._source = source
        self._infer = Inference(source)
        self._by_name: dict[str, list[_Found]] = {}
        self._defined_in: dict[str, set[str]] = {}
        self._texts: dict[str, str] = {}
        self._mentions: dict[str, list[str]] = {}
        names = sorted({*methods} - {"__init__"})
        calls = re.compile(rf"\.({'|'.join(names)})\(")
        definitions = re.compile(rf"def ({'|'.join(names)})\(")
        for path in sorted((source.root / "vllm").rglob("*.py")):
            text = path.read_text()
            parts = path.relative_to(source.root).with_suffix("").parts
            module = ".".join(parts).removesuffix(".__init__")
            for match in definitions.finditer(text):
                if text[match.start() - 1] == " ":  # a method
                    self._defined_in.setdefault(match[1], set()).add(module)
                    self._texts[module] = text
            matches = list(calls.finditer(text))
            for name in functions:
                if name in text:
                    self._mentions.setdefault(name, []).append(module)
                if f"{name}(" in text:
                    matches += re.finditer(rf"(?<![\w.])({name})\(", text)
            if matches:
                wanted = {match[1] for match in matches}
                lines = _lines_of(text, [match.end() - 1 for match in matches])
                self._read(source.module(module), wanted, lines)

    def _read(self, module: SourceModule | None, wanted: set[str], lines: list[int]) -> None:
        assert module is not None
        for node, owner, function in _calls_on(lines, module.tree, None, None):
            name = _name_of(node.func)
            if name in wanted:
                scope = Scope(module, owner, function, node.lineno)
                self._by_name.setdefault(name, []).append(_Found(node, scope))

    def calls_of(self, replacement: Replacement) -> Iterator[Call]:
        """The calls in vLLM that may reach a function of ours."""
        owner, method = replacement.owner, replacement.method
        if method == "__init__":
            for found in self._by_name.get(owner.name, ()):
                if isinstance(found.node.func, ast.Name) and not self._infer.is_foreign(
                    found.node.func, found.scope
                ):
                    yield self._call(found)
            return
        for found in self._by_name.get(method, ()):
            if owner.is_module:
                if self._is_function_of(owner, found):
                    yield self._call(found)
                continue
            if isinstance(found.node.func, ast.Attribute) and self._may_be(
                found.node.func.value, replacement, found.scope
            ):
                yield self._call(found)

    def early_imports_of(self, replacement: Replacement) -> Iterator[str]:
        """Where vLLM imports a function of a module at the top level of another module, which
        keeps vLLM's own function if it is loaded before ours takes its place."""
        owner, name = replacement.owner, replacement.method
        for module in self._mentions.get(name, ()) if owner.is_module else ():
            source = self._source.module(module)
            assert source is not None
            for statement in statements(source.tree.body):
                if (
                    isinstance(statement, ast.ImportFrom)
                    and statement.module == owner.module
                    and any(alias.name == name for alias in statement.names)
                ):
                    yield f"{source.path.relative_to(self._source.root)}:{statement.lineno}"

    # -- receivers ----------------------------------------------------------------------------

    def _is_function_of(self, owner: SourceClass, found: _Found) -> bool:
        """Whether a call is one of a function of this module."""
        function, module = found.node.func, found.scope.module
        if isinstance(function, ast.Name):
            return module.name == owner.module or (
                module.imported.get(function.id, ("", ""))[0] == owner.module
            )
        assert isinstance(function, ast.Attribute)
        imported = module.imported.get(ast.unparse(function.value))
        return imported is not None and ".".join(imported) == owner.module

    def _may_be(self, receiver: ast.expr, ours: Replacement, scope: Scope) -> bool:
        if isinstance(receiver, ast.Call) and ast.unparse(receiver.func) == "super":
            return False  # calls the base's own method
        actual = self._infer.class_of(receiver, scope)
        if actual is not None:
            is_patched = ours.how is How.WRAPS and self._is_a(actual, ours.owner)
            return is_patched or any(self._is_a(one, actual) for one in ours.reach)
        if self._infer.is_foreign(receiver, scope):
            return False
        if not self._others_define(ours.owner, ours.method):
            return True
        if isinstance(receiver, ast.Name) and scope.owner is not None and receiver.id == "self":
            return False
        hint = _last_word(receiver).replace("_", "").lower()
        names = [one.name.lower() for one in self._source.ancestry(ours.owner)]
        return len(hint) >= 4 and any(hint in name for name in names)

    def _is_a(self, one: SourceClass, other: SourceClass) -> bool:
        return any(
            (base.module, base.name) == (other.module, other.name)
            for base in self._source.ancestry(one)
        )

    @functools.cache  # noqa: B019  lives as long as the check
    def _others_define(self, owner: SourceClass, method: str) -> bool:
        """Whether a class that has nothing to do with `owner` has a method of this name."""
        family = {one.module for one in self._source.ancestry(owner)}
        names = "|".join(one.name for one in self._source.ancestry(owner))
        derives = re.compile(rf"^class \w+\([^)]*\b(?:{names})\b", re.MULTILINE)
        return any(
            module not in family and derives.search(self._texts[module]) is None
            for module in self._defined_in.get(method, ())
        )

    # -- arguments ----------------------------------------------------------------------------

    def _call(self, found: _Found) -> Call:
        node, scope = found.node, found.scope
        arguments = []
        is_complete = True
        for value in node.args:
            if isinstance(value, ast.Starred):
                is_complete = False
                break
            arguments.append(Argument(None, self._infer.may_be_none(value, scope)))
        for keyword in node.keywords:
            if keyword.arg is None:
                is_complete = False
            else:
                may_be_none = self._infer.may_be_none(keyword.value, scope)
                arguments.append(Argument(keyword.arg, may_be_none))
        path = scope.module.path.relative_to(self._source.root)
        return Call(f"{path}:{node.lineno}", tuple(arguments), is_complete)


def _calls_on(
    lines: list[int], node: ast.AST, owner: ast.ClassDef | None, function: Function | None
) -> Iterator[tuple[ast.Call, ast.ClassDef | None, Function | None]]:
    """The calls that span one of these lines, with the class and the function around them."""
    for child in ast.iter_child_nodes(node):
        first = getattr(child, "lineno", None)
        if first is not None:
            at = bisect.bisect_left(lines, first)
            if at == len(lines) or lines[at] > child.end_lineno:  # type: ignore[attr-defined]
                continue
        if isinstance(child, ast.Call):
            yield child, owner, function
        if isinstance(child, ast.ClassDef):
            yield from _calls_on(lines, child, child, None)
        elif isinstance(child, FUNCTION_TYPES):
            # A function inside a method sees the method's `self` and names.
            yield from _calls_on(lines, child, owner, function or child)
        else:
            yield from _calls_on(lines, child, owner, function)


def _lines_of(text: str, places: list[int]) -> list[int]:
    """The lines of places in a text, in order."""
    starts = [0, *(match.end() for match in re.finditer("\n", text))]
    return sorted({bisect.bisect_right(starts, place) for place in places})


def _name_of(function: ast.expr) -> str:
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _last_word(receiver: ast.expr) -> str:
    """Of `self.kv_cache_manager` and `managers[0]`, the name that comes last."""
    if isinstance(receiver, ast.Subscript):
        return _last_word(receiver.value)
    return _name_of(receiver.func if isinstance(receiver, ast.Call) else receiver)
