"""Evaluates the source of a program over known and deferred values; executes no side effect.

Owns the meaning of Python's statements and expressions while a program is traced. Knows no prompt:
the objects that stand for prompts are `Host`s, which `trace.py` makes. The function itself is
never called. What is called is in `purity.py`; anything else ends the evaluation with `TraceError`.
"""

from __future__ import annotations
import __future__

import ast
import builtins
import enum
import functools
import inspect
import itertools
import operator
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

from sgl_vllm.lang import purity
from sgl_vllm.lang.deferred import (
    Argument,
    Deferred,
    Element,
    Environment,
    Leaf,
    Piece,
    Reading,
    Template,
    concatenation,
    lazily,
    lifted,
    pieces_of,
    template_of,
)
from sgl_vllm.lang.ir import Expr

if TYPE_CHECKING:
    from sgl_vllm.lang.graph import Graph

MAX_STEPS = 500_000
"""Expressions that are evaluated at most: about two seconds."""
MAX_DEPTH = 24
"""Functions within functions that are followed at most."""

_RUN_IT = "or run the program as it is, without compiling"


_VIEWS: tuple[type, ...] = (type({}.keys()), type({}.values()), type({}.items()))


class TraceError(Exception):
    """A program cannot be traced further than to one place, which the message names.

    `filename`, `line` and `expression` are that place. `graph` is what was traced before it, None
    where nothing could be. Nothing from that place on was executed.
    """

    def __init__(
        self, reason: str, advice: str, filename: str = "", line: int = 0, expression: str = ""
    ) -> None:
        place = f"{filename}:{line}: " if filename else ""
        shown = f"`{expression}`: " if expression else ""
        super().__init__(f"{place}{shown}{reason}" + (f" ({advice})" if advice else ""))
        self.reason = reason
        self.filename = filename
        self.line = line
        self.expression = expression
        self.graph: Graph | None = None


class Raised(Exception):
    """The program itself raises `error` at this place; its own try statement may catch it."""

    def __init__(self, error: BaseException, node: ast.AST, frame: Frame) -> None:
        super().__init__(str(error))
        self.error = error
        self.node = node
        self.frame = frame


class _Unknown(Exception):
    """What a function that was handed to a pure one gives is not known."""


class _Return(Exception):
    def __init__(self, value: Any) -> None:
        self.value = value


class _Break(Exception):
    pass


class _Continue(Exception):
    pass


@dataclass(frozen=True)
class At:
    """A place in a program."""

    evaluator: Evaluator
    node: ast.expr | ast.stmt
    frame: Frame

    @property
    def line(self) -> int:
        return self.node.lineno

    def stop(self, reason: str, advice: str = _RUN_IT) -> NoReturn:
        """End the trace here."""
        self.evaluator.stop(self.node, self.frame, reason, advice)

    def decides_on(self, value: Deferred) -> NoReturn:
        """End the trace: which operations come next depends on `value`."""
        self.evaluator.decides_on(self.node, self.frame, value)

    def fail(self, error: Exception) -> NoReturn:
        """The program raises `error` here."""
        raise Raised(error, self.node, self.frame)


class Host:
    """An object of the language that stands for itself during evaluation; refuses what it lacks."""

    description = "this object"

    def attribute(self, name: str, at: At) -> Any:
        at.stop(f"{self.description} has no attribute {name!r} that can be traced")

    def call(self, name: str, args: list[Any], kwargs: dict[str, Any], at: At) -> Any:
        at.stop(f"{name}() of {self.description} cannot be traced")

    def item(self, key: Any, at: At) -> Any:
        at.stop(f"{self.description} has no items")

    def set_item(self, key: Any, value: Any, at: At) -> None:
        at.stop(f"{self.description} takes no items")

    def contains(self, key: Any, at: At) -> bool:
        at.stop(f"`in` means nothing for {self.description}")

    def append(self, value: Any, at: At) -> None:
        at.stop(f"{self.description} cannot be appended to")

    def iterate(self, at: At) -> list[Any]:
        at.stop(f"{self.description} cannot be iterated over")

    def length(self, at: At) -> int:
        at.stop(f"{self.description} has no length")

    def enter(self, at: At) -> Any:
        at.stop(f"{self.description} cannot be used in a with statement")

    def exit(self, at: At) -> None:
        raise NotImplementedError

    def deferred(self) -> Deferred:
        """What stands for it in the returned value."""
        raise TypeError(f"{self.description} cannot be returned")


@dataclass(eq=False)
class Frame:
    """The names of one function while it is followed."""

    name: str
    filename: str
    globals: Mapping[str, Any]
    locals: dict[str, Any] = field(default_factory=dict)
    outer: Frame | None = None
    closure: Mapping[str, Any] = field(default_factory=dict)
    foreign: set[str] = field(default_factory=set)
    nonlocals: set[str] = field(default_factory=set)

    def lookup(self, name: str) -> Any:
        frame: Frame | None = self
        while frame is not None:
            if name in frame.locals:
                return frame.locals[name]
            if name in frame.closure:
                return frame.closure[name]
            frame = frame.outer
        if name in self.globals:
            return self.globals[name]
        if hasattr(builtins, name):
            return getattr(builtins, name)
        raise NameError(f"name {name!r} is not defined")

    def owner_of(self, name: str) -> Frame | None:
        """The followed function whose local `name` a nonlocal statement means."""
        frame = self.outer
        while frame is not None and name not in frame.locals:
            frame = frame.outer
        return frame


@dataclass(frozen=True, eq=False)
class LocalFunction:
    """A def or lambda that the followed code itself made."""

    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
    frame: Frame
    defaults: tuple[Any, ...]
    keyword_defaults: Mapping[str, Any]

    @property
    def name(self) -> str:
        return "<lambda>" if isinstance(self.node, ast.Lambda) else self.node.name


@dataclass(frozen=True, eq=False)
class _Bound:
    """A method that was read but not called yet."""

    function: Any
    owner: Any


Hook: TypeAlias = Callable[[Any, list[Any], dict[str, Any], At], Any]
NOT_HANDLED = object()


