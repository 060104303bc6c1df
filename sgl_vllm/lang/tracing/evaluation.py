"""Evaluates the source of a function over known and deferred values, without side effects.

Owns statements, and following functions into their source. Never calls the function. Objects of the
language, such as the prompt, are `Host`s, which `prompts.py` makes.
"""

from __future__ import annotations

import ast
import builtins
import inspect
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal  # Any: whatever Python's operators return

from sgl_vllm.lang.ir import Value
from sgl_vllm.lang.tracing.deferred import Deferred
from sgl_vllm.lang.tracing.expressions import Expressions
from sgl_vllm.lang.tracing.frames import (
    RUN_IT,
    Args,
    At,
    Frame,
    Function,
    FunctionNode,
    Host,
    Kwargs,
    LocalFunction,
    TraceError,
)
from sgl_vllm.lang.tracing.knowledge import type_name
from sgl_vllm.lang.tracing.source import definition_of

MAX_STEPS = 200_000
"""At most this many expressions are evaluated: about a second."""
MAX_DEPTH = 24
"""Calls are followed to this depth."""

_UNSUPPORTED: dict[str, tuple[str, str]] = {
    "Try": ("try", "catch the error in a function that sgl.tool(...) calls"),
    "TryStar": ("try", "catch the error in a function that sgl.tool(...) calls"),
    "Import": ("import", "import it at the top of the file"),
    "ImportFrom": ("import", "import it at the top of the file"),
    "Nonlocal": ("nonlocal", "return the value instead"),
    "Global": ("global", "return the value instead"),
    "Delete": ("del", "make a new list or dict without the item"),
    "Match": ("match", "write it with if and elif"),
    "ClassDef": ("class", "define it outside of the traced function"),
}


@dataclass(frozen=True)
class _Jump:
    """How a statement leaves its block. `value` is that of a `return`."""

    kind: Literal["return", "break", "continue"]
    value: Value = None


