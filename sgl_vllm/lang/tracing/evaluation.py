"""Evaluates the source of a program over known and deferred values; executes no side effect.

Owns the meaning of Python's calls and statements while a program is traced. Knows no prompt: the
objects that stand for prompts are `Host`s, which `trace.py` makes. The function itself is never
called. What is called is in `purity.py`; anything else ends the evaluation with `TraceError`.
"""

from __future__ import annotations

import ast
import functools
import itertools
import operator
import sys
import types
from collections.abc import Mapping, Sequence
from typing import Any

from sgl_vllm.lang.tracing import purity
from sgl_vllm.lang.tracing.deferred import Deferred
from sgl_vllm.lang.tracing.expressions import Expressions
from sgl_vllm.lang.tracing.frames import (
    NOT_HANDLED,
    RUN_IT,
    At,
    Bound,
    Frame,
    Hook,
    Host,
    LocalFunction,
    Raised,
    TraceError,
)
from sgl_vllm.lang.tracing.operations import (
    VIEWS,
    callable_name,
    eager,
    is_known_text,
    is_made_plainly,
    item_of,
    ordered_by,
    own_parts,
    type_name,
)
from sgl_vllm.lang.tracing.source import definition_of

MAX_STEPS = 200_000
"""Expressions that are evaluated at most: about a second."""
MAX_DEPTH = 24
"""Functions within functions that are followed at most."""


class _Unknown(Exception):
    """What a function that was handed to a pure one gives is not known."""


class _Return(Exception):
    def __init__(self, value: Any) -> None:
        self.value = value


class _Break(Exception):
    pass


class _Continue(Exception):
    pass


