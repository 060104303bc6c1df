"""The meaning of Python's expressions while a program is traced.

Owns operators, displays, comprehensions, f-strings, attributes and subscripts, over known and
deferred values. Calls and statements are `evaluation.py`'s.
"""

from __future__ import annotations

import ast
import enum
import functools
import inspect
import itertools
import operator
import sys
import types
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

from sgl_vllm.lang.ir import Expr
from sgl_vllm.lang.tracing import purity
from sgl_vllm.lang.tracing.deferred import Deferred, Element, Piece, pieces_of
from sgl_vllm.lang.tracing.frames import RUN_IT, At, Bound, Frame, Host, LocalFunction
from sgl_vllm.lang.tracing.knowledge import Knowledge
from sgl_vllm.lang.tracing.operations import (
    BINARY,
    COMPARE,
    PLAIN_LOOKUPS,
    UNARY,
    all_of,
    any_of,
    chained,
    chosen,
    compared,
    comprehended,
    dict_of,
    formatted,
    has_identity_only,
    has_variable,
    is_text,
    pieces_in,
    type_name,
)


class Expressions(Knowledge):
    """Evaluates expressions; `_eval_X` is for the syntax node X."""

    @abstractmethod
    def call_method(
        self, owner: Any, name: str, args: list[Any], kwargs: dict[str, Any], at: At
    ) -> Any:
        """What the call of a method gives."""

    @abstractmethod
    def call_pure(
        self,
        function: Any,
        args: list[Any],
        kwargs: dict[str, Any],
        at: At,
        *,
        is_new: bool = False,
    ) -> Any:
        """Call a pure function on known values; the list, dict or set that it gives is the
        program's own if it `is_new`."""

    @abstractmethod
    def call_structural(
        self,
        function: Any,
        args: list[Any],
        kwargs: dict[str, Any],
        at: At,
        *,
        iterated: Sequence[Any] = (),
        is_new: bool = False,
    ) -> Any:
        """Call what looks at no element: elements may be deferred, prompts, anything."""

    # --- expressions -----------------------------------------------------------------------------

    def evaluate(self, node: ast.expr, frame: Frame) -> Any:
        """The value of an expression: known, deferred, or a host."""
        self._steps += 1
        if self._steps > self._max_steps:
            self.stop(node, frame, f"the program takes more than {self._max_steps} steps")
        method = getattr(self, f"_eval_{type(node).__name__}", None)
        if method is None:
            self.stop(node, frame, f"{type(node).__name__} expressions are not followed")
        return method(node, frame, At(self, node, frame))

    def _eval_Constant(self, node: ast.Constant, frame: Frame, at: At) -> Any:
        return node.value

    def _eval_Name(self, node: ast.Name, frame: Frame, at: At) -> Any:
        try:
            return frame.lookup(node.id)
        except NameError as error:
            at.fail(error)

    def _eval_Await(self, node: ast.Await, frame: Frame, at: At) -> Any:
        return self.evaluate(node.value, frame)

    def _eval_NamedExpr(self, node: ast.NamedExpr, frame: Frame, at: At) -> Any:
        self.certain(at)
        value = self.evaluate(node.value, frame)
        self.assign(node.target, value, frame)
        return value

    def _eval_Lambda(self, node: ast.Lambda, frame: Frame, at: At) -> Any:
        return self._local_function(node, frame)

    def _local_function(
        self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda, frame: Frame
    ) -> LocalFunction:
        defaults = tuple(self.evaluate(d, frame) for d in node.args.defaults)
        pairs = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
        keywords = {a.arg: self.evaluate(d, frame) for a, d in pairs if d is not None}
        return LocalFunction(node, frame, defaults, keywords)

    def _items(self, nodes: Sequence[ast.expr], frame: Frame) -> list[Any]:
        items: list[Any] = []
        for node in nodes:
            if isinstance(node, ast.Starred):
                items += self.iterate(self.evaluate(node.value, frame), At(self, node, frame))
            else:
                items.append(self.evaluate(node, frame))
        return items

    def _eval_List(self, node: ast.List, frame: Frame, at: At) -> Any:
        return self._display(node.elts, list, frame, at)

    def _eval_Tuple(self, node: ast.Tuple, frame: Frame, at: At) -> Any:
        return self._display(node.elts, tuple, frame, at)

    def _eval_Set(self, node: ast.Set, frame: Frame, at: At) -> Any:
        items = self._display(node.elts, list, frame, at)
        if isinstance(items, Deferred):
            return self.defer(set, [items], {}, at)
        return self._make_set(items, at)

    def _display(self, nodes: Sequence[ast.expr], kind: type, frame: Frame, at: At) -> Any:
        """A list or a tuple as it is written out."""
        parts: list[Any] = []
        for node in nodes:
            if isinstance(node, ast.Starred):
                value = self.evaluate(node.value, frame)
                is_known = not isinstance(value, Deferred)
                parts.append(self.iterate(value, At(self, node, frame)) if is_known else value)
            else:
                parts.append([self.evaluate(node, frame)])
        if any(isinstance(part, Deferred) for part in parts):
            lists = [part if isinstance(part, Deferred) else self.own(part) for part in parts]
            return self.defer(functools.partial(chained, kind), lists, {}, at)
        return self.own(kind(itertools.chain.from_iterable(parts)))

    def _make_set(self, items: list[Any], at: At) -> Any:
        if self.holds_deferred(self.own(items)):
            return self.defer(set, [items], {}, at)
        self.require_plain(items, at)
        return self.own(set(items))

    def _eval_Dict(self, node: ast.Dict, frame: Frame, at: At) -> Any:
        pairs: list[tuple[Any, Any]] = []
        for key, value in zip(node.keys, node.values, strict=True):
            if key is not None:
                pairs.append((self.evaluate(key, frame), self.evaluate(value, frame)))
                continue
            more = self.evaluate(value, frame)
            if isinstance(more, Deferred):
                at.decides_on(more)
            if type(more) is not dict:
                at.stop(f"unpacking {type_name(more)} may have side effects", "pass a dict")
            pairs += more.items()
        return self._make_dict(pairs, at)

    def _make_dict(self, pairs: list[tuple[Any, Any]], at: At) -> Any:
        keys = self.own([key for key, _ in pairs])
        if self.holds_deferred(keys):
            values = self.own([value for _, value in pairs])
            return self.defer(dict_of, [keys, values], {}, at)
        self.require_plain(keys, at)
        return self.own(dict(pairs))

    def _eval_ListComp(self, node: ast.ListComp, frame: Frame, at: At) -> Any:
        return self._comprehension(node, [node.elt], frame, at)

    def _eval_GeneratorExp(self, node: ast.GeneratorExp, frame: Frame, at: At) -> Any:
        return self._comprehension(node, [node.elt], frame, at)

    def _eval_SetComp(self, node: ast.SetComp, frame: Frame, at: At) -> Any:
        items = self._comprehension(node, [node.elt], frame, at)
        if isinstance(items, Deferred):
            return self.defer(set, [items], {}, at)
        return self._make_set(items, at)

    def _eval_DictComp(self, node: ast.DictComp, frame: Frame, at: At) -> Any:
        pairs = self._comprehension(node, [node.key, node.value], frame, at)
        if isinstance(pairs, Deferred):
            return self.defer(dict, [pairs], {}, at)
        return self._make_dict(pairs, at)

    def _comprehension(
        self,
        node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp,
        elements: Sequence[ast.expr],
        frame: Frame,
        at: At,
    ) -> Any:
        """The list of elements, or of tuples of several; deferred if it is over a deferred."""

        def element(scope: Frame) -> Any:
            values = [self.evaluate(part, scope) for part in elements]
            return values[0] if len(values) == 1 else self.own(tuple(values))

        first = node.generators[0]
        iterated = self.evaluate(first.iter, frame)
        if not isinstance(iterated, Deferred):
            return self.own(
                [element(s) for s in self._scopes(node.generators, iterated, frame, at)]
            )
        if len(node.generators) > 1:
            at.decides_on(iterated)
        item = Element(ast.unparse(first.target))
        scope = Frame(frame.name, frame.filename, frame.globals, outer=frame)
        with self.undecided():
            self.assign(first.target, Deferred(None, leaf=item), scope)
            tests = [self.evaluate(test, scope) for test in first.ifs]
            body = element(scope)
        if has_variable(body):
            at.decides_on(iterated)
        function = functools.partial(comprehended, item)
        return self._bind_lazily(function, [iterated, body, *tests], frozenset((item,)), at)

    def _scopes(
        self, generators: list[ast.comprehension], iterated: Any, frame: Frame, at: At
    ) -> Iterator[Frame]:
        """One after the other, the scopes in which a comprehension's element is evaluated."""
        first, *rest = generators
        for item in self.iterate(iterated, at):
            scope = Frame(frame.name, frame.filename, frame.globals, outer=frame)
            self.assign(first.target, item, scope)
            if all(self.truth(self.evaluate(c, scope), At(self, c, scope)) for c in first.ifs):
                if rest:
                    inner = self.evaluate(rest[0].iter, scope)
                    yield from self._scopes(rest, inner, scope, at)
                else:
                    yield scope

    def _eval_JoinedStr(self, node: ast.JoinedStr, frame: Frame, at: At) -> Any:
        pieces: list[Piece] = []
        for part in node.values:
            value = self.evaluate(part, frame)
            pieces += pieces_of(value)
        return self.concatenate(pieces, at)

    def _eval_FormattedValue(self, node: ast.FormattedValue, frame: Frame, at: At) -> Any:
        value = self.evaluate(node.value, frame)
        spec = "" if node.format_spec is None else self.evaluate(node.format_spec, frame)
        if isinstance(value, (Host, Expr)):
            at.stop(
                "an expression is not text",
                'write s += "..." + sgl.gen(...), and s["name"] for a variable',
            )
        if self.holds_deferred(value) or self.holds_deferred(spec):
            place = At(self, node.value, frame)
            return self.defer(formatted, [value, node.conversion, spec], {}, place)
        self.require_plain(value, at)
        try:
            return formatted(value, node.conversion, spec)
        except Exception as error:
            at.fail(error)

    def _eval_Attribute(self, node: ast.Attribute, frame: Frame, at: At) -> Any:
        owner = self.evaluate(node.value, frame)
        if isinstance(owner, Host):
            return owner.attribute(node.attr, at)
        if isinstance(owner, Deferred):
            return self.defer(getattr, [owner, node.attr], {}, at)
        return self.static_attribute(owner, node.attr, at)

    def _eval_Subscript(self, node: ast.Subscript, frame: Frame, at: At) -> Any:
        owner = self.evaluate(node.value, frame)
        key = self.evaluate(node.slice, frame)
        return self._item(owner, key, at)

    def _item(self, owner: Any, key: Any, at: At) -> Any:
        if isinstance(owner, Host):
            return owner.item(key, at)
        if isinstance(owner, Deferred) or self.holds_deferred(key):
            if not isinstance(owner, Deferred):
                self._require_subscript(owner, at)
            return self.defer(operator.getitem, [owner, key], {}, at)
        self._require_subscript(owner, at)
        self.require_plain(key, at)
        try:
            result = owner[key]
        except Exception as error:
            at.fail(error)
        if type(key) is slice and type(result) in (list, tuple):
            self.own(result)
        return result

    def _require_subscript(self, owner: Any, at: At) -> None:
        kind = type(owner)
        getter = getattr(kind, "__getitem__", None)
        plain = (str, bytes, list, tuple, dict, range, types.MappingProxyType)
        is_plain = any(getter is base.__getitem__ for base in plain)
        if isinstance(owner, dict) and hasattr(kind, "__missing__"):
            is_plain = False
        if not is_plain and not isinstance(owner, enum.EnumMeta) and kind.__name__ != "Match":
            at.stop(f"{type_name(owner)}[...] may have side effects", f"pass plain data, {RUN_IT}")

    def _eval_Slice(self, node: ast.Slice, frame: Frame, at: At) -> Any:
        bounds = [b and self.evaluate(b, frame) for b in (node.lower, node.upper, node.step)]
        return slice(*bounds)

    def _eval_UnaryOp(self, node: ast.UnaryOp, frame: Frame, at: At) -> Any:
        value = self.evaluate(node.operand, frame)
        function = UNARY[type(node.op)]
        if self.holds_deferred(value) and not isinstance(node.op, ast.Not):
            return self.defer(function, [value], {}, at)
        if isinstance(node.op, ast.Not):
            if isinstance(value, Deferred):
                return self.defer(operator.not_, [value], {}, at)
            return not self.truth(value, at)
        return self.call_pure(function, [value], {}, at)

    def _eval_BinOp(self, node: ast.BinOp, frame: Frame, at: At) -> Any:
        left = self.evaluate(node.left, frame)
        right = self.evaluate(node.right, frame)
        return self.binary(type(node.op), left, right, at)

    def binary(self, kind: type[ast.operator], left: Any, right: Any, at: At) -> Any:
        for side in (left, right):
            if isinstance(side, Host):
                at.stop(f"{side.description} is no value", 'append with s += ..., read with s["x"]')
        function = BINARY[kind]
        is_deferred = isinstance(left, Deferred) or isinstance(right, Deferred)
        if kind is ast.Add and is_deferred and (is_text(left) or is_text(right)):
            if all(isinstance(side, (str, Expr, Deferred)) for side in (left, right)):
                return self.concatenate([*pieces_in(left), *pieces_in(right)], at)
            at.fail(TypeError(f"cannot add {type(left).__name__} and {type(right).__name__}"))
        if is_deferred:
            return self.defer(function, [left, right], {}, at)
        if kind in (ast.Add, ast.Mult) and type(left) in (list, tuple):
            sides = [left, right]
            return self.call_structural(function, sides, {}, at, iterated=sides, is_new=True)
        if kind is ast.Add and isinstance(left, (Expr, str)) and isinstance(right, (Expr, str)):
            return left + right
        if self.holds_deferred(left) or self.holds_deferred(right):
            return self.defer(function, [left, right], {}, at)
        return self.call_pure(function, [left, right], {}, at, is_new=True)

    def _eval_BoolOp(self, node: ast.BoolOp, frame: Frame, at: At) -> Any:
        is_and = isinstance(node.op, ast.And)
        for position, operand in enumerate(node.values):
            value = self.evaluate(operand, frame)
            is_last = position == len(node.values) - 1
            if isinstance(value, Deferred) and not is_last:
                with self.undecided():
                    rest = [self.evaluate(later, frame) for later in node.values[position + 1 :]]
                return self.defer_lazily(all_of if is_and else any_of, [value, *rest], at)
            if is_last or self.truth(value, At(self, operand, frame)) is not is_and:
                return value
        raise AssertionError("a boolean operation has operands")

    def _eval_IfExp(self, node: ast.IfExp, frame: Frame, at: At) -> Any:
        test = self.evaluate(node.test, frame)
        if not isinstance(test, Deferred):
            is_true = self.truth(test, At(self, node.test, frame))
            return self.evaluate(node.body if is_true else node.orelse, frame)
        with self.undecided():
            either = [self.evaluate(branch, frame) for branch in (node.body, node.orelse)]
        if any(has_variable(value) for value in either):
            at.decides_on(test)
        return self.defer_lazily(chosen, [test, *either], at)

    def _eval_Compare(self, node: ast.Compare, frame: Frame, at: At) -> Any:
        left = self.evaluate(node.left, frame)
        result: Any = True
        for position, (op, operand) in enumerate(zip(node.ops, node.comparators, strict=True)):
            right = self.evaluate(operand, frame)
            result = self._compare(type(op), left, right, at)
            if isinstance(result, Deferred) and position < len(node.ops) - 1:
                with self.undecided():
                    rest = [self.evaluate(later, frame) for later in node.comparators[position:]]
                functions = [COMPARE[type(o)] for o in node.ops[position:]]
                function = functools.partial(compared, functions)
                return self.defer_lazily(function, [left, *rest], at)
            if position < len(node.ops) - 1 and not self.truth(result, at):
                return result
            left = right
        return result

    def _compare(self, kind: type[ast.cmpop], left: Any, right: Any, at: At) -> Any:
        function = COMPARE[kind]
        if kind in (ast.In, ast.NotIn) and isinstance(right, Host):
            found = right.contains(left, at)
            return found if kind is ast.In else not found
        if kind in (ast.Is, ast.IsNot):
            if isinstance(left, Deferred) or isinstance(right, Deferred):
                return self.defer(function, [left, right], {}, at)
            return function(left, right)
        if self.holds_deferred(left) or self.holds_deferred(right):
            return self.defer(function, [left, right], {}, at)
        if kind in (ast.Eq, ast.NotEq) and has_identity_only(left) and has_identity_only(right):
            return function(left, right)
        if kind in (ast.In, ast.NotIn) and isinstance(right, enum.EnumMeta):
            right = list(right)
        return self.call_pure(function, [left, right], {}, at)

    def _eval_Call(self, node: ast.Call, frame: Frame, at: At) -> Any:
        owner: Any = None
        is_method = isinstance(node.func, ast.Attribute)
        if isinstance(node.func, ast.Attribute):
            owner = self.evaluate(node.func.value, frame)
        else:
            owner = self.evaluate(node.func, frame)
        args = self._items(node.args, frame)
        kwargs: dict[str, Any] = {}
        for keyword in node.keywords:
            value = self.evaluate(keyword.value, frame)
            if keyword.arg is not None:
                kwargs[keyword.arg] = value
            elif type(value) is dict:
                kwargs.update(value)
            elif isinstance(value, Deferred):
                at.decides_on(value)
            else:
                at.stop(f"** of {type_name(value)} may have side effects", "pass a dict")
        if is_method:
            assert isinstance(node.func, ast.Attribute)
            return self.call_method(owner, node.func.attr, args, kwargs, at)
        return self.call(owner, args, kwargs, at)

    def _eval_Starred(self, node: ast.Starred, frame: Frame, at: At) -> Any:
        at.stop("a starred expression cannot be used here")

    # --- attributes ------------------------------------------------------------------------------

    def static_attribute(self, owner: Any, name: str, at: At) -> Any:
        """An attribute, read without running a property or `__getattr__` of anybody's."""
        if isinstance(owner, (LocalFunction, Bound)):
            at.stop("attributes of functions are not followed")
        if isinstance(owner, types.ModuleType):
            if name in vars(owner):
                return vars(owner)[name]
            submodule = sys.modules.get(f"{owner.__name__}.{name}")
            if submodule is not None:
                return submodule
            if owner.__name__.split(".")[0] == __name__.split(".")[0] and hasattr(owner, name):
                return getattr(owner, name)
            if "__getattr__" in vars(owner):
                at.stop(f"{owner.__name__} makes its attribute {name} when it is asked for")
            at.fail(AttributeError(f"module {owner.__name__!r} has no attribute {name!r}"))
        if isinstance(owner, enum.EnumMeta) and name in owner.__members__:
            return owner.__members__[name]
        if isinstance(owner, enum.Enum) and name in ("name", "value", "_name_", "_value_"):
            return owner._name_ if "name" in name else owner._value_
        if type(owner).__getattribute__ not in PLAIN_LOOKUPS:
            at.stop(f"{type_name(owner)} has code of its own for reading attributes")
        missing = object()
        found = inspect.getattr_static(owner, name, missing)
        if found is missing:
            if hasattr(type(owner), "__getattr__"):
                at.stop(f"{type_name(owner)} makes its attribute {name} when it is asked for")
            at.fail(AttributeError(f"{type(owner).__name__!r} object has no attribute {name!r}"))
        if not isinstance(owner, type) and name in getattr(owner, "__dict__", ()):
            return owner.__dict__[name]
        if isinstance(found, staticmethod):
            return found.__func__
        if isinstance(found, classmethod):
            kind = owner if isinstance(owner, type) else type(owner)
            if purity.is_pure_function(getattr(kind, name)):
                return getattr(kind, name)
            return Bound(found.__func__, kind)
        if isinstance(found, types.ClassMethodDescriptorType):
            return getattr(owner, name)
        if isinstance(owner, type):
            return found if not isinstance(found, property) else at.stop("a property of a class")
        if isinstance(found, types.FunctionType):
            return Bound(found, owner)
        if isinstance(found, property):
            return self.call(found.fget, [owner], {}, at)
        if isinstance(found, (types.MemberDescriptorType, types.GetSetDescriptorType)) or (
            type(found).__name__ == "_tuplegetter"
        ):
            return getattr(owner, name)
        if isinstance(found, (types.MethodDescriptorType, types.WrapperDescriptorType)):
            return Bound(found, owner)
        if hasattr(type(found), "__get__"):
            at.stop(f"reading .{name} of {type_name(owner)} may have side effects")
        return found
