"""Calls and attributes while a program is traced.

Owns which calls are allowed. Pure functions and methods (`purity.py`) are called, or deferred if an
argument is unknown; other functions are followed into their source. Any other call ends the trace.
"""

from __future__ import annotations

import collections
import enum
import inspect
import sys
import types
from abc import ABC, abstractmethod
from collections.abc import Sequence

from sgl_vllm.lang.ir import Value
from sgl_vllm.lang.tracing import purity
from sgl_vllm.lang.tracing.deferred import Deferred
from sgl_vllm.lang.tracing.frames import (
    RUN_IT,
    Args,
    At,
    Function,
    Host,
    Kwargs,
    LocalFunction,
    TraceError,
)
from sgl_vllm.lang.tracing.knowledge import Knowledge, type_name
from sgl_vllm.lang.tracing.operations import function_named, materialized

NOT_HANDLED = object()
CALL_IT_ELSEWHERE = (
    "call it with s += sgl.tool(...), or before the run and pass the result as an argument"
)

# Operations that do not look at the elements of a list, tuple or dict: these may be deferred.
_STRUCTURAL = {
    *(f"builtins.{name}" for name in ("enumerate", "len", "list", "reversed", "tuple", "zip")),
    *("add", "mul", ".copy", ".items", ".keys", ".values"),
}
_ITERATING = {f"builtins.{name}" for name in ("enumerate", "list", "sorted", "tuple", "zip")}
# They return pairs of such elements.
_PAIRING = {"builtins.enumerate", "builtins.zip", ".items"}
# They may return an element of an argument. Any other operation returns a new object.
_SELECTING = {"builtins.max", "builtins.min", "getitem", "statistics.mode"}
# Of methods that change a container: the leading arguments that must be known.
_NUM_KEYS = {"__setitem__": 1, "append": 0, "insert": 1, "setdefault": 1}

_PLAIN_LOOKUPS: tuple[Value, ...] = (
    object.__getattribute__,
    type.__getattribute__,
    *(kind.__getattribute__ for kind in (types.FunctionType, BaseException, tuple, str, int)),
)
_DESCRIPTORS_IN_C = {
    *(types.MemberDescriptorType, types.GetSetDescriptorType, types.MethodDescriptorType),
    *(types.WrapperDescriptorType, types.ClassMethodDescriptorType),
    type(vars(collections.namedtuple("_", "field"))["field"]),
}
_NAMED = (type, types.FunctionType, types.BuiltinFunctionType)
_MISSING = object()
_ONLY_KEYS = (
    "a function of the program, given to another, is supported only as the `key` of known values"
)