class Evaluator(Expressions):
    """Follows functions; `_run_X` is for the statement node X."""

    def __init__(self, home: str, max_steps: int, *, is_prefix_only: bool) -> None:
        super().__init__(home, max_steps, is_prefix_only=is_prefix_only)
        self._depth = 0

    # --- following functions -------------------------------------------------------------------

    def follow_program(self, function: Callable[..., Any], arguments: Mapping[str, Value]) -> Value:
        """The result of the program's function, given all its arguments by name."""
        node, frame = _syntax_and_frame(function)
        frame.names.update(arguments)
        return self.snapshot(self._body(node, frame), At(node, frame))

    def follow(self, function: Function, args: Args, kwargs: Kwargs, at: At) -> Value:
        if isinstance(function, LocalFunction):
            node, frame = function.node, function.frame.inner(function.name)
            signature = _signature(function)
        else:
            try:
                node, frame = _syntax_and_frame(function)
            except TraceError as error:
                at.stop(error.reason)
            signature = inspect.signature(function, follow_wrapped=False)
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            at.fail(TypeError(f"{frame.name}() {error}"))
        bound.apply_defaults()
        for name, value in bound.arguments.items():
            is_made = signature.parameters[name].kind in (_VAR_POSITIONAL, _VAR_KEYWORD)
            frame.names[name] = self.own(value) if is_made else value
        if self._depth >= MAX_DEPTH:
            at.stop(f"functions call each other more than {MAX_DEPTH} deep")
        self._depth += 1
        try:
            return self._body(node, frame)
        except TraceError as error:
            if not isinstance(function, LocalFunction):
                error.add_note(f"reached from {at.frame.filename}:{at.node.lineno}")
            raise
        finally:
            self._depth -= 1

    def _body(self, node: FunctionNode, frame: Frame) -> Value:
        if isinstance(node, ast.Lambda):
            return self.evaluate(node.body, frame)
        jump = self.run(node.body, frame)
        return None if jump is None else jump.value

    # --- statements ----------------------------------------------------------------------------

    def run(self, statements: Sequence[ast.stmt], frame: Frame) -> _Jump | None:
        """Follow statements in order, up to one that leaves the block."""
        for statement in statements:
            self._steps += 1
            kind = type(statement).__name__
            at = At(statement, frame)
            method = getattr(self, f"_run_{kind}", None)
            if method is None:
                word, instead = _UNSUPPORTED.get(kind, (kind, ""))
                at.stop(
                    f"{word} is not supported in a traced function",
                    f"{instead}, or {RUN_IT}" if instead else RUN_IT,
                )
            jump: _Jump | None = method(statement, frame, at)
            if jump is not None:
                return jump
        return None

    def _run_Expr(self, node: ast.Expr, frame: Frame, at: At) -> None:
        self.evaluate(node.value, frame)

    def _run_Pass(self, node: ast.Pass, frame: Frame, at: At) -> None:
        pass

    def _run_Return(self, node: ast.Return, frame: Frame, at: At) -> _Jump:
        return _Jump("return", node.value and self.evaluate(node.value, frame))

    def _run_Break(self, node: ast.Break, frame: Frame, at: At) -> _Jump:
        return _Jump("break")

    def _run_Continue(self, node: ast.Continue, frame: Frame, at: At) -> _Jump:
        return _Jump("continue")

    def _run_Assert(self, node: ast.Assert, frame: Frame, at: At) -> None:
        if not self.truth(self.evaluate(node.test, frame), At(node.test, frame)):
            at.stop("the program's assertion fails", "")

    def _run_Raise(self, node: ast.Raise, frame: Frame, at: At) -> None:
        at.stop("the program raises an error here", "")

    def _run_FunctionDef(
        self, node: ast.FunctionDef | ast.AsyncFunctionDef, frame: Frame, at: At
    ) -> None:
        if node.decorator_list:
            at.stop("a decorator is not supported inside of a traced function")
        frame.names[node.name] = self.local_function(node, frame)

    _run_AsyncFunctionDef = _run_FunctionDef

    # --- assignments ---------------------------------------------------------------------------

    def _run_Assign(self, node: ast.Assign, frame: Frame, at: At) -> None:
        value = self.evaluate(node.value, frame)
        for target in node.targets:
            self.assign(target, value, frame)

    def _run_AnnAssign(self, node: ast.AnnAssign, frame: Frame, at: At) -> None:
        if node.value is not None:
            self.assign(node.target, self.evaluate(node.value, frame), frame)

    def _run_AugAssign(self, node: ast.AugAssign, frame: Frame, at: At) -> None:
        owner = key = None
        if isinstance(node.target, ast.Subscript):
            owner = self.evaluate(node.target.value, frame)
            key = self.evaluate(node.target.slice, frame)
            old = self.item(owner, key, at)
        else:
            old = self.evaluate(node.target, frame)
        value = self.evaluate(node.value, frame)
        if isinstance(old, Host):
            if not isinstance(node.op, ast.Add):
                at.stop("a prompt supports no augmented assignment but +=")
            old.append(value, at)
        elif type(old) is list and isinstance(node.op, ast.Add):
            self.call_method(old, "extend", [value], {}, at)
        elif type(old) in (list, dict, set):
            at.stop(
                f"this augmented assignment of {type_name(old)} is not supported in a traced "
                "function",
                "make a new one",
            )
        else:
            new = self.binary(type(node.op), old, value, at)
            if owner is not None:
                self._set_item(owner, key, new, at)
            else:
                self.assign(node.target, new, frame)

    def assign(self, target: ast.expr, value: Value, frame: Frame) -> None:
        at = At(target, frame)
        if isinstance(target, ast.Name):
            frame.names[target.id] = value
        elif isinstance(target, (ast.Tuple, ast.List)):
            self._unpack(target.elts, value, frame, at)
        elif isinstance(target, ast.Subscript):
            owner = self.evaluate(target.value, frame)
            self._set_item(owner, self.evaluate(target.slice, frame), value, at)
        else:
            at.stop("assigning an attribute is a side effect", f"use a variable, or {RUN_IT}")

    def _unpack(self, targets: list[ast.expr], value: Value, frame: Frame, at: At) -> None:
        count = len(targets)
        star = next((i for i, t in enumerate(targets) if isinstance(t, ast.Starred)), None)
        if isinstance(value, Deferred) and star is None:
            items = [
                self.defer("item_of", (value, i, count), At(target, frame))
                for i, target in enumerate(targets)
            ]
        else:
            items = self.iterate(value, at)
        if star is not None and len(items) >= count - 1:
            end = len(items) - (count - star - 1)
            items = [*items[:star], self.own(items[star:end]), *items[end:]]
        if len(items) != count:
            at.fail(ValueError(f"{len(items)} values to unpack into {count} names"))
        for target, item in zip(targets, items, strict=True):
            self.assign(target.value if isinstance(target, ast.Starred) else target, item, frame)

    def _set_item(self, owner: Value, key: Value, value: Value, at: At) -> None:
        if isinstance(owner, Host):
            return owner.set_item(key, value, at)
        if type(owner) not in (list, dict):
            at.stop(f"assigning an item of {type_name(owner)} may have side effects")
        self.call_method(owner, "__setitem__", [key, value], {}, at)

    # --- control flow --------------------------------------------------------------------------

    def _run_If(self, node: ast.If, frame: Frame, at: At) -> _Jump | None:
        test = self.truth(self.evaluate(node.test, frame), At(node.test, frame))
        return self.run(node.body if test else node.orelse, frame)

    def _run_For(self, node: ast.For, frame: Frame, at: At) -> _Jump | None:
        items = self.iterate(self.evaluate(node.iter, frame), At(node.iter, frame))
        for item in items:
            self.assign(node.target, item, frame)
            jump = self.run(node.body, frame)
            if jump is not None and jump.kind != "continue":
                return None if jump.kind == "break" else jump
        return self.run(node.orelse, frame)

    def _run_While(self, node: ast.While, frame: Frame, at: At) -> _Jump | None:
        while self.truth(self.evaluate(node.test, frame), At(node.test, frame)):
            jump = self.run(node.body, frame)
            if jump is not None and jump.kind != "continue":
                return None if jump.kind == "break" else jump
        return self.run(node.orelse, frame)

    def _run_With(self, node: ast.With, frame: Frame, at: At) -> _Jump | None:
        entered: list[tuple[Host, At]] = []
        for item in node.items:
            place = At(item.context_expr, frame)
            value = self.evaluate(item.context_expr, frame)
            if not isinstance(value, Host):
                place.stop(f"entering {type_name(value)} may have side effects")
            inside = value.enter(place)
            entered.append((value, place))
            if item.optional_vars is not None:
                self.assign(item.optional_vars, inside, frame)
        jump = self.run(node.body, frame)
        for value, place in reversed(entered):
            value.exit(place)
        return jump


