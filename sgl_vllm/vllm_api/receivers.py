"""What can be told of a value in vLLM's source: its class, and whether it may be None.

Owns the inference, which knows annotations and assignments and nothing of what runs. Where it
cannot tell, a class is None ("unknown") and a value is not None.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from sgl_vllm.vllm_api.signatures import Function, allows_none, is_none
from sgl_vllm.vllm_api.vllm_source import SourceClass, SourceModule, VllmSource

_MAX_DEPTH = 6

_Assigned = tuple[ast.expr | None, ast.expr | None]
"""A value and an annotation."""


@dataclass(frozen=True)
class Scope:
    """Where an expression stands: its module, class and function, and the line."""

    module: SourceModule
    owner: ast.ClassDef | None
    function: Function | None
    line: int


class Inference:
    """Reads one vLLM. Results of attribute lookups are kept."""

    def __init__(self, source: VllmSource) -> None:
        self._source = source
        self._attributes: dict[tuple[str, str, str], SourceClass | None] = {}
        self._assignments: dict[Function, dict[str, list[_Assigned]]] = {}

    # -- classes ------------------------------------------------------------------------------

    def class_of(self, node: ast.expr, scope: Scope, depth: int = 0) -> SourceClass | None:
        """The class of the object that an expression gives, as far as the source says."""
        if depth > _MAX_DEPTH:
            return None
        if isinstance(node, ast.Name):
            return self._class_of_name(node.id, scope, depth)
        if isinstance(node, ast.Attribute):
            owner = self.class_of(node.value, scope, depth + 1)
            return self._attribute(owner, node.attr, depth) if owner is not None else None
        if isinstance(node, ast.Call):
            return self._class_of_call(node, scope, depth)
        return None

    def is_foreign(self, node: ast.expr, scope: Scope, depth: int = 0) -> bool:
        """Whether an expression comes from another package: `xgr.reset`, or an attribute that was
        set to `xgr.Compiler(...)`."""
        if depth > _MAX_DEPTH:
            return False
        if isinstance(node, ast.Call):
            return self.is_foreign(node.func, scope, depth + 1)
        if isinstance(node, ast.Name):
            values = self._assigned(scope.function, node.id) if scope.function else []
            return _is_foreign_name(node.id, scope.module) or any(
                value is not None and self.is_foreign(value, scope, depth + 1)
                for value, _ in values
            )
        if not isinstance(node, ast.Attribute):
            return False
        if ast.unparse(node.value) != "self" or scope.owner is None:
            return self.is_foreign(node.value, scope, depth + 1)
        methods = SourceClass(scope.module.name, scope.owner.name, scope.owner).methods
        if node.attr in methods:
            names = _names_in(methods[node.attr].returns)
            return any(_is_foreign_name(name.partition(".")[0], scope.module) for name in names)
        return any(
            value is not None
            and self.is_foreign(value, Scope(scope.module, scope.owner, method, 0), depth + 1)
            for method in methods.values()
            for value, _ in self._assigned(method, ast.unparse(node))
        )

    def _class_of_name(self, name: str, scope: Scope, depth: int) -> SourceClass | None:
        function = scope.function
        if function is None:
            return None
        parameters = _parameters(function)
        if scope.owner is not None and parameters and name == parameters[0].arg:
            return self._source.find_class(scope.module.name, scope.owner.name)
        for one in parameters:
            if one.arg == name:
                return self._annotated(one.annotation, scope.module)
        for value, annotation in self._assigned(function, name):
            found = self._annotated(annotation, scope.module)
            if found is None and value is not None:
                found = self.class_of(value, scope, depth + 1)
            if found is not None:
                return found
        return None

    def _class_of_call(self, node: ast.Call, scope: Scope, depth: int) -> SourceClass | None:
        if isinstance(node.func, ast.Name):
            found = self._source.find(scope.module.name, node.func.id)
            if found is None:
                return None
            if isinstance(found[1], ast.ClassDef):
                return self._source.find_class(scope.module.name, node.func.id)
            returns, module = getattr(found[1], "returns", None), self._source.module(found[0])
            return self._annotated(returns, module) if module is not None else None
        if isinstance(node.func, ast.Attribute):
            owner = self.class_of(node.func.value, scope, depth + 1)
            member = self._method(owner, node.func.attr) if owner is not None else None
            if member is not None:
                module = self._source.module(member[0].module)
                return self._annotated(member[1].returns, module) if module is not None else None
        return None

    def _attribute(self, owner: SourceClass, name: str, depth: int) -> SourceClass | None:
        key = (owner.module, owner.name, name)
        if key not in self._attributes:
            self._attributes[key] = None
            self._attributes[key] = self._read_attribute(owner, name, depth)
        return self._attributes[key]

    def _read_attribute(self, owner: SourceClass, name: str, depth: int) -> SourceClass | None:
        for one in self._source.ancestry(owner):
            module = self._source.module(one.module)
            assert module is not None
            if name in one.methods:
                return self._annotated(one.methods[name].returns, module)
            for statement in one.node.body:
                if isinstance(statement, ast.AnnAssign) and ast.unparse(statement.target) == name:
                    return self._annotated(statement.annotation, module)
            for method in one.methods.values():
                for value, annotation in self._assigned(method, f"self.{name}"):
                    found = self._annotated(annotation, module)
                    if found is None and value is not None:
                        scope = Scope(module, one.node, method, method.end_lineno or 0)
                        found = self.class_of(value, scope, depth + 1)
                    if found is not None:
                        return found
        return None

    def _assigned(self, function: Function, target: str) -> list[_Assigned]:
        """The values and annotations that a function gives a name, or an attribute of `self`."""
        if function not in self._assignments:
            found = self._assignments[function] = {}
            for name, assigned in _assignments(function):
                found.setdefault(name, []).append(assigned)
        return self._assignments[function].get(target, [])

    def _method(self, owner: SourceClass, name: str) -> tuple[SourceClass, Function] | None:
        return next(
            (
                (one, one.methods[name])
                for one in self._source.ancestry(owner)
                if name in one.methods
            ),
            None,
        )

    def _annotated(self, annotation: ast.expr | None, module: SourceModule) -> SourceClass | None:
        for name in _names_in(annotation):
            head, _, rest = name.partition(".")
            if rest and head in module.imported:
                found = self._source.find_class(".".join(module.imported[head]), rest)
            else:
                found = self._source.find_class(module.name, name)
            if found is not None:
                return found
        return None

    # -- None ---------------------------------------------------------------------------------

    def may_be_none(self, node: ast.expr, scope: Scope) -> bool:
        """Whether the source says that an expression may give None."""
        if is_none(node):
            return True
        if isinstance(node, ast.IfExp):
            return any(
                self.may_be_none(one, scope) and not _tests(node.test, one)
                for one in (node.body, node.orelse)
            )
        if isinstance(node, ast.BoolOp):
            return self.may_be_none(node.values[-1], scope)
        if isinstance(node, ast.Name | ast.Attribute) and _is_tested(node, scope):
            return False
        if isinstance(node, ast.Name):
            return self._name_may_be_none(node.id, scope)
        if isinstance(node, ast.Attribute):
            return self._attribute_may_be_none(node, scope)
        if isinstance(node, ast.Call):
            return self._call_may_give_none(node, scope)
        return False

    def _name_may_be_none(self, name: str, scope: Scope) -> bool:
        function = scope.function
        if function is None:
            return False
        values = [
            (value, annotation)
            for value, annotation in self._assigned(function, name)
            if value is None or value.lineno <= scope.line
        ]
        if any(is_none(value) for value, _ in values):
            return True
        for _, annotation in values:
            if annotation is not None:
                return _says_none(annotation)
        if values:
            return any(
                isinstance(value, ast.Call) and self._call_may_give_none(value, scope)
                for value, _ in values
            )
        return any(one.arg == name and _says_none(one.annotation) for one in _parameters(function))

    def _attribute_may_be_none(self, node: ast.Attribute, scope: Scope) -> bool:
        owner = self.class_of(node.value, scope)
        for one in self._source.ancestry(owner) if owner is not None else ():
            for statement in one.node.body:
                if (
                    isinstance(statement, ast.AnnAssign)
                    and ast.unparse(statement.target) == node.attr
                ):
                    return _says_none(statement.annotation)
            for method in one.methods.values():
                for _, annotation in self._assigned(method, f"self.{node.attr}"):
                    if annotation is not None:
                        return _says_none(annotation)
        return False

    def _call_may_give_none(self, node: ast.Call, scope: Scope) -> bool:
        if isinstance(node.func, ast.Name):
            found = self._source.find(scope.module.name, node.func.id)
            return found is not None and _says_none(getattr(found[1], "returns", None))
        if isinstance(node.func, ast.Attribute):
            owner = self.class_of(node.func.value, scope)
            member = self._method(owner, node.func.attr) if owner is not None else None
            return member is not None and _says_none(member[1].returns)
        return False


def _says_none(annotation: ast.expr | None) -> bool:
    """Whether an annotation names None: `int | None` does, `Any` and no annotation do not."""
    if annotation is None or ast.unparse(annotation) in ("Any", "object", "None"):
        return False
    return allows_none(annotation)


def _names_in(annotation: ast.expr | None) -> Iterator[str]:
    """The classes that an annotation may mean: of `Optional["X"]` and `X | None`, X."""
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        yield from _names_in(ast.parse(annotation.value, mode="eval").body)
    elif isinstance(annotation, ast.Name | ast.Attribute):
        yield ast.unparse(annotation)
    elif isinstance(annotation, ast.BinOp):
        yield from _names_in(annotation.left)
        yield from _names_in(annotation.right)
    elif isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value) == "Optional":
        yield from _names_in(annotation.slice)


def _is_foreign_name(name: str, module: SourceModule) -> bool:
    origin = module.imported.get(name, ("vllm", ""))[0]
    return origin.partition(".")[0] != "vllm" or name in module.imported_modules


def _parameters(function: Function) -> list[ast.arg]:
    arguments = function.args
    return [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]


def _assignments(function: Function) -> Iterator[tuple[str, _Assigned]]:
    for node in ast.walk(function):
        if isinstance(node, ast.AnnAssign):
            yield ast.unparse(node.target), (node.value, node.annotation)
        elif isinstance(node, ast.Assign):
            for one in node.targets:
                if isinstance(one, ast.Name | ast.Attribute):
                    yield ast.unparse(one), (node.value, None)


def _is_tested(node: ast.expr, scope: Scope) -> bool:
    """Whether the function has asked about this value, up to this line: `if x is None: return`,
    `assert x`, `if x is not None: f(x)`. What it does with the answer is not followed."""
    for one in ast.walk(scope.function) if scope.function is not None else ():
        if isinstance(one, ast.If | ast.While | ast.Assert | ast.IfExp):
            conditions, is_before = [one.test], one.lineno <= scope.line
        elif isinstance(one, ast.BoolOp):
            conditions = one.values[:-1]
            is_before = one.lineno <= scope.line <= (one.end_lineno or 0)
        else:
            continue
        if is_before and any(_tests(condition, node) for condition in conditions):
            return True
    return False


def _tests(test: ast.expr, node: ast.expr) -> bool:
    """Whether a condition asks if a value is None, or is true."""
    wanted = ast.dump(node)
    if isinstance(test, ast.BoolOp):
        return any(_tests(one, node) for one in test.values)
    if isinstance(test, ast.UnaryOp):
        return _tests(test.operand, node)
    if isinstance(test, ast.Compare):
        return ast.dump(test.left) == wanted and any(map(is_none, test.comparators))
    return ast.dump(test) == wanted
