"""Python's expressions while a program is traced.

Owns operators, displays, comprehensions, f-strings and subscripts, over known and deferred values.
Calls are in `calls.py`, statements in `evaluation.py`.
"""

from __future__ import annotations

import ast
import enum
import re
import types
from abc import abstractmethod
from collections.abc import Iterator, Sequence

from sgl_vllm.lang.ir import Expr, Value
from sgl_vllm.lang.tracing.calls import Calls
from sgl_vllm.lang.tracing.deferred import Deferred, Piece
from sgl_vllm.lang.tracing.frames import (
    At,
    Frame,
    FunctionNode,
    Host,
    Kwargs,
    LocalFunction,
    TraceError,
)
from sgl_vllm.lang.tracing.knowledge import type_name
from sgl_vllm.lang.tracing.operations import BINARY, COMPARE, UNARY, function_named


class Expressions(Calls):
    """Evaluates expressions; `_eval_X` is for the syntax node X."""

    @abstractmethod
    def assign(self, target: ast.expr, value: Value, frame: Frame) -> None:
        """Give a target its value."""

    def evaluate(self, node: ast.expr, frame: Frame) -> Value:
        """The value of an expression: known, deferred, or a host."""
        at = At(node, frame)
        self._steps += 1
        if self._steps > self._max_steps:
            at.stop(f"the program takes more than {self._max_steps} steps")
        method = getattr(self, f"_eval_{type(node).__name__}", None)
        if method is None:
            at.stop(f"{type(node).__name__} is not supported in a traced function")
        try:
            return method(node, frame, at)
        except TraceError as error:
            # The prefix goes on up to where such a value is written, unless its expression could
            # have changed something.
            names = (part.id for part in ast.walk(node) if isinstance(part, ast.Name))
            has_effect = any(self.can_change(frame.names.get(name)) for name in names)
            if has_effect or not (error.is_decision and self.is_prefix_only):
                raise
            return Deferred("unknown", node=node)

    def _eval_Constant(self, node: ast.Constant, frame: Frame, at: At) -> Value:
        return node.value

    def _eval_Name(self, node: ast.Name, frame: Frame, at: At) -> Value:
        if node.id not in frame.names:
            at.fail(NameError(f"name {node.id!r} is not defined"))
        return frame.names[node.id]

    def _eval_Await(self, node: ast.Await, frame: Frame, at: At) -> Value:
        return self.evaluate(node.value, frame)

    def _eval_NamedExpr(self, node: ast.NamedExpr, frame: Frame, at: At) -> Value:
        value = self.evaluate(node.value, frame)
        self.assign(node.target, value, frame)
        return value

    def _eval_Attribute(self, node: ast.Attribute, frame: Frame, at: At) -> Value:
        owner = self.evaluate(node.value, frame)
        if isinstance(owner, Host):
            return owner.attribute(node.attr, at)
        if isinstance(owner, Deferred):
            return self.defer("getattr", [owner, node.attr], at)
        return self.attribute(owner, node.attr, at)

    def _eval_Call(self, node: ast.Call, frame: Frame, at: At) -> Value:
        func = node.func
        callee = self.evaluate(func.value if isinstance(func, ast.Attribute) else func, frame)
        args = self._items(node.args, frame)
        kwargs: Kwargs = {}
        for keyword in node.keywords:
            value = self.evaluate(keyword.value, frame)
            if keyword.arg is not None:
                kwargs[keyword.arg] = value
            else:
                kwargs.update(self._pairs(value, at))
        if isinstance(func, ast.Attribute):
            return self.call_method(callee, func.attr, args, kwargs, at)
        return self.call(callee, args, kwargs, at)

    def _pairs(self, value: Value, at: At) -> dict[Value, Value]:
        """The items of ``**value``."""
        if isinstance(value, Deferred):
            at.decides_on(value)
        if type(value) is not dict:
            at.stop(f"unpacking {type_name(value)} may have side effects", "pass a dict")
        return value

    def _eval_Lambda(self, node: ast.Lambda, frame: Frame, at: At) -> Value:
        return self.local_function(node, frame)

    def local_function(self, node: FunctionNode, frame: Frame) -> LocalFunction:
        """The function that a `def` or a `lambda` makes."""
        defaults = tuple(self.evaluate(d, frame) for d in node.args.defaults)
        pairs = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
        keywords = {a.arg: self.evaluate(d, frame) for a, d in pairs if d is not None}
        return LocalFunction(node, frame, defaults, keywords)

    # --- displays and comprehensions -----------------------------------------------------------

    def _items(self, nodes: Sequence[ast.expr], frame: Frame) -> list[Value]:
        """The values of several expressions. Starred ones must be known."""
        items: list[Value] = []
        for node in nodes:
            if isinstance(node, ast.Starred):
                items += self.iterate(self.evaluate(node.value, frame), At(node, frame))
            else:
                items.append(self.evaluate(node, frame))
        return items

    def _eval_List(self, node: ast.List, frame: Frame, at: At) -> Value:
        whole = self.own([])
        for part in node.elts:
            is_starred = isinstance(part, ast.Starred)
            value = self.evaluate(part.value if isinstance(part, ast.Starred) else part, frame)
            more = self.call(list, [value], {}, at) if is_starred else self.own([value])
            whole = self.apply("add", [whole, more], at)
        return whole

    def _eval_Tuple(self, node: ast.Tuple, frame: Frame, at: At) -> Value:
        return self.own(tuple(self._items(node.elts, frame)))

    def _eval_Set(self, node: ast.Set, frame: Frame, at: At) -> Value:
        return self.apply("set_of", self._items(node.elts, frame), at)

    def _eval_Dict(self, node: ast.Dict, frame: Frame, at: At) -> Value:
        pairs: list[tuple[Value, Value]] = []
        for key, value in zip(node.keys, node.values, strict=True):
            if key is not None:
                pairs.append((self.evaluate(key, frame), self.evaluate(value, frame)))
            else:
                pairs += self._pairs(self.evaluate(value, frame), at).items()
        return self._dict(pairs, at)

    def _dict(self, pairs: list[tuple[Value, Value]], at: At) -> Value:
        keys = [key for key, _ in pairs]
        if any(map(self.holds_deferred, keys)):
            return self.defer("dict_of", [part for pair in pairs for part in pair], at)
        self.require_plain(keys, at)
        return self.own(self._result(dict, [pairs], {}, at))

    def _eval_ListComp(self, node: ast.ListComp | ast.GeneratorExp, frame: Frame, at: At) -> Value:
        scopes = self._scopes(node.generators, frame)
        return self.own([self.evaluate(node.elt, scope) for scope in scopes])

    def _eval_GeneratorExp(self, node: ast.GeneratorExp, frame: Frame, at: At) -> Value:
        items = self._eval_ListComp(node, frame, at)
        if any(map(self.holds_function, items)):
            # It sees the variables of the loop as they are at the call, which may be in the loop.
            at.stop(
                "functions made by a generator expression are not supported in a traced function",
                "make a list, [... for ...]",
            )
        return items

    def _eval_SetComp(self, node: ast.SetComp, frame: Frame, at: At) -> Value:
        scopes = self._scopes(node.generators, frame)
        return self.apply("set_of", [self.evaluate(node.elt, scope) for scope in scopes], at)

    def _eval_DictComp(self, node: ast.DictComp, frame: Frame, at: At) -> Value:
        scopes = self._scopes(node.generators, frame)
        return self._dict(
            [(self.evaluate(node.key, s), self.evaluate(node.value, s)) for s in scopes], at
        )

    def _scopes(
        self, generators: Sequence[ast.comprehension], frame: Frame, scope: Frame | None = None
    ) -> Iterator[Frame]:
        """The frame of a comprehension, once per element, which must be over known items.

        There is one `scope` for all of it: a function made there sees the last element, as it does
        when Python runs it.
        """
        first, *rest = generators
        items = self.evaluate(first.iter, scope or frame)
        scope = scope or frame.inner(frame.name)
        for item in self.iterate(items, At(first.iter, frame)):
            self.assign(first.target, item, scope)
            if all(self.truth(self.evaluate(c, scope), At(c, scope)) for c in first.ifs):
                if rest:
                    yield from self._scopes(rest, frame, scope)
                else:
                    yield scope

    # --- f-strings and subscripts --------------------------------------------------------------

    def _eval_JoinedStr(self, node: ast.JoinedStr, frame: Frame, at: At) -> Value:
        return self.concatenate(
            [p for v in node.values for p in pieces_of(self.evaluate(v, frame))], at
        )

    def _eval_FormattedValue(self, node: ast.FormattedValue, frame: Frame, at: At) -> Value:
        value = self.evaluate(node.value, frame)
        spec = "" if node.format_spec is None else self.evaluate(node.format_spec, frame)
        if isinstance(value, (Host, Expr)):
            at.stop(
                "an expression is not text",
                'write s += "..." + sgl.gen(...), and s["name"] for a variable',
            )
        return self.apply("format", [value, node.conversion, spec], At(node.value, frame))

    def _eval_Subscript(self, node: ast.Subscript, frame: Frame, at: At) -> Value:
        return self.item(self.evaluate(node.value, frame), self.evaluate(node.slice, frame), at)

    def item(self, owner: Value, key: Value, at: At) -> Value:
        """The value of ``owner[key]``."""
        if isinstance(owner, Host):
            return owner.item(key, at)
        if not isinstance(owner, Deferred):
            getter = getattr(type(owner), "__getitem__", None)
            is_plain = any(getter is plain.__getitem__ for plain in _SUBSCRIPTABLE)
            if not is_plain or (isinstance(owner, dict) and hasattr(type(owner), "__missing__")):
                at.stop(f"{type_name(owner)}[...] may have side effects", "pass plain data")
        if isinstance(owner, Deferred) or self.holds_deferred(key):
            return self.defer("getitem", [owner, key], at)
        self.require_plain(key, at)
        result = self._result(function_named("getitem"), [owner, key], {}, at)
        return self.own(result) if type(key) is slice and type(result) in (list, tuple) else result

    def _eval_Slice(self, node: ast.Slice, frame: Frame, at: At) -> Value:
        bounds = [b and self.evaluate(b, frame) for b in (node.lower, node.upper, node.step)]
        return self.apply("builtins.slice", bounds, at)

    # --- operators -----------------------------------------------------------------------------

    def _eval_UnaryOp(self, node: ast.UnaryOp, frame: Frame, at: At) -> Value:
        value = self.evaluate(node.operand, frame)
        if isinstance(node.op, ast.Not) and not isinstance(value, Deferred):
            return not self.truth(value, at)
        return self.apply(UNARY[type(node.op)], [value], at)

    def _eval_BinOp(self, node: ast.BinOp, frame: Frame, at: At) -> Value:
        left = self.evaluate(node.left, frame)
        right = self.evaluate(node.right, frame)
        return self.binary(type(node.op), left, right, at)

    def binary(self, kind: type[ast.operator], left: Value, right: Value, at: At) -> Value:
        """The value of ``left <kind> right``."""
        sides = (left, right)
        if kind is ast.Add and any(
            isinstance(side, (str, Expr)) or _is_text(side) for side in sides
        ):
            if all(isinstance(side, (str, Expr)) for side in sides):
                return left + right
            if all(isinstance(side, (str, Expr, Deferred)) for side in sides):
                return self.concatenate([*pieces_of(left), *pieces_of(right)], at)
        return self.apply(BINARY[kind], sides, at)

    def _eval_BoolOp(self, node: ast.BoolOp, frame: Frame, at: At) -> Value:
        is_and = isinstance(node.op, ast.And)
        for operand in node.values[:-1]:
            value = self.evaluate(operand, frame)
            if self.truth(value, At(operand, frame)) is not is_and:
                return value
        return self.evaluate(node.values[-1], frame)

    def _eval_IfExp(self, node: ast.IfExp, frame: Frame, at: At) -> Value:
        test = self.truth(self.evaluate(node.test, frame), At(node.test, frame))
        return self.evaluate(node.body if test else node.orelse, frame)

    def _eval_Compare(self, node: ast.Compare, frame: Frame, at: At) -> Value:
        left, result = self.evaluate(node.left, frame), None
        for op, operand in zip(node.ops, node.comparators, strict=True):
            if result is not None and not self.truth(result, at):
                break
            right = self.evaluate(operand, frame)
            left, result = right, self._compare(type(op), left, right, at)
        return result

    def _compare(self, kind: type[ast.cmpop], left: Value, right: Value, at: At) -> Value:
        operation = COMPARE[kind]
        is_deferred = isinstance(left, Deferred) or isinstance(right, Deferred)
        if kind in (ast.In, ast.NotIn):
            if isinstance(right, Host):
                return right.contains(left, at) is (kind is ast.In)
        elif not is_deferred and (
            kind in (ast.Is, ast.IsNot)
            or (kind in (ast.Eq, ast.NotEq) and _is_identity(left) and _is_identity(right))
        ):
            return function_named(operation)(left, right)
        return self.apply(operation, [left, right], at)


_SUBSCRIPTABLE: tuple[Value, ...] = (
    *(str, bytes, list, tuple, dict, range),
    *(types.MappingProxyType, enum.EnumMeta, re.Match),
)


def pieces_of(value: Value) -> tuple[Piece, ...]:
    """The parts of a text: of a string, an expression or a deferred value."""
    return value.pieces if isinstance(value, Deferred) else (value,)


def _is_text(value: Value) -> bool:
    """Whether a deferred value is surely text or an expression."""
    return isinstance(value, Deferred) and (value.operation == "concat" or value.is_expression)


def _is_identity(value: Value) -> bool:
    """Whether ``==`` on it compares identities."""
    equals: Value = type(value).__eq__
    return isinstance(value, type) or equals is object.__eq__ or value is None