class Calls(Knowledge, ABC):
    """Calls pure functions, and follows others into their source.

    Functions of the package `home` are followed, and every function that gets a prompt.
    """

    def __init__(self, home: str, max_steps: int, *, is_prefix_only: bool) -> None:
        super().__init__(max_steps, is_prefix_only=is_prefix_only)
        self._home = home

    @abstractmethod
    def call_of_language(self, callee: Value, args: Args, kwargs: Kwargs, at: At) -> Value:
        """The result of calling `sgl.gen`, a program, and the like. NOT_HANDLED for others."""

    @abstractmethod
    def follow(self, function: Function, args: Args, kwargs: Kwargs, at: At) -> Value:
        """The result of a function, found by evaluating its source."""

    def call(self, callee: Value, args: Args, kwargs: Kwargs, at: At) -> Value:
        """The result of a call in the program."""
        answer = self.call_of_language(callee, args, kwargs, at)
        if answer is not NOT_HANDLED:
            return answer
        if isinstance(callee, LocalFunction):
            return self.follow(callee, args, kwargs, at)
        if isinstance(callee, types.MethodType):
            return self.call(callee.__func__, [callee.__self__, *args], kwargs, at)
        if (name := purity.pure_name(callee)) is not None:
            return self._call_listed(name, args, kwargs, at)
        if isinstance(callee, types.BuiltinMethodType) and not isinstance(
            callee.__self__, (types.ModuleType, type)
        ):
            return self.call_method(callee.__self__, callee.__name__, args, kwargs, at)
        if isinstance(callee, types.FunctionType) and (
            any(isinstance(value, Host) for value in (*args, *kwargs.values()))
            or (callee.__module__ or "").split(".")[0] == self._home
        ):
            return self.follow(callee, args, kwargs, at)
        if isinstance(callee, Deferred):
            at.stop(f"the called function is {callee.why()}, which is unknown")
        called = callee.__qualname__ if isinstance(callee, _NAMED) else type_name(callee)
        at.stop(
            f"calling {called} may have side effects, which tracing must not cause",
            CALL_IT_ELSEWHERE,
        )

    def _call_listed(self, name: str, args: Args, kwargs: Kwargs, at: At) -> Value:
        """The result of a pure function."""
        if name == "builtins.len" and len(args) == 1 and isinstance(args[0], Host):
            return args[0].length(at)
        if name in _ITERATING:
            args = [arg.iterate(at) if isinstance(arg, Host) else arg for arg in args]
        if _is_followed(kwargs.get("key")):
            return self._sorted(function_named(name), args, kwargs, at)
        return self.apply(name, args, at, kwargs)

    def apply(
        self, operation: str, args: Sequence[Value], at: At, kwargs: Kwargs | None = None
    ) -> Value:
        """`operation(*args, **kwargs)`: computed now if all of it is known, deferred otherwise."""
        kwargs = kwargs or {}
        given = (*args, *kwargs.values())
        is_structural = operation in _STRUCTURAL and not any(
            isinstance(value, Deferred) for value in given
        )
        if any(map(_is_followed, given)):
            at.stop(_ONLY_KEYS, CALL_IT_ELSEWHERE)
        if not is_structural and any(map(self.holds_deferred, given)):
            return self.defer(operation, args, at, kwargs)
        for value in given:
            if not (is_structural and purity.is_plain_container(value)):
                self.require_plain(value, at)
        result = self._result(function_named(operation), args, kwargs, at)
        is_new = operation not in _SELECTING and not any(result is value for value in given)
        if type(result) in purity.CONTAINERS and is_new:
            self.own(result)
            for pair in result if operation in _PAIRING else ():
                self.own(pair)
        return result

    def _result(self, function: Value, args: Sequence[Value], kwargs: Kwargs, at: At) -> Value:
        try:
            return materialized(function(*args, **kwargs), self._max_steps)
        except TraceError:
            raise
        except Exception as error:
            at.fail(error)

    def _sorted(self, function: Value, args: Args, kwargs: Kwargs, at: At) -> Value:
        """The result of `sorted`, `max` or `min` with a function of the program as `key`."""

        def key_of(item: Value) -> Value:
            result = self.call(kwargs["key"], [item], {}, at)
            if self.holds_deferred(result):
                at.stop(_ONLY_KEYS, CALL_IT_ELSEWHERE)
            self.require_plain(result, at)
            return result

        if any(map(self.holds_deferred, (*args, *kwargs.values()))):
            at.stop(_ONLY_KEYS, CALL_IT_ELSEWHERE)
        self.require_plain(args, at)
        result = self._result(function, args, {**kwargs, "key": key_of}, at)
        return self.own(result) if function is sorted else result

    # --- methods -------------------------------------------------------------------------------

    def call_method(self, owner: Value, name: str, args: Args, kwargs: Kwargs, at: At) -> Value:
        """The result of ``owner.name(...)``."""
        if isinstance(owner, Host):
            return owner.call(name, args, kwargs, at)
        if isinstance(owner, Deferred):
            if name not in purity.PURE_METHOD_NAMES:
                at.stop(f".{name}() of {owner.why()}, which is unknown, may have side effects")
            return self.apply(f".{name}", [owner, *args], at, kwargs)
        plain = None if isinstance(owner, type) else purity.method_owner(owner, name)
        if plain is None:
            return self.call(self.attribute(owner, name, at), args, kwargs, at)
        if purity.is_mutator(plain, name):
            return self._mutate(owner, name, args, kwargs, at)
        if plain is dict and name == "get" and args and not self.holds_deferred(args[0]):
            self.require_plain(args[0], at)
            return self._result(owner.get, args, kwargs, at)
        return self.apply(f".{name}", [owner, *args], at, kwargs)

    def _mutate(self, owner: Value, name: str, args: Args, kwargs: Kwargs, at: At) -> Value:
        """Call a method that changes `owner`, which must be a container of the program."""
        if not self.may_change(owner):
            at.stop(
                f"it changes {type_name(owner)} that the program did not make",
                f"make a copy first, or {RUN_IT}",
            )
        if name == "extend":
            args = [self.iterate(arg, at) for arg in args]
        elif name == "update" and type(owner) is dict:
            if any(type(arg) is not dict for arg in args):
                at.stop("it updates a dict from something that is no dict", "pass a dict")
            self.require_plain([key for arg in args for key in arg], at)
        else:
            keys = args[: _NUM_KEYS.get(name, len(args))]
            is_unknown = any(map(self.holds_deferred, keys))
            if is_unknown or (name in ("remove", "sort") and self.holds_deferred(owner)):
                at.stop("it compares values that only a run knows")
            self.require_plain(keys, at)
        if _is_followed(kwargs.get("key")):
            return self._sorted(getattr(owner, name), args, kwargs, at)
        return self._result(getattr(owner, name), args, kwargs, at)

    # --- attributes ----------------------------------------------------------------------------

    def attribute(self, owner: Value, name: str, at: At) -> Value:
        """An attribute, read without running a property or `__getattr__` of a foreign class."""
        if isinstance(owner, types.ModuleType):
            submodule = sys.modules.get(f"{owner.__name__}.{name}", _MISSING)
            found = vars(owner).get(name, submodule)
            if found is _MISSING:
                at.stop(f"module {owner.__name__} has no attribute {name} yet")
            return found
        if isinstance(owner, enum.EnumMeta) and name in owner.__members__:
            return owner.__members__[name]
        if isinstance(owner, enum.Enum) and name in ("name", "value"):
            return getattr(owner, f"_{name}_")
        if isinstance(owner, LocalFunction):
            at.stop("attributes of functions cannot be traced")
        lookup = type(owner).__getattribute__
        if lookup not in _PLAIN_LOOKUPS and not purity.is_plain_scalar(owner):
            at.stop(f"{type_name(owner)} runs its own code to read attributes")
        found = inspect.getattr_static(owner, name, _MISSING)
        if found is _MISSING:
            if hasattr(type(owner), "__getattr__"):
                at.stop(f"{type_name(owner)} runs its own code to make attribute {name}")
            at.fail(AttributeError(f"{type(owner).__name__!r} object has no attribute {name!r}"))
        is_class = isinstance(owner, type)
        if not is_class and getattr(owner, "__dict__", {}).get(name, _MISSING) is found:
            return found
        if type(found) in _DESCRIPTORS_IN_C:
            return getattr(owner, name)
        if isinstance(found, staticmethod):
            return found.__func__
        if isinstance(found, classmethod):
            return types.MethodType(found.__func__, owner if is_class else type(owner))
        if isinstance(found, types.FunctionType):
            return found if is_class else types.MethodType(found, owner)
        if isinstance(found, property) and not is_class:
            return self.call(found.fget, [owner], {}, at)
        if hasattr(type(found), "__get__"):
            at.stop(f"reading .{name} of {type_name(owner)} may have side effects")
        return found


def _is_followed(value: object) -> bool:
    """Whether it is a function of the program: one in Python that is not listed as pure."""
    kinds = (LocalFunction, types.MethodType, types.FunctionType)
    return isinstance(value, kinds) and purity.pure_name(value) is None
