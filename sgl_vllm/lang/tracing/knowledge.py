"""What is known of a value while a program is traced, and what is put off to the run.

Owns the difference between known and deferred values, between objects that the program made and
those from outside, and what ends a trace. Follows no code: `expressions.py` and `evaluation.py` do.
"""

from __future__ import annotations

import ast
import enum
import functools
import itertools
import types
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from sgl_vllm.lang.ir import Expr
from sgl_vllm.lang.tracing import purity
from sgl_vllm.lang.tracing.deferred import (
    Argument,
    Deferred,
    Element,
    Leaf,
    Piece,
    Reading,
    Template,
    concatenation,
    lazily,
    lifted,
    template_of,
)
from sgl_vllm.lang.tracing.frames import (
    RUN_IT,
    At,
    Bound,
    Frame,
    Host,
    LocalFunction,
    Raised,
    TraceError,
)
from sgl_vllm.lang.tracing.operations import VIEWS, function_of, shown, type_name


class Knowledge(ABC):
    """The values of one trace.

    Invariant: a deferred value is only ever in a list, dict, set or tuple that the program itself
    made (`own`): what came from outside is never changed, nor searched.
    """

    def __init__(self, max_steps: int) -> None:
        self._max_steps = max_steps
        self._steps = 0
        self._uncertain = 0  # how many undecided conditions what is evaluated now depends on
        self._num_deferred = 0
        self._own: dict[int, object] = {}  # lists, dicts, sets and tuples that the program made
        self._shared: set[int] = set()  # those of them that it must not change

    @abstractmethod
    def evaluate(self, node: ast.expr, frame: Frame) -> Any:
        """The value of an expression: known, deferred, or a host."""

    @abstractmethod
    def call(self, callee: Any, args: list[Any], kwargs: dict[str, Any], at: At) -> Any:
        """What the program's call gives."""

    @abstractmethod
    def assign(self, target: ast.expr, value: Any, frame: Frame) -> None:
        """Give a target its value."""

    @abstractmethod
    def follow_local(
        self, function: LocalFunction, args: list[Any], kwargs: dict[str, Any], at: At
    ) -> Any:
        """What a call of a function that the program made gives."""

    # --- what ends a trace -----------------------------------------------------------------------

    def stop(self, node: ast.AST, frame: Frame, reason: str, advice: str = RUN_IT) -> NoReturn:
        raise TraceError(
            reason, advice, frame.filename, getattr(node, "lineno", 0), shown(ast.unparse(node))
        )

    def decides_on(self, node: ast.AST, frame: Frame, value: Deferred) -> NoReturn:
        arguments = sorted(leaf.name for leaf in value.leaves if isinstance(leaf, Argument))
        advice = RUN_IT
        if arguments and not any(isinstance(leaf, Reading) for leaf in value.leaves):
            given = ", ".join(f"{name}=..." for name in arguments)
            advice = f"give it when compiling, compile({given}), {RUN_IT}"
        self.stop(node, frame, f"the program decides on {value.why()}", advice)

    def certain(self, at: At) -> None:
        """Nothing may be changed where it is not known whether the program gets there."""
        if self._uncertain:
            at.stop("it is not known whether the program gets here")

    # --- known and deferred ----------------------------------------------------------------------

    def own(self, value: Any) -> Any:
        """`value`, a container that the program made: it may change it."""
        self._own[id(value)] = value
        return value

    def share(self, value: Any) -> Any:
        """`value`, a new container, which the program may read but not change."""
        self._shared.add(id(value))
        return self.own(value)

    def may_change(self, value: object) -> bool:
        """Whether changing `value` can be seen by nobody else."""
        return self.is_own(value) and id(value) not in self._shared

    def is_own(self, value: object) -> bool:
        return id(value) in self._own

    def holds_deferred(self, value: object) -> bool:
        """Whether a deferred value is in it: only the program's own containers can hold one."""
        if isinstance(value, Deferred):
            return True
        if type(value) is slice:
            return any(map(self.holds_deferred, (value.start, value.stop, value.step)))
        if type(value) in purity.CONTAINERS and self.is_own(value):
            parts: Any = value
            if isinstance(value, dict):
                parts = (*value.keys(), *value.values())
            self._steps += len(parts)
            return any(map(self.holds_deferred, parts))
        return False

    def template(self, value: object, at: At) -> Template:
        """A snapshot of `value`."""

        def as_deferred(part: object) -> object:
            if isinstance(part, Host):
                at.stop(f"{part.description} cannot be used as a value here")
            if isinstance(part, LocalFunction):
                return self._deferred_function(part, at)
            if isinstance(part, Bound):
                at.stop("a function cannot be applied to what is not known yet")
            return part

        return template_of(value, self.is_own, as_deferred)

    def defer(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        at: At,
        **about: Any,
    ) -> Deferred:
        """`function(*args, **kwargs)`, to be computed in a run."""
        self._num_deferred += 1
        pair = self.own((self.own(list(args)), self.own(dict(kwargs))))
        node = at.node if isinstance(at.node, ast.expr) else None
        return lifted(function, self.template(pair, at), node, **about)

    def defer_lazily(self, function: Callable[..., Any], operands: Sequence[Any], at: At) -> Any:
        """``function(environment, *operands)``, which computes the operands that it needs."""
        return self._bind_lazily(function, operands, frozenset(), at)

    def _bind_lazily(
        self,
        function: Callable[..., Any],
        operands: Sequence[Any],
        binds: frozenset[Leaf],
        at: At,
    ) -> Deferred:
        self._num_deferred += 1
        templates = [self.template(operand, at) for operand in operands]
        node = at.node if isinstance(at.node, ast.expr) else None
        return lazily(function, templates, node, binds)

    def _deferred_function(self, function: LocalFunction, at: At) -> Deferred:
        """A function of the program, to be called in a run: with it, what is not known yet is
        sorted, filtered, ..."""
        names = [argument.arg for argument in function.node.args.args]
        elements = [Element(name) for name in names]
        with self.undecided():
            body = self.follow_local(function, [Deferred(None, leaf=e) for e in elements], {}, at)
        call = functools.partial(function_of, elements)
        return self._bind_lazily(call, [body], frozenset(elements), at)

    def concatenate(self, pieces: Sequence[Piece], at: At) -> Any:
        """`pieces` as one string if all are known, else deferred."""
        if all(isinstance(piece, str) for piece in pieces):
            return "".join(pieces)  # type: ignore[arg-type]
        self._num_deferred += 1
        return concatenation(pieces, at.node if isinstance(at.node, ast.expr) else None)

    def require_plain(self, value: Any, at: At) -> None:
        """Stop at a value whose own code an operation would run."""
        stack, seen = [value], set()
        while stack:
            part = stack.pop()
            if purity.is_plain_scalar(part) or isinstance(part, (Expr, Deferred)):
                continue
            if purity.is_plain_container(part):
                if id(part) not in seen:
                    seen.add(id(part))
                    self._steps += len(part)
                    stack.extend((*part.keys(), *part.values()) if isinstance(part, dict) else part)
                continue
            if isinstance(part, Host):
                at.stop(f"{part.description} is no value: read a variable with s['name']")
            if isinstance(part, types.FunctionType) or purity.is_pure_function(part):
                continue
            at.stop(
                f"it runs the code of {type_name(part)}, which may have side effects",
                f"use its plain attributes, {RUN_IT}",
            )

    def truth(self, value: Any, at: At) -> bool:
        """Whether `value` counts as true; stops where that is not known."""
        if isinstance(value, Deferred):
            at.decides_on(value)
        if isinstance(value, (Host, LocalFunction, Bound)):
            return True
        kind = type(value)
        if purity.is_plain_scalar(value) or purity.is_plain_container(value):
            return bool(value)
        if hasattr(kind, "__bool__") or hasattr(kind, "__len__"):
            at.stop(f"it asks {type_name(value)} for its truth, which may have side effects")
        return True

    def iterate(self, value: Any, at: At) -> list[Any]:
        """The items of `value`, all at once."""
        if isinstance(value, Deferred):
            at.decides_on(value)
        if isinstance(value, Host):
            return value.iterate(at)
        if isinstance(value, enum.EnumMeta):
            return list(value.__members__.values())
        if type(value) in (str, bytes, range) or purity.is_plain_container(value):
            return list(itertools.islice(value, self._max_steps))
        if type(value) in VIEWS:
            return list(value)
        if isinstance(value, (int, float, type(None))):
            at.fail(TypeError(f"{type(value).__name__!r} object is not iterable"))
        at.stop(f"iterating over {type_name(value)} may have side effects", "pass a list")

    @contextmanager
    def undecided(self) -> Iterator[None]:
        self._uncertain += 1
        try:
            yield
        except Raised as raised:
            reason = f"it raises {type(raised.error).__name__} if the program gets here"
            self.stop(raised.node, raised.frame, reason)
        finally:
            self._uncertain -= 1