class Evaluator:
    """Follows functions. `hook` gets every call first, and may answer NOT_HANDLED.

    `home` is the package whose functions are followed into, beside those that are given a prompt.
    """

    def __init__(self, hook: Hook, home: str, max_steps: int = MAX_STEPS) -> None:
        self._hook = hook
        self._home = home
        self._max_steps = max_steps
        self._steps = 0
        self._depth = 0
        self._uncertain = 0  # how many undecided conditions what is evaluated now depends on
        self._num_deferred = 0
        self._own: dict[int, object] = {}  # lists, dicts, sets and tuples that the program made
        self._shared: set[int] = set()  # those of them that it must not change

    # --- what ends a trace -----------------------------------------------------------------------

    def stop(self, node: ast.AST, frame: Frame, reason: str, advice: str = _RUN_IT) -> NoReturn:
        raise TraceError(
            reason, advice, frame.filename, getattr(node, "lineno", 0), _shown(ast.unparse(node))
        )

    def decides_on(self, node: ast.AST, frame: Frame, value: Deferred) -> NoReturn:
        arguments = sorted(leaf.name for leaf in value.leaves if isinstance(leaf, Argument))
        advice = _RUN_IT
        if arguments and not any(isinstance(leaf, Reading) for leaf in value.leaves):
            given = ", ".join(f"{name}=..." for name in arguments)
            advice = f"give it when compiling, compile({given}), {_RUN_IT}"
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
            if isinstance(part, _Bound):
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
        with self._undecided():
            body = self._follow_local(function, [Deferred(None, leaf=e) for e in elements], {}, at)
        call = functools.partial(_function_of, elements)
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
                f"it runs the code of {_type_name(part)}, which may have side effects",
                f"use its plain attributes, {_RUN_IT}",
            )

    def truth(self, value: Any, at: At) -> bool:
        """Whether `value` counts as true; stops where that is not known."""
        if isinstance(value, Deferred):
            at.decides_on(value)
        if isinstance(value, (Host, LocalFunction, _Bound)):
            return True
        kind = type(value)
        if purity.is_plain_scalar(value) or purity.is_plain_container(value):
            return bool(value)
        if hasattr(kind, "__bool__") or hasattr(kind, "__len__"):
            at.stop(f"it asks {_type_name(value)} for its truth, which may have side effects")
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
        if type(value) in _VIEWS:
            return list(value)
        if isinstance(value, (int, float, type(None))):
            at.fail(TypeError(f"{type(value).__name__!r} object is not iterable"))
        at.stop(f"iterating over {_type_name(value)} may have side effects", "pass a list")

    def unpacked(self, value: Any, count: int, at: At) -> list[Any]:
        """`value` as exactly `count` items."""
        if isinstance(value, Deferred):
            return [self.defer(_item_of, (value, i, count), {}, at) for i in range(count)]
        items = self.iterate(value, at)
        if len(items) != count:
            at.fail(ValueError(f"{len(items)} values to unpack into {count} names"))
        return items

    # --- calls -----------------------------------------------------------------------------------

    def call(self, callee: Any, args: list[Any], kwargs: dict[str, Any], at: At) -> Any:
        """What the program's call gives."""
        answer = self._hook(callee, args, kwargs, at)
        if answer is not NOT_HANDLED:
            return answer
        if isinstance(callee, LocalFunction):
            return self._follow_local(callee, args, kwargs, at)
        if isinstance(callee, _Bound):
            return self.call(callee.function, [callee.owner, *args], kwargs, at)
        if isinstance(callee, types.MethodType):
            return self.call(callee.__func__, [callee.__self__, *args], kwargs, at)
        if isinstance(callee, types.BuiltinMethodType) and not isinstance(
            callee.__self__, (types.ModuleType, type)
        ):
            return self.call_method(callee.__self__, callee.__name__, args, kwargs, at)
        if type(callee) is functools.partial:
            given = {**callee.keywords, **kwargs}
            return self.call(callee.func, [*callee.args, *args], given, at)
        if isinstance(callee, functools._lru_cache_wrapper):
            return self.call(callee.__wrapped__, args, kwargs, at)
        if isinstance(callee, Deferred):
            at.stop(f"the function called is {callee.why()}, which is not known")
        if purity.is_pure_function(callee):
            return self._call_pure(callee, args, kwargs, at)
        if type(callee) is operator.itemgetter and len(args) == 1 and not kwargs:
            if self.holds_deferred(args[0]):
                return self.defer(callee, args, kwargs, at)
            return self._native(callee, args, kwargs, at)
        if isinstance(callee, type):
            if _is_made_plainly(callee):
                return self._native(callee, args, kwargs, at)
            at.stop(
                f"making {callee.__qualname__} objects may have side effects",
                f"make it outside and pass it as an argument, {_RUN_IT}",
            )
        if isinstance(callee, types.FunctionType) and self._may_follow(callee, args, kwargs):
            return self._follow(callee, args, kwargs, at)
        at.stop(
            f"calling {_callable_name(callee)} may have side effects, and tracing executes none",
            "call it inside of the prompt with s += sgl.tool(...), or before, and pass the result "
            "as an argument",
        )

    def _may_follow(
        self, function: types.FunctionType, args: list[Any], kwargs: dict[str, Any]
    ) -> bool:
        if any(isinstance(value, Host) for value in (*args, *kwargs.values())):
            return True
        return (function.__module__ or "").split(".")[0] == self._home

    def call_method(
        self, owner: Any, name: str, args: list[Any], kwargs: dict[str, Any], at: At
    ) -> Any:
        if isinstance(owner, Host):
            return owner.call(name, args, kwargs, at)
        if isinstance(owner, Deferred):
            if name not in purity.PURE_METHOD_NAMES:
                at.stop(f".{name}() of {owner.why()}, which is not known, may have side effects")
            return self.defer(purity.call_pure_method(name), [owner, *args], kwargs, at)
        plain = None if isinstance(owner, type) else purity.method_owner(owner, name)
        if plain is None:
            return self.call(self.static_attribute(owner, name, at), args, kwargs, at)
        if purity.is_mutator(plain, name):
            self.certain(at)
            if not self.may_change(owner):
                at.stop(
                    f"it changes a {plain.__name__} from outside of the program",
                    f"make a copy first, {_RUN_IT}",
                )
            if name in ("extend", "update") and any(isinstance(a, Deferred) for a in args):
                at.decides_on(next(a for a in args if isinstance(a, Deferred)))
        method = getattr(owner, name)
        if plain is str and name == "join" and args:
            args = [self.own(self.iterate(args[0], at))] if not _is_known_text(args[0]) else args
        if (plain, name) in purity.STRUCTURAL_METHODS:
            iterated = args if name in ("extend", "update") else []
            keys = args[:1] if name in ("get", "pop", "setdefault", "insert") else []
            if any(map(self.holds_deferred, keys)):
                if purity.is_mutator(plain, name):
                    at.stop("it is not known which item is meant")
                return self.defer(purity.call_pure_method(name), [owner, *args], kwargs, at)
            self.require_plain(keys, at)
            is_new = name in ("copy", "items", "keys", "values")
            return self._structural(method, args, kwargs, at, iterated=iterated, is_new=is_new)
        if self.holds_deferred(owner) or self._any_deferred(args, kwargs):
            if purity.is_mutator(plain, name):
                at.stop("it compares values that are not known")
            head = ""
            if plain is str and name == "join" and isinstance(args[0], list) and args[0]:
                head = args[0][0] if isinstance(args[0][0], str) else ""
                head = head or getattr(args[0][0], "head", "")
            return self.defer(purity.call_pure_method(name), [owner, *args], kwargs, at, head=head)
        if purity.is_mutator(plain, name):
            return self._native(method, args, kwargs, at, may_wait=False)
        return self._native(method, args, kwargs, at, is_new=plain in (str, bytes))

    def _any_deferred(self, args: list[Any], kwargs: dict[str, Any]) -> bool:
        return any(map(self.holds_deferred, args)) or any(map(self.holds_deferred, kwargs.values()))

    def _call_pure(self, function: Any, args: list[Any], kwargs: dict[str, Any], at: At) -> Any:
        if function is map and len(args) > 1 and not kwargs:
            columns = [self.iterate(arg, at) for arg in args[1:]]
            return self.own(
                [self.call(args[0], list(row), {}, at) for row in zip(*columns, strict=False)]
            )
        if function is filter and len(args) == 2:
            keep = args[0] if args[0] is not None else bool
            items = self.iterate(args[1], at)
            return self.own([i for i in items if self.truth(self.call(keep, [i], {}, at), at)])
        if function is len and len(args) == 1 and isinstance(args[0], Host):
            return args[0].length(at)
        if function is type and len(args) != 1:
            at.stop("making a class may run code of its bases")
        if (function is isinstance or function is issubclass) and not self._any_deferred(
            args, kwargs
        ):
            if len(args) != 2 or kwargs or not purity.is_plain_class(args[1]):
                at.stop("the class may have code of its own for this")
            try:
                return function(*args)
            except TypeError as error:
                at.fail(error)
        if function is type and not self._any_deferred(args, kwargs):
            return type(args[0])
        is_structural = any(function is known for known in purity.STRUCTURAL_FUNCTIONS)
        if is_structural and not any(isinstance(arg, Deferred) for arg in args):
            args = [arg.iterate(at) if isinstance(arg, Host) else arg for arg in args]
            is_iterating = function is not range
            return self._structural(
                function,
                args,
                kwargs,
                at,
                iterated=args if is_iterating else (),
                is_new=is_iterating,
            )
        if self._any_deferred(args, kwargs):
            return self.defer(_eager(function), args, kwargs, at)
        return self._native(function, args, kwargs, at, is_new=purity.returns_new_object(function))

    def _structural(
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
        for value in iterated:
            if not purity.is_plain_container(value) and not purity.is_plain_scalar(value):
                self.iterate(value, at)  # stops if that is not plain data
        try:
            result = function(*args, **kwargs)
        except Exception as error:
            at.fail(error)
        if hasattr(result, "__next__") or type(result) in _VIEWS:
            result = list(result)
        if is_new and type(result) in purity.CONTAINERS:
            self.own(result)
            for item in result if isinstance(result, list) else ():
                if type(item) is tuple:
                    self.own(item)
        return result

    def _native(
        self,
        function: Any,
        args: list[Any],
        kwargs: dict[str, Any],
        at: At,
        *,
        is_new: bool = False,
        may_wait: bool = True,
    ) -> Any:
        """Call a pure function on known values; or defer it, if a function that it is given makes
        something of them that is not known."""
        for value in (*args, *kwargs.values()):
            if not isinstance(value, (LocalFunction, _Bound)):
                self.require_plain(value, at)
        known_args = [self._as_callable(arg, at) for arg in args]
        known_kwargs = {name: self._as_callable(arg, at) for name, arg in kwargs.items()}
        try:
            result = function(*known_args, **known_kwargs)
            if hasattr(result, "__next__"):
                result, is_new = list(itertools.islice(result, self._max_steps)), True
        except (TraceError, Raised):
            raise
        except _Unknown:
            if not may_wait:
                at.stop("it compares values that are not known")
            return self.defer(_eager(function), args, kwargs, at)
        except Exception as error:
            at.fail(error)
        if is_new and type(result) in purity.CONTAINERS:
            self.own(result)
        return result

    def _as_callable(self, value: Any, at: At) -> Any:
        """A function of the program, to be handed to a pure one such as `sorted`."""
        is_followed = isinstance(value, (LocalFunction, _Bound, types.FunctionType))
        if not is_followed or purity.is_pure_function(value):
            return value

        def call(*args: Any) -> Any:
            result = self.call(value, list(args), {}, at)
            if self.holds_deferred(result):
                raise _Unknown
            return result

        return call

    # --- following functions ---------------------------------------------------------------------

    def follow_program(self, function: Any, arguments: Mapping[str, Any]) -> Any:
        """What the program's function returns, given all its arguments by name."""
        node, frame = self._frame_of(function)
        frame.locals.update(arguments)
        return self._body(node, frame)

    def _frame_of(self, function: types.FunctionType) -> tuple[Any, Frame]:
        node = definition_of(function.__code__)
        closure: dict[str, Any] = {}
        cells = function.__closure__ or ()
        for name, cell in zip(function.__code__.co_freevars, cells, strict=True):
            try:
                closure[name] = cell.cell_contents
            except ValueError:
                continue
        return node, Frame(
            function.__qualname__,
            function.__code__.co_filename,
            function.__globals__,
            closure=closure,
        )

    def _follow(
        self, function: types.FunctionType, args: list[Any], kwargs: dict[str, Any], at: At
    ) -> Any:
        try:
            node, frame = self._frame_of(function)
        except TraceError as error:
            at.stop(error.reason)
        self._bind(
            node.args,
            function.__defaults__ or (),
            function.__kwdefaults__ or {},
            args,
            kwargs,
            frame,
            at,
        )
        return self._nested(node, frame, at)

    def _follow_local(
        self, function: LocalFunction, args: list[Any], kwargs: dict[str, Any], at: At
    ) -> Any:
        outer = function.frame
        frame = Frame(function.name, outer.filename, outer.globals, outer=outer)
        node = function.node
        self._bind(node.args, function.defaults, function.keyword_defaults, args, kwargs, frame, at)
        return self._nested(node, frame, at)

    def _nested(self, node: Any, frame: Frame, at: At) -> Any:
        if self._depth >= MAX_DEPTH:
            at.stop(f"functions call each other more than {MAX_DEPTH} deep")
        self._depth += 1
        try:
            return self._body(node, frame)
        except TraceError as error:
            if error.filename and (frame.filename, frame.name) != (
                at.frame.filename,
                at.frame.name,
            ):
                error.add_note(f"reached from {at.frame.filename}:{at.line}")
            raise
        finally:
            self._depth -= 1

    def _body(self, node: Any, frame: Frame) -> Any:
        if isinstance(node, ast.Lambda):
            return self.evaluate(node.body, frame)
        for statement in node.body:
            if any(isinstance(part, (ast.Yield, ast.YieldFrom)) for part in _own_parts(statement)):
                self.stop(statement, frame, "generators are not followed", "return a list instead")
        try:
            self.run(node.body, frame)
        except _Return as returned:
            return returned.value
        return None

    def _bind(
        self,
        signature: ast.arguments,
        defaults: Sequence[Any],
        keyword_defaults: Mapping[str, Any],
        args: list[Any],
        kwargs: dict[str, Any],
        frame: Frame,
        at: At,
    ) -> None:
        positional = [a.arg for a in (*signature.posonlyargs, *signature.args)]
        first_default = len(positional) - len(defaults)
        given = dict(kwargs)
        names = frame.locals
        for i, name in enumerate(positional):
            is_positional_only = i < len(signature.posonlyargs)
            if i < len(args):
                if name in given and not is_positional_only:
                    at.fail(TypeError(f"{frame.name}() got multiple values for argument {name!r}"))
                names[name] = args[i]
            elif name in given and not is_positional_only:
                names[name] = given.pop(name)
            elif i >= first_default:
                names[name] = defaults[i - first_default]
            else:
                at.fail(TypeError(f"{frame.name}() missing the argument {name!r}"))
        rest = args[len(positional) :]
        if signature.vararg is not None:
            names[signature.vararg.arg] = self.own(tuple(rest))
        elif rest:
            at.fail(TypeError(f"{frame.name}() takes {len(positional)} positional arguments"))
        for argument in signature.kwonlyargs:
            if argument.arg in given:
                names[argument.arg] = given.pop(argument.arg)
            elif argument.arg in keyword_defaults:
                names[argument.arg] = keyword_defaults[argument.arg]
            else:
                at.fail(TypeError(f"{frame.name}() missing the argument {argument.arg!r}"))
        if signature.kwarg is not None:
            names[signature.kwarg.arg] = self.own(given)
        elif given:
            at.fail(TypeError(f"{frame.name}() got an unexpected argument {next(iter(given))!r}"))

    # --- attributes ------------------------------------------------------------------------------

    def static_attribute(self, owner: Any, name: str, at: At) -> Any:
        """An attribute, read without running a property or `__getattr__` of anybody's."""
        if isinstance(owner, (LocalFunction, _Bound)):
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
        if type(owner).__getattribute__ not in _PLAIN_LOOKUPS:
            at.stop(f"{_type_name(owner)} has code of its own for reading attributes")
        missing = object()
        found = inspect.getattr_static(owner, name, missing)
        if found is missing:
            if hasattr(type(owner), "__getattr__"):
                at.stop(f"{_type_name(owner)} makes its attribute {name} when it is asked for")
            at.fail(AttributeError(f"{type(owner).__name__!r} object has no attribute {name!r}"))
        if not isinstance(owner, type) and name in getattr(owner, "__dict__", ()):
            return owner.__dict__[name]
        if isinstance(found, staticmethod):
            return found.__func__
        if isinstance(found, classmethod):
            kind = owner if isinstance(owner, type) else type(owner)
            if purity.is_pure_function(getattr(kind, name)):
                return getattr(kind, name)
            return _Bound(found.__func__, kind)
        if isinstance(found, types.ClassMethodDescriptorType):
            return getattr(owner, name)
        if isinstance(owner, type):
            return found if not isinstance(found, property) else at.stop("a property of a class")
        if isinstance(found, types.FunctionType):
            return _Bound(found, owner)
        if isinstance(found, property):
            return self.call(found.fget, [owner], {}, at)
        if isinstance(found, (types.MemberDescriptorType, types.GetSetDescriptorType)) or (
            type(found).__name__ == "_tuplegetter"
        ):
            return getattr(owner, name)
        if isinstance(found, (types.MethodDescriptorType, types.WrapperDescriptorType)):
            return _Bound(found, owner)
        if hasattr(type(found), "__get__"):
            at.stop(f"reading .{name} of {_type_name(owner)} may have side effects")
        return found

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
            return self.defer(functools.partial(_chained, kind), lists, {}, at)
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
                at.stop(f"unpacking {_type_name(more)} may have side effects", "pass a dict")
            pairs += more.items()
        return self._make_dict(pairs, at)

    def _make_dict(self, pairs: list[tuple[Any, Any]], at: At) -> Any:
        keys = self.own([key for key, _ in pairs])
        if self.holds_deferred(keys):
            values = self.own([value for _, value in pairs])
            return self.defer(_dict_of, [keys, values], {}, at)
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
        with self._undecided():
            self.assign(first.target, Deferred(None, leaf=item), scope)
            tests = [self.evaluate(test, scope) for test in first.ifs]
            body = element(scope)
        if _has_variable(body):
            at.decides_on(iterated)
        comprehended = functools.partial(_comprehended, item)
        return self._bind_lazily(comprehended, [iterated, body, *tests], frozenset((item,)), at)

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
            return self.defer(_formatted, [value, node.conversion, spec], {}, place)
        self.require_plain(value, at)
        try:
            return _formatted(value, node.conversion, spec)
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
            at.stop(
                f"{_type_name(owner)}[...] may have side effects", f"pass plain data, {_RUN_IT}"
            )

    def _eval_Slice(self, node: ast.Slice, frame: Frame, at: At) -> Any:
        bounds = [b and self.evaluate(b, frame) for b in (node.lower, node.upper, node.step)]
        return slice(*bounds)

    def _eval_UnaryOp(self, node: ast.UnaryOp, frame: Frame, at: At) -> Any:
        value = self.evaluate(node.operand, frame)
        function = _UNARY[type(node.op)]
        if self.holds_deferred(value) and not isinstance(node.op, ast.Not):
            return self.defer(function, [value], {}, at)
        if isinstance(node.op, ast.Not):
            if isinstance(value, Deferred):
                return self.defer(operator.not_, [value], {}, at)
            return not self.truth(value, at)
        return self._native(function, [value], {}, at)

    def _eval_BinOp(self, node: ast.BinOp, frame: Frame, at: At) -> Any:
        left = self.evaluate(node.left, frame)
        right = self.evaluate(node.right, frame)
        return self.binary(type(node.op), left, right, at)

    def binary(self, kind: type[ast.operator], left: Any, right: Any, at: At) -> Any:
        for side in (left, right):
            if isinstance(side, Host):
                at.stop(f"{side.description} is no value", 'append with s += ..., read with s["x"]')
        function = _BINARY[kind]
        is_deferred = isinstance(left, Deferred) or isinstance(right, Deferred)
        if kind is ast.Add and is_deferred and (_is_text(left) or _is_text(right)):
            if all(isinstance(side, (str, Expr, Deferred)) for side in (left, right)):
                return self.concatenate([*_pieces(left), *_pieces(right)], at)
            at.fail(TypeError(f"cannot add {type(left).__name__} and {type(right).__name__}"))
        if is_deferred:
            return self.defer(function, [left, right], {}, at)
        if kind in (ast.Add, ast.Mult) and type(left) in (list, tuple):
            sides = [left, right]
            return self._structural(function, sides, {}, at, iterated=sides, is_new=True)
        if kind is ast.Add and isinstance(left, (Expr, str)) and isinstance(right, (Expr, str)):
            return left + right
        if self.holds_deferred(left) or self.holds_deferred(right):
            return self.defer(function, [left, right], {}, at)
        return self._native(function, [left, right], {}, at, is_new=True)

    def _eval_BoolOp(self, node: ast.BoolOp, frame: Frame, at: At) -> Any:
        is_and = isinstance(node.op, ast.And)
        for position, operand in enumerate(node.values):
            value = self.evaluate(operand, frame)
            is_last = position == len(node.values) - 1
            if isinstance(value, Deferred) and not is_last:
                with self._undecided():
                    rest = [self.evaluate(later, frame) for later in node.values[position + 1 :]]
                return self.defer_lazily(_all_of if is_and else _any_of, [value, *rest], at)
            if is_last or self.truth(value, At(self, operand, frame)) is not is_and:
                return value
        raise AssertionError("a boolean operation has operands")

    @contextmanager
    def _undecided(self) -> Iterator[None]:
        self._uncertain += 1
        try:
            yield
        except Raised as raised:
            reason = f"it raises {type(raised.error).__name__} if the program gets here"
            self.stop(raised.node, raised.frame, reason)
        finally:
            self._uncertain -= 1

    def _eval_IfExp(self, node: ast.IfExp, frame: Frame, at: At) -> Any:
        test = self.evaluate(node.test, frame)
        if not isinstance(test, Deferred):
            is_true = self.truth(test, At(self, node.test, frame))
            return self.evaluate(node.body if is_true else node.orelse, frame)
        with self._undecided():
            either = [self.evaluate(branch, frame) for branch in (node.body, node.orelse)]
        if any(_has_variable(value) for value in either):
            at.decides_on(test)
        return self.defer_lazily(_chosen, [test, *either], at)

    def _eval_Compare(self, node: ast.Compare, frame: Frame, at: At) -> Any:
        left = self.evaluate(node.left, frame)
        result: Any = True
        for position, (op, operand) in enumerate(zip(node.ops, node.comparators, strict=True)):
            right = self.evaluate(operand, frame)
            result = self._compare(type(op), left, right, at)
            if isinstance(result, Deferred) and position < len(node.ops) - 1:
                with self._undecided():
                    rest = [self.evaluate(later, frame) for later in node.comparators[position:]]
                functions = [_COMPARE[type(o)] for o in node.ops[position:]]
                compared = functools.partial(_compared, functions)
                return self.defer_lazily(compared, [left, *rest], at)
            if position < len(node.ops) - 1 and not self.truth(result, at):
                return result
            left = right
        return result

    def _compare(self, kind: type[ast.cmpop], left: Any, right: Any, at: At) -> Any:
        function = _COMPARE[kind]
        if kind in (ast.In, ast.NotIn) and isinstance(right, Host):
            found = right.contains(left, at)
            return found if kind is ast.In else not found
        if kind in (ast.Is, ast.IsNot):
            if isinstance(left, Deferred) or isinstance(right, Deferred):
                return self.defer(function, [left, right], {}, at)
            return function(left, right)
        if self.holds_deferred(left) or self.holds_deferred(right):
            return self.defer(function, [left, right], {}, at)
        if kind in (ast.Eq, ast.NotEq) and _has_identity_only(left) and _has_identity_only(right):
            return function(left, right)
        if kind in (ast.In, ast.NotIn) and isinstance(right, enum.EnumMeta):
            right = list(right)
        return self._native(function, [left, right], {}, at)

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
                at.stop(f"** of {_type_name(value)} may have side effects", "pass a dict")
        if is_method:
            assert isinstance(node.func, ast.Attribute)
            return self.call_method(owner, node.func.attr, args, kwargs, at)
        return self.call(owner, args, kwargs, at)

    def _eval_Starred(self, node: ast.Starred, frame: Frame, at: At) -> Any:
        at.stop("a starred expression cannot be used here")

    # --- statements ------------------------------------------------------------------------------

    def run(self, statements: Sequence[ast.stmt], frame: Frame) -> None:
        """Follow statements one after the other."""
        for statement in statements:
            self._steps += 1
            method = getattr(self, f"_run_{type(statement).__name__}", None)
            if method is None:
                kind = type(statement).__name__.lower()
                self.stop(statement, frame, f"{kind} statements are not followed")
            method(statement, frame, At(self, statement, frame))

    def _run_Expr(self, node: ast.Expr, frame: Frame, at: At) -> None:
        self.evaluate(node.value, frame)

    def _run_Pass(self, node: ast.Pass, frame: Frame, at: At) -> None:
        pass

    def _run_Return(self, node: ast.Return, frame: Frame, at: At) -> None:
        raise _Return(None if node.value is None else self.evaluate(node.value, frame))

    def _run_Break(self, node: ast.Break, frame: Frame, at: At) -> None:
        raise _Break

    def _run_Continue(self, node: ast.Continue, frame: Frame, at: At) -> None:
        raise _Continue

    def _run_Assign(self, node: ast.Assign, frame: Frame, at: At) -> None:
        value = self.evaluate(node.value, frame)
        for target in node.targets:
            self.assign(target, value, frame)

    def _run_AnnAssign(self, node: ast.AnnAssign, frame: Frame, at: At) -> None:
        if node.value is not None:
            self.assign(node.target, self.evaluate(node.value, frame), frame)

    def _run_AugAssign(self, node: ast.AugAssign, frame: Frame, at: At) -> None:
        owner = key = None
        if isinstance(node.target, ast.Name):
            old = self._eval_Name(node.target, frame, at)
        elif isinstance(node.target, ast.Subscript):
            owner = self.evaluate(node.target.value, frame)
            key = self.evaluate(node.target.slice, frame)
            old = self._item(owner, key, at)
        else:
            old = self._eval_Attribute(node.target, frame, at)
        value = self.evaluate(node.value, frame)
        if isinstance(old, Host):
            self.certain(at)
            if not isinstance(node.op, ast.Add):
                at.stop("a prompt is only appended to, with +=")
            old.append(value, at)
            return
        if isinstance(node.target, ast.Attribute):
            at.stop("assigning an attribute is a side effect")
        if type(old) in (list, dict, set) and self.may_change(old):
            self._change_in_place(node, old, value, at)
            return
        if type(old) in (list, dict, set):
            at.stop(f"it changes a {type(old).__name__} from outside of the program")
        new = self.binary(type(node.op), old, value, at)
        if owner is not None:
            self._set_item(owner, key, new, at)
        else:
            self.assign(node.target, new, frame)

    def _change_in_place(self, node: ast.AugAssign, old: Any, value: Any, at: At) -> None:
        names: dict[tuple[type, type], str] = {
            (list, ast.Add): "extend",
            (dict, ast.BitOr): "update",
            (set, ast.BitOr): "update",
            (set, ast.BitAnd): "intersection_update",
            (set, ast.Sub): "difference_update",
        }
        name = names.get((type(old), type(node.op)))
        if name is None:
            at.stop("this augmented assignment is not followed")
        self.call_method(old, name, [value], {}, at)

    def assign(self, target: ast.expr, value: Any, frame: Frame) -> None:
        """Give a target its value."""
        at = At(self, target, frame)
        if isinstance(target, ast.Name):
            if target.id in frame.foreign:
                at.stop(
                    f"assigning the global {target.id} is a side effect",
                    "return the value instead",
                )
            home = frame.owner_of(target.id) if target.id in frame.nonlocals else frame
            if home is None:
                at.stop(f"assigning the outer {target.id} is a side effect", "return the value")
            home.locals[target.id] = value
        elif isinstance(target, (ast.Tuple, ast.List)):
            self._assign_items(target.elts, value, frame, at)
        elif isinstance(target, ast.Subscript):
            owner = self.evaluate(target.value, frame)
            self._set_item(owner, self.evaluate(target.slice, frame), value, at)
        else:
            at.stop("assigning an attribute is a side effect", f"use a variable, {_RUN_IT}")

    def _assign_items(self, targets: list[ast.expr], value: Any, frame: Frame, at: At) -> None:
        star = next((i for i, t in enumerate(targets) if isinstance(t, ast.Starred)), None)
        if star is None:
            items = self.unpacked(value, len(targets), at)
        else:
            given = self.iterate(value, at)
            after = len(targets) - star - 1
            if len(given) < len(targets) - 1:
                at.fail(ValueError("not enough values to unpack"))
            middle = self.own(given[star : len(given) - after])
            items = [*given[:star], middle, *given[len(given) - after :]]
        for target, item in zip(targets, items, strict=True):
            self.assign(target.value if isinstance(target, ast.Starred) else target, item, frame)

    def _set_item(self, owner: Any, key: Any, value: Any, at: At) -> None:
        self.certain(at)
        if isinstance(owner, Host):
            owner.set_item(key, value, at)
            return
        if type(owner) not in (list, dict) or not self.may_change(owner):
            at.stop(
                f"it changes {_type_name(owner)} from outside of the program",
                f"make a copy first, {_RUN_IT}",
            )
        if self.holds_deferred(key):
            at.stop("it is not known which item is assigned")
        self.require_plain(key, at)
        try:
            owner[key] = value
        except Exception as error:
            at.fail(error)

    def _run_Delete(self, node: ast.Delete, frame: Frame, at: At) -> None:
        for target in node.targets:
            if isinstance(target, ast.Name):
                if target.id not in frame.locals:
                    at.stop("deleting what is not local is a side effect")
                del frame.locals[target.id]
            elif isinstance(target, ast.Subscript):
                owner = self.evaluate(target.value, frame)
                key = self.evaluate(target.slice, frame)
                if type(owner) not in (list, dict) or not self.may_change(owner):
                    at.stop("deleting an item from outside of the program is a side effect")
                try:
                    del owner[key]
                except Exception as error:
                    at.fail(error)
            else:
                at.stop("deleting an attribute is a side effect")

    def _run_If(self, node: ast.If, frame: Frame, at: At) -> None:
        test = self.truth(self.evaluate(node.test, frame), At(self, node.test, frame))
        self.run(node.body if test else node.orelse, frame)

    def _run_For(self, node: ast.For, frame: Frame, at: At) -> None:
        iterated = self.evaluate(node.iter, frame)
        for item in self.iterate(iterated, At(self, node.iter, frame)):
            self.assign(node.target, item, frame)
            try:
                self.run(node.body, frame)
            except _Break:
                return
            except _Continue:
                continue
        self.run(node.orelse, frame)

    def _run_While(self, node: ast.While, frame: Frame, at: At) -> None:
        while self.truth(self.evaluate(node.test, frame), At(self, node.test, frame)):
            try:
                self.run(node.body, frame)
            except _Break:
                return
            except _Continue:
                continue
        self.run(node.orelse, frame)

    def _run_With(self, node: ast.With, frame: Frame, at: At) -> None:
        entered: list[tuple[Host, At]] = []
        for item in node.items:
            place = At(self, item.context_expr, frame)
            value = self.evaluate(item.context_expr, frame)
            if not isinstance(value, Host):
                place.stop(f"entering {_type_name(value)} may have side effects")
            inside = value.enter(place)
            entered.append((value, place))
            if item.optional_vars is not None:
                self.assign(item.optional_vars, inside, frame)
        leaving: Exception | None = None
        try:
            self.run(node.body, frame)
        except (_Return, _Break, _Continue) as jump:
            leaving = jump
        for value, place in reversed(entered):
            value.exit(place)
        if leaving is not None:
            raise leaving

    def _run_FunctionDef(self, node: ast.FunctionDef, frame: Frame, at: At) -> None:
        if node.decorator_list:
            at.stop("decorated functions inside of a program are not followed")
        frame.locals[node.name] = self._local_function(node, frame)

    def _run_AsyncFunctionDef(self, node: ast.AsyncFunctionDef, frame: Frame, at: At) -> None:
        if node.decorator_list:
            at.stop("decorated functions inside of a program are not followed")
        frame.locals[node.name] = self._local_function(node, frame)

    def _run_Import(self, node: ast.Import, frame: Frame, at: At) -> None:
        for alias in node.names:
            if alias.name not in sys.modules:
                at.stop("importing a module runs its code", "import it at the top of the file")
            top = alias.name.split(".")[0]
            name = alias.asname or top
            frame.locals[name] = sys.modules[alias.name if alias.asname else top]

    def _run_ImportFrom(self, node: ast.ImportFrom, frame: Frame, at: At) -> None:
        package = frame.globals.get("__package__") or ""
        parts = package.split(".")
        base = ".".join(parts[: len(parts) - node.level + 1]) if node.level else ""
        home = ".".join(filter(None, (base, node.module)))
        module = sys.modules.get(home)
        if module is None:
            at.stop("importing a module runs its code", "import it at the top of the file")
        for alias in node.names:
            value = self.static_attribute(module, alias.name, at)
            frame.locals[alias.asname or alias.name] = value

    def _run_Global(self, node: ast.Global, frame: Frame, at: At) -> None:
        frame.foreign.update(node.names)

    def _run_Nonlocal(self, node: ast.Nonlocal, frame: Frame, at: At) -> None:
        frame.nonlocals.update(node.names)

    def _run_Assert(self, node: ast.Assert, frame: Frame, at: At) -> None:
        if not self.truth(self.evaluate(node.test, frame), At(self, node.test, frame)):
            message = "" if node.msg is None else self.evaluate(node.msg, frame)
            at.fail(AssertionError(message))

    def _run_Raise(self, node: ast.Raise, frame: Frame, at: At) -> None:
        error = None if node.exc is None else self.evaluate(node.exc, frame)
        if isinstance(error, type) and issubclass(error, Exception):
            error = self.call(error, [], {}, at)
        if not isinstance(error, Exception):
            at.stop("what is raised here is not known")
        at.fail(error)

    def _run_Try(self, node: ast.Try, frame: Frame, at: At) -> None:
        before = self._num_deferred
        try:
            try:
                self.run(node.body, frame)
            except Raised as raised:
                handler = self._handler(node.handlers, raised.error, frame)
                if handler is None:
                    raise
                if handler.name is not None:
                    frame.locals[handler.name] = raised.error
                self.run(handler.body, frame)
            else:
                self._refuse_deferred(node, before, at)
                self.run(node.orelse, frame)
        except (_Return, _Break, _Continue):
            self._refuse_deferred(node, before, at)
            self.run(node.finalbody, frame)
            raise
        except Raised:
            self.run(node.finalbody, frame)
            raise
        self.run(node.finalbody, frame)

    def _refuse_deferred(self, node: ast.Try, before: int, at: At) -> None:
        if node.handlers and self._num_deferred > before:
            at.stop("whether the except part runs depends on values that are not known")

    def _handler(
        self, handlers: list[ast.ExceptHandler], error: BaseException, frame: Frame
    ) -> ast.ExceptHandler | None:
        for handler in handlers:
            kinds = BaseException if handler.type is None else self.evaluate(handler.type, frame)
            if isinstance(error, kinds):
                return handler
        return None


# --- pure functions that deferred values are made of ---------------------------------------------

_UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
    ast.Invert: operator.invert,
    ast.Not: operator.not_,
}
_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.BitOr: operator.or_,
    ast.BitAnd: operator.and_,
    ast.BitXor: operator.xor,
    ast.LShift: operator.lshift,
    ast.RShift: operator.rshift,
    ast.MatMult: operator.matmul,
}


