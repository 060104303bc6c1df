"""What is known of a value while a program is traced.

Owns the difference between known and deferred values, and between containers of the program and
those from outside. Evaluates no code: `calls.py`, `expressions.py` and `evaluation.py` do.
"""

from __future__ import annotations

import ast
import enum
import itertools
import types
from collections.abc import Sequence

from sgl_vllm.lang.ir import Expr, Value
from sgl_vllm.lang.tracing import purity
from sgl_vllm.lang.tracing.deferred import Deferred, Piece, Step, merged
from sgl_vllm.lang.tracing.frames import RUN_IT, At, Host, LocalFunction

_MAKERS: dict[type, str] = {list: "list_of", tuple: "tuple_of", set: "set_of", dict: "dict_of"}


def type_name(value: object) -> str:
    """`value` in a message, by its type."""
    if isinstance(value, Host):
        return value.description
    if isinstance(value, type):
        return f"the class {value.__qualname__}"
    return f"a {type(value).__qualname__}"


class Knowledge:
    """The values of one trace.

    Invariant: only containers that the program itself made (`own`) hold deferred values. Containers
    from outside are neither changed nor searched. With `is_prefix_only`, only the beginning of the
    prompt is of interest. `steps_of_function` is as in `Graph`.
    """

    def __init__(self, max_steps: int, *, is_prefix_only: bool) -> None:
        self.is_prefix_only = is_prefix_only
        self.steps_of_function: list[Step] = []
        self._max_steps = max_steps
        self._steps = 0
        self._own: dict[int, object] = {}  # containers that the program made
        self._shared: set[int] = set()  # those of them that it must not change

    def own(self, value: Value) -> Value:
        """`value`, a container that the program made and may change."""
        self._own[id(value)] = value
        return value

    def share(self, value: Value) -> Value:
        """`value`, a new container that the program may read but not change."""
        self._shared.add(id(value))
        return self.own(value)

    def may_change(self, value: object) -> bool:
        """Whether the program alone would see a change of `value`."""
        return id(value) in self._own and id(value) not in self._shared

    def can_change(self, value: object) -> bool:
        """Whether an expression that uses `value` may change it, or change the prompt with it."""
        return isinstance(value, (Host, LocalFunction)) or id(value) in self._own

    def holds_deferred(self, value: object) -> bool:
        """Whether `value` is deferred, or has a deferred value in it."""
        if isinstance(value, Deferred):
            return True
        if id(value) in self._own:
            parts: Value = value.values() if isinstance(value, dict) else value
            self._steps += len(parts)
            return any(map(self.holds_deferred, parts))
        return False

    def holds_function(self, value: object) -> bool:
        """Whether `value` is a function of the program, or has one in it."""
        if id(value) in self._own:
            parts: Value = value.values() if isinstance(value, dict) else value
            return any(map(self.holds_function, parts))
        return isinstance(value, LocalFunction)

    def snapshot(self, value: Value, at: At) -> Value:
        """`value` as it is now, for a run. Containers of the program become operations that make
        new ones."""
        if isinstance(value, Host):
            return value.as_value(at)
        if isinstance(value, LocalFunction):
            at.stop(
                f"{value.name} is not supported as a value that a run needs",
                f"define it outside of the traced function, or {RUN_IT}",
            )
        if id(value) not in self._own or type(value) not in _MAKERS:
            return value
        is_dict = isinstance(value, dict)
        parts = itertools.chain.from_iterable(value.items()) if is_dict else value
        return Deferred(_MAKERS[type(value)], tuple(self.snapshot(part, at) for part in parts))

    def defer(
        self,
        operation: str,
        args: Sequence[Value],
        at: At,
        kwargs: dict[str, Value] | None = None,
        name: str | None = None,
    ) -> Deferred:
        """`operation(*args, **kwargs)`, for a run to compute."""
        deferred = Deferred(
            operation,
            tuple(self.snapshot(arg, at) for arg in args),
            tuple((key, self.snapshot(arg, at)) for key, arg in (kwargs or {}).items()),
            name=name,
            node=at.node if isinstance(at.node, ast.expr) else None,
        )
        if deferred.may_fail:
            self.steps_of_function.append(deferred)
        return deferred

    def concatenate(self, pieces: Sequence[Piece], at: At) -> str | Deferred:
        """`pieces` as one string if all are strings, else deferred."""
        if all(isinstance(piece, str) for piece in pieces):
            return "".join(str(piece) for piece in pieces)
        return self.defer("concat", merged(pieces), at)

    def require_plain(self, value: Value, at: At) -> None:
        """Stop at a value whose own code an operation would run."""
        stack, seen = [value], set()
        while stack:
            part = stack.pop()
            if purity.is_plain_container(part):
                if id(part) not in seen:
                    seen.add(id(part))
                    self._steps += len(part)
                    stack.extend((*part.keys(), *part.values()) if isinstance(part, dict) else part)
            elif isinstance(part, Host):
                at.stop(f"{part.description} is no value", "read a variable with s['name']")
            elif not (
                purity.is_plain_scalar(part)
                or isinstance(part, (Expr, Deferred, types.FunctionType))
                or purity.pure_name(part) is not None
            ):
                at.stop(
                    f"it runs the code of {type_name(part)}, which may have side effects",
                    f"use its plain attributes, or {RUN_IT}",
                )

    def truth(self, value: Value, at: At) -> bool:
        """Whether `value` counts as true. Stops if that is unknown."""
        if isinstance(value, Deferred):
            at.decides_on(value)
        if purity.is_plain_scalar(value) or purity.is_plain_container(value):
            return bool(value)
        if isinstance(value, (Host, LocalFunction)):
            return True
        if hasattr(type(value), "__bool__") or hasattr(type(value), "__len__"):
            at.stop(f"it asks {type_name(value)} for its truth, which may have side effects")
        return True

    def iterate(self, value: Value, at: At) -> list[Value]:
        """The items of `value`, all at once. Stops if they are unknown."""
        if isinstance(value, Deferred):
            at.decides_on(value)
        if isinstance(value, Host):
            return value.iterate(at)
        if isinstance(value, enum.EnumMeta):
            return list(value.__members__.values())
        if type(value) in (str, bytes, range) or purity.is_plain_container(value):
            return list(itertools.islice(value, self._max_steps))
        if isinstance(value, (int, float, type(None))):
            at.fail(TypeError(f"{type(value).__name__!r} object is not iterable"))
        at.stop(f"iterating over {type_name(value)} may have side effects", "pass a list")