class Evaluator(Expressions):
    """Follows functions. `hook` gets every call first, and may answer NOT_HANDLED.

    `home` is the package whose functions are followed into, beside those that are given a prompt.
    """

    def __init__(self, hook: Hook, home: str, max_steps: int = MAX_STEPS) -> None:
        super().__init__(max_steps)
        self._hook = hook
        self._home = home
        self._depth = 0

    # --- calls -----------------------------------------------------------------------------------

    def call(self, callee: Any, args: list[Any], kwargs: dict[str, Any], at: At) -> Any:
        """What the program's call gives."""
        answer = self._hook(callee, args, kwargs, at)
        if answer is not NOT_HANDLED:
            return answer
        if isinstance(callee, LocalFunction):
            return self.follow_local(callee, args, kwargs, at)
        if isinstance(callee, Bound):
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
            return self._call_listed(callee, args, kwargs, at)
        if type(callee) is operator.itemgetter and len(args) == 1 and not kwargs:
            if self.holds_deferred(args[0]):
                return self.defer(callee, args, kwargs, at)
            return self.call_pure(callee, args, kwargs, at)
        if isinstance(callee, type):
            if is_made_plainly(callee):
                return self.call_pure(callee, args, kwargs, at)
            at.stop(
                f"making {callee.__qualname__} objects may have side effects",
                f"make it outside and pass it as an argument, {RUN_IT}",
            )
        if isinstance(callee, types.FunctionType) and self._may_follow(callee, args, kwargs):
            return self._follow(callee, args, kwargs, at)
        at.stop(
            f"calling {callable_name(callee)} may have side effects, and tracing executes none",
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
                    f"make a copy first, {RUN_IT}",
                )
            if name in ("extend", "update") and any(isinstance(a, Deferred) for a in args):
                at.decides_on(next(a for a in args if isinstance(a, Deferred)))
        method = getattr(owner, name)
        if plain is str and name == "join" and args:
            args = [self.own(self.iterate(args[0], at))] if not is_known_text(args[0]) else args
        if (plain, name) in purity.STRUCTURAL_METHODS:
            if name in ("extend", "update"):
                args = [arg.iterate(at) if isinstance(arg, Host) else arg for arg in args]
            iterated = args if name in ("extend", "update") else []
            keys = args[:1] if name in ("get", "pop", "setdefault", "insert") else []
            if any(map(self.holds_deferred, keys)):
                if purity.is_mutator(plain, name):
                    at.stop("it is not known which item is meant")
                return self.defer(purity.call_pure_method(name), [owner, *args], kwargs, at)
            self.require_plain(keys, at)
            is_new = name in ("copy", "items", "keys", "values")
            return self.call_structural(method, args, kwargs, at, iterated=iterated, is_new=is_new)
        if self.holds_deferred(owner) or self._any_deferred(args, kwargs):
            if purity.is_mutator(plain, name):
                at.stop("it compares values that are not known")
            head = ""
            if plain is str and name == "join" and isinstance(args[0], list) and args[0]:
                head = args[0][0] if isinstance(args[0][0], str) else ""
                head = head or getattr(args[0][0], "head", "")
            return self.defer(purity.call_pure_method(name), [owner, *args], kwargs, at, head=head)
        if purity.is_mutator(plain, name):
            return self.call_pure(method, args, kwargs, at, may_wait=False)
        return self.call_pure(method, args, kwargs, at, is_new=plain in (str, bytes))

    def _any_deferred(self, args: list[Any], kwargs: dict[str, Any]) -> bool:
        return any(map(self.holds_deferred, args)) or any(map(self.holds_deferred, kwargs.values()))

    def _call_listed(self, function: Any, args: list[Any], kwargs: dict[str, Any], at: At) -> Any:
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
            return self.call_structural(
                function,
                args,
                kwargs,
                at,
                iterated=args if is_iterating else (),
                is_new=is_iterating,
            )
        is_ordering = function is sorted or function is max or function is min
        has_key = is_ordering and len(args) == 1 and isinstance(kwargs.get("key"), LocalFunction)
        if has_key and not isinstance(args[0], Deferred):
            return self._ordered(function, args[0], kwargs, at)
        if self._any_deferred(args, kwargs):
            return self.defer(eager(function), args, kwargs, at)
        return self.call_pure(
            function, args, kwargs, at, is_new=purity.returns_new_object(function)
        )

    def _ordered(self, function: Any, items: Any, kwargs: dict[str, Any], at: At) -> Any:
        """`sorted`, `max` or `min` of known items by a key of the program's: the keys may be
        deferred."""
        given = self.own(self.iterate(items, at))
        keys = self.own([self.call(kwargs["key"], [item], {}, at) for item in given])
        options = {name: value for name, value in kwargs.items() if name != "key"}
        ordered = functools.partial(ordered_by, function)
        if self.holds_deferred(keys) or self.holds_deferred(given):
            return self.defer(ordered, [given, keys], options, at)
        self.require_plain(keys, at)
        return self.call_structural(ordered, [given, keys], options, at, is_new=True)

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
        for value in iterated:
            if not purity.is_plain_container(value) and not purity.is_plain_scalar(value):
                self.iterate(value, at)  # stops if that is not plain data
        try:
            result = function(*args, **kwargs)
        except Exception as error:
            at.fail(error)
        if hasattr(result, "__next__") or type(result) in VIEWS:
            result = list(result)
        if is_new and type(result) in purity.CONTAINERS:
            self.own(result)
            for item in result if isinstance(result, list) else ():
                if type(item) is tuple:
                    self.own(item)
        return result

    def call_pure(
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
            if not isinstance(value, (LocalFunction, Bound)):
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
            is_known = False
        except Exception as error:
            at.fail(error)
        else:
            is_known = True
        if not is_known:
            if not may_wait:
                at.stop("it compares values that are not known")
            return self.defer(eager(function), args, kwargs, at)
        if is_new and type(result) in purity.CONTAINERS:
            self.own(result)
        return result

    def _as_callable(self, value: Any, at: At) -> Any:
        """A function of the program, to be handed to a pure one such as `sorted`."""
        is_followed = isinstance(value, (LocalFunction, Bound, types.FunctionType))
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

    def follow_local(
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
            if any(isinstance(part, (ast.Yield, ast.YieldFrom)) for part in own_parts(statement)):
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
            at.stop("assigning an attribute is a side effect", f"use a variable, {RUN_IT}")

    def _assign_items(self, targets: list[ast.expr], value: Any, frame: Frame, at: At) -> None:
        if isinstance(value, Deferred) and not any(isinstance(t, ast.Starred) for t in targets):
            count = len(targets)
            for i, target in enumerate(targets):
                place = At(self, target, frame)
                self.assign(target, self.defer(item_of, (value, i, count), {}, place), frame)
            return
        star = next((i for i, t in enumerate(targets) if isinstance(t, ast.Starred)), None)
        if star is None:
            items = self.iterate(value, at)
            if len(items) != len(targets):
                at.fail(ValueError(f"{len(items)} values to unpack into {len(targets)} names"))
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
                f"it changes {type_name(owner)} from outside of the program",
                f"make a copy first, {RUN_IT}",
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
            if not self._goes_on(node.body, frame):
                return
        self.run(node.orelse, frame)

    def _run_While(self, node: ast.While, frame: Frame, at: At) -> None:
        while self.truth(self.evaluate(node.test, frame), At(self, node.test, frame)):
            if not self._goes_on(node.body, frame):
                return
        self.run(node.orelse, frame)

    def _goes_on(self, body: list[ast.stmt], frame: Frame) -> bool:
        """Run the body of a loop once; whether the loop goes on after it."""
        try:
            self.run(body, frame)
        except _Break:
            return False
        except _Continue:
            pass
        return True

    def _run_With(self, node: ast.With, frame: Frame, at: At) -> None:
        entered: list[tuple[Host, At]] = []
        for item in node.items:
            place = At(self, item.context_expr, frame)
            value = self.evaluate(item.context_expr, frame)
            if not isinstance(value, Host):
                place.stop(f"entering {type_name(value)} may have side effects")
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