def _in(item: Any, container: Any) -> bool:
    return item in container


def _not_in(item: Any, container: Any) -> bool:
    return item not in container


_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: _in,
    ast.NotIn: _not_in,
}
_CONVERSIONS: dict[int, Callable[[Any], str]] = {ord("s"): str, ord("r"): repr, ord("a"): ascii}


def _formatted(value: Any, conversion: int, spec: str) -> str:
    return format(_CONVERSIONS[conversion](value) if conversion in _CONVERSIONS else value, spec)


def _item_of(value: Any, index: int, count: int) -> Any:
    items = tuple(value)
    if len(items) != count:
        raise ValueError(f"{len(items)} values to unpack into {count} names")
    return items[index]


def _chained(kind: type, *parts: Any) -> Any:
    return kind(itertools.chain.from_iterable(parts))


def _dict_of(keys: list[Any], values: list[Any]) -> dict[Any, Any]:
    return dict(zip(keys, values, strict=True))


def _all_of(environment: Environment, *operands: Template) -> Any:
    value: Any = True
    for operand in operands:
        value = environment.filled(operand)
        if not value:
            break
    return value


def _any_of(environment: Environment, *operands: Template) -> Any:
    value: Any = False
    for operand in operands:
        value = environment.filled(operand)
        if value:
            break
    return value