_VAR_POSITIONAL = inspect.Parameter.VAR_POSITIONAL
_VAR_KEYWORD = inspect.Parameter.VAR_KEYWORD


def _syntax_and_frame(function: Value) -> tuple[FunctionNode, Frame]:
    """The syntax of a function, and a frame with the names that it sees."""
    node = definition_of(function.__code__)
    closure: dict[str, Value] = {}
    cells = function.__closure__ or ()
    for name, cell in zip(function.__code__.co_freevars, cells, strict=True):
        try:
            closure[name] = cell.cell_contents
        except ValueError:  # it has no value yet
            continue
    names = ChainMap[str, Value]({}, closure, function.__globals__, vars(builtins))
    return node, Frame(function.__qualname__, function.__code__.co_filename, names)


def _signature(function: LocalFunction) -> inspect.Signature:
    """The signature of a function that the program itself defines."""
    arguments, kinds = function.node.args, inspect.Parameter
    positional = [*arguments.posonlyargs, *arguments.args]
    names = [argument.arg for argument in positional]
    defaults = dict(zip(reversed(names), reversed(function.defaults), strict=False))
    defaults.update(function.keyword_defaults)
    groups = (
        (positional, kinds.POSITIONAL_OR_KEYWORD),
        ([arguments.vararg], kinds.VAR_POSITIONAL),
        (arguments.kwonlyargs, kinds.KEYWORD_ONLY),
        ([arguments.kwarg], kinds.VAR_KEYWORD),
    )
    return inspect.Signature(
        [
            kinds(argument.arg, kind, default=defaults.get(argument.arg, kinds.empty))
            for group, kind in groups
            for argument in group
            if argument is not None
        ]
    )