def _chosen(environment: Environment, test: Template, then: Template, otherwise: Template) -> Any:
    return environment.filled(then if environment.filled(test) else otherwise)


def _compared(
    functions: Sequence[Callable[[Any, Any], Any]], environment: Environment, *operands: Template
) -> Any:
    left, result = environment.filled(operands[0]), True
    for function, operand in zip(functions, operands[1:], strict=True):
        right = environment.filled(operand)
        result = function(left, right)
        if not result:
            break
        left = right
    return result


def _comprehended(
    element: Leaf, environment: Environment, items: Template, body: Template, *tests: Template
) -> list[Any]:
    scopes = (environment.within({element: item}) for item in environment.filled(items))
    return [s.filled(body) for s in scopes if all(s.filled(test) for test in tests)]


def _function_of(
    elements: Sequence[Leaf], environment: Environment, body: Template
) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        return environment.within(dict(zip(elements, args, strict=True))).filled(body)

    return call


def _eager(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, giving a list where it gives an iterator: that can be read more than once."""

    def call(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        return list(result) if hasattr(result, "__next__") else result

    return call


# --- helpers -------------------------------------------------------------------------------------


def _shown(source: str) -> str:
    line = " ".join(source.split())
    return line if len(line) <= 80 else line[:77] + "..."


def _type_name(value: object) -> str:
    if isinstance(value, Host):
        return value.description
    if isinstance(value, type):
        return f"the class {value.__qualname__}"
    return f"a {type(value).__qualname__}"


_PLAIN_LOOKUPS: tuple[Any, ...] = (
    object.__getattribute__,
    type.__getattribute__,
    *(kind.__getattribute__ for kind in (types.FunctionType, BaseException, tuple, str, int)),
)


def _is_made_plainly(kind: type) -> bool:
    """Whether calling the class runs nobody's code."""
    if isinstance(kind, enum.EnumMeta):
        return purity.makes_members(kind)
    initializers = (getattr(kind, "__init__", None), getattr(kind, "__new__", None))
    return issubclass(kind, BaseException) and not any(
        isinstance(part, types.FunctionType) for part in initializers
    )


def _callable_name(value: Any) -> str:
    if isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType)):
        return value.__qualname__
    return _type_name(value)


def _is_text(value: Any) -> bool:
    if isinstance(value, Deferred):
        return bool(value.pieces) or value.kind is not None
    return isinstance(value, (str, Expr))


def _is_known_text(value: Any) -> bool:
    return isinstance(value, (str, Deferred))


def _pieces(value: Any) -> tuple[Piece, ...]:
    return (value,) if isinstance(value, Expr) else pieces_of(value)


def _has_variable(value: Any) -> bool:
    if isinstance(value, Deferred):
        return value.name is not None or any(map(_has_variable, value.pieces))
    return isinstance(value, Expr)


def _has_identity_only(value: Any) -> bool:
    """Whether == on it runs nobody's code, because nobody defined it."""
    equals: Any = type(value).__eq__
    return isinstance(value, type) or equals is object.__eq__ or value is None


def _own_parts(statement: ast.stmt) -> Iterator[ast.AST]:
    """The nodes of a statement without those of functions in it."""
    stack: list[ast.AST] = [statement]
    while stack:
        node = stack.pop()
        yield node
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            stack.extend(ast.iter_child_nodes(node))


# --- source --------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=64)
def _functions_in(text: str, filename: str) -> dict[int, list[Any]]:
    """The functions of a file by the line on which each begins, decorators included."""
    found: dict[int, list[Any]] = {}
    for node in ast.walk(ast.parse(text, filename)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            first = min((node.lineno, *(d.lineno for d in node.decorator_list)))
            found.setdefault(first, []).append(node)
        elif isinstance(node, ast.Lambda):
            found.setdefault(node.lineno, []).append(node)
    return found


@functools.lru_cache(maxsize=256)
def definition_of(
    code: types.CodeType,
) -> ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda:
    """The syntax of a function. TraceError if its source is not there, or is another by now.

    Costs a parse per file and a compilation per function, once.
    """
    advice = "programs that are traced must be in a file or a notebook cell"
    try:
        lines, _ = inspect.findsource(code)
        candidates = _functions_in("".join(lines), code.co_filename).get(code.co_firstlineno, [])
    except (OSError, TypeError, SyntaxError, IndentationError):
        raise TraceError(f"the source of {code.co_qualname} is not available", advice) from None
    for node in candidates:
        name = "<lambda>" if isinstance(node, ast.Lambda) else node.name
        if name == code.co_name and _is_source_of(node, code):
            return node
    raise TraceError(f"the source of {code.co_qualname} is not what runs: it changed", advice)


def _is_source_of(
    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda, code: types.CodeType
) -> bool:
    """Whether the arguments are the same, and all the texts of the code are in the source."""
    signature = node.args
    arguments = [*signature.posonlyargs, *signature.args, *signature.kwonlyargs]
    names = tuple(argument.arg for argument in arguments)
    if code.co_varnames[: code.co_argcount + code.co_kwonlyargcount] != names:
        return False
    if any(isinstance(part, ast.Assert) for part in ast.walk(node)):
        return True  # test runners rewrite them
    statement: ast.stmt = ast.Expr(node) if isinstance(node, ast.Lambda) else node
    if not isinstance(statement, ast.Expr):
        statement = _without_decorators(node)
    module = ast.fix_missing_locations(ast.Module([statement], []))
    future = code.co_flags & __future__.annotations.compiler_flag
    compiled = compile(module, "<source>", "exec", flags=future, dont_inherit=True)
    # Functions in its defaults come before it.
    *_, inner = (c for c in compiled.co_consts if isinstance(c, types.CodeType))
    if code.co_flags & inspect.CO_OPTIMIZED and sys.flags.optimize:
        return True  # texts that are documentation are stripped
    return set(_texts(code)) <= set(_texts(inner))


def _without_decorators(node: Any) -> Any:
    fields = {name: getattr(node, name) for name in node._fields if name != "decorator_list"}
    return ast.copy_location(type(node)(**fields, decorator_list=[]), node)


def _texts(code: types.CodeType) -> Iterator[str]:
    for constant in code.co_consts:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, types.CodeType):
            yield from _texts(constant)
