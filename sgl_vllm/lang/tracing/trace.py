"""Traces a program to a graph, and finds the prefix that the prompts of a batch share.

Owns calls of the language (`sgl.gen`, programs) while a program is traced. The function is not
called, it has no side effects, and no request is sent.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import time
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any  # Any: arguments of the user's function

from sgl_vllm.lang import api
from sgl_vllm.lang.constraints import ARGUMENTS as CONSTRAINT_ARGUMENTS
from sgl_vllm.lang.ir import AnyOrder, Expr, Role, RoleBegin, RoleEnd, Value, names_made
from sgl_vllm.lang.primitives import PRIMITIVES
from sgl_vllm.lang.program import Program
from sgl_vllm.lang.tracing.calls import NOT_HANDLED
from sgl_vllm.lang.tracing.deferred import Argument, Deferred, leaf
from sgl_vllm.lang.tracing.evaluation import MAX_STEPS, Evaluator
from sgl_vllm.lang.tracing.frames import Args, At, Host, Kwargs, LocalFunction, TraceError
from sgl_vllm.lang.tracing.graph import Graph
from sgl_vllm.lang.tracing.nodes import Evaluate
from sgl_vllm.lang.tracing.operations import MAKERS
from sgl_vllm.lang.tracing.prompts import PrefixDone, Recorder

PREFIX_MAX_STEPS = 50_000
"""At most this many expressions are evaluated to find a shared prefix: about 0.25 s."""

ORDERS_MAX_STEPS = 10_000
"""At most this many are evaluated to find the `any_order` of one item."""

ORDERS_MAX_S = 1.0
"""At most this long, the `any_order`s of a batch are looked for."""

_TURN_MAKERS: dict[object, Role] = {
    api.system: "system",
    api.user: "user",
    api.assistant: "assistant",
}
_PLAIN_MAKERS = ("gen", "gen_int", "gen_string", "select", "var")
_STANDINS = (Host, LocalFunction)
_NOT_DATA = (*CONSTRAINT_ARGUMENTS, "choices_method")
"""Options of `gen` and `select` that may be objects of any class."""


class _Tracer(Evaluator):
    """Follows a program, and evaluates the calls of the language itself."""

    def call_of_language(self, callee: Value, args: Args, kwargs: Kwargs, at: At) -> Value:
        if isinstance(callee, Program):
            return self._call_program(callee, args, kwargs, at)
        if callee is asyncio.gather:
            return self.share(args)
        if isinstance(callee, types.FunctionType):
            for name, maker in MAKERS.items():
                if maker is callee:
                    return self._make(name, maker, args, kwargs, at)
        return NOT_HANDLED

    def _call_program(self, program: Program, args: Args, kwargs: Kwargs, at: At) -> Value:
        if hasattr(program, "graph"):
            at.stop("a compiled program cannot be traced", "call the program it was made of")
        if not args or not isinstance(args[0], Host):
            at.stop(
                "it starts a run of its own",
                "give the other program this prompt, other(s, ...), or pass its result as an "
                "argument",
            )
        return self.call(program.func, args, {**program.bound, **kwargs}, at)

    def _make(self, called: str, maker: Value, args: Args, kwargs: Kwargs, at: At) -> Value:
        """The expression that ``maker(...)`` gives, where `called` is its name in a graph."""
        args = [self.snapshot(a, at) if isinstance(a, _STANDINS) else a for a in args]
        kwargs = {
            key: self.snapshot(a, at) if isinstance(a, _STANDINS) else a
            for key, a in kwargs.items()
        }
        given = [*args, *kwargs.values()]
        if maker in _TURN_MAKERS and len(given) == 1 and isinstance(given[0], Deferred):
            role = _TURN_MAKERS[maker]
            return self.concatenate([RoleBegin(role), *given[0].pieces, RoleEnd(role)], at)
        if maker.__name__ in _PLAIN_MAKERS:
            for key, value in (*enumerate(args), *kwargs.items()):
                if key not in _NOT_DATA and not isinstance(value, type):
                    self.require_plain(value, at)
        if not any(map(self.holds_deferred, given)):
            return self._result(maker, args, kwargs, at)
        name = self._name_made(called, maker, args, kwargs, at)
        if isinstance(name, Deferred):
            at.stop(f"the name of a variable depends on {name.why()}")
        if maker is api.separate_reasoning:
            at.stop(
                "separate_reasoning of values that only a run knows is not supported in a traced "
                "function",
                "give it values that are known",
            )
        return self.defer(called, args, at, kwargs, name)

    def _name_made(self, called: str, maker: Value, args: Args, kwargs: Kwargs, at: At) -> Value:
        """The variable that ``maker(...)`` makes, if any."""
        first = next(iter(inspect.signature(maker).parameters))
        if first != "name" and called not in PRIMITIVES:
            return None
        given = args[0] if args else kwargs.get(first)
        if first != "name" and isinstance(given, Deferred):
            at.stop(
                f"the expression of {maker.__name__} has values that only a run knows, which is "
                "not supported in a traced function",
                "append the text with these values before it",
            )
        if not isinstance(given, Expr):
            return given
        names = names_made(given)
        return names[-1] if names else None


def trace(program: Program, /, *args: Any, **kwargs: Any) -> Graph:
    """The graph of `program`. Arguments that are given are known, the others are placeholders.

    The function is not called: its source is evaluated without side effects, and no request is
    sent. TraceError where the program decides on an unknown value, or does something that tracing
    does not support; its `graph` is what comes before that place. TypeError for arguments that the
    program does not take. Cost: about 5 microseconds per expression, at most 200,000 of them.
    """
    signature = inspect.signature(program.func)
    bound = signature.bind_partial(None, *args, **{**program.bound, **kwargs}).arguments
    names = list(signature.parameters)[1:]
    arguments = {n: bound[n] if n in bound else leaf(Argument(n)) for n in names}
    graph, error = _traced(program, arguments, MAX_STEPS)
    if error is not None:
        error.graph = graph
        raise error
    return graph


def _traced(
    program: Program,
    arguments: Mapping[str, Value],
    max_steps: int,
    *,
    is_prefix_only: bool = False,
) -> tuple[Graph, TraceError | None]:
    function = program.func
    home = (function.__module__ or "").split(".")[0]
    tracer = _Tracer(home, max_steps, is_prefix_only=is_prefix_only)
    group_class = program.state_class.group_class
    recorder = Recorder(tracer, gathers_known_names=group_class.gathers_known_names)
    root = recorder.new_state(None, 0, None)
    returned, failure = None, None
    try:
        first = next(iter(inspect.signature(function).parameters))
        returned = tracer.follow_program(function, {first: root, **arguments})
    except PrefixDone:
        pass
    except TraceError as error:
        failure = error
    except RecursionError:
        failure = TraceError("the program nests its expressions too deeply", "")
    reason = None if failure is None else str(failure)
    return recorder.graph(function.__name__, arguments, returned, reason), failure


# --- the prefix of a batch -----------------------------------------------------------------------


def shared_prefix(program: Program, items: Sequence[Mapping[str, Value]]) -> tuple[Expr, ...]:
    """The known text and turns that the prompts of all `items` (arguments by name) begin with.

    Arguments that are equal in all items, or that all leave at their default, count as known. The
    prefix ends at the first generation, fork, or text that depends on anything else, and where
    tracing ends. Never raises: () if nothing is known. Cost: one comparison per item and argument,
    and a trace of at most 50,000 expressions (0.25 s) that ends with the prefix.
    """
    try:
        arguments = {name: leaf(Argument(name)) for name in program.arg_names}
        arguments |= common_arguments(program, items)
        graph, _ = _traced(program, arguments, PREFIX_MAX_STEPS, is_prefix_only=True)
        return graph.prefix()
    except Exception:
        return ()


def first_any_orders(
    program: Program, items: Sequence[Mapping[str, Value]]
) -> Iterator[tuple[tuple[Expr, ...], AnyOrder]]:
    """For each item, the first `any_order` of its prompt and what the prompt has before it.

    Leaves out items where another operation comes first, or tracing ends. Never raises. Ends
    `ORDERS_MAX_S` seconds after the first item. Cost: a trace per item, up to the `any_order`. That
    takes about 0.3 ms.
    """
    deadline = math.inf  # the first trace may import what it needs
    defaults = common_arguments(program, ())
    for item in items:
        try:
            arguments = {name: leaf(Argument(name)) for name in program.arg_names}
            arguments |= {**defaults, **program.bound, **item}
            graph, _ = _traced(program, arguments, ORDERS_MAX_STEPS, is_prefix_only=True)
            prompt = graph.nodes_of(0)
            if prompt and isinstance(prompt[-1].operation, Evaluate):
                expr = prompt[-1].operation.expr
                if isinstance(expr, AnyOrder):
                    yield graph.prefix(), expr
        except Exception:
            continue
        now = time.monotonic()
        deadline = min(deadline, now + ORDERS_MAX_S)
        if now > deadline:
            return


def common_arguments(program: Program, items: Sequence[Mapping[str, Value]]) -> dict[str, Value]:
    """The arguments that have one known value in all `items`, by name."""
    parameters = inspect.signature(program.func).parameters
    missing = object()
    arguments: dict[str, Value] = {}
    for name in program.arg_names:
        values: Iterator[Value] = (item.get(name, missing) for item in items)
        first = next(values, missing)
        is_common = all(_is_same(first, value) for value in values)
        if first is missing:
            first = program.bound.get(name, parameters[name].default)
        if is_common and first is not inspect.Parameter.empty:
            arguments[name] = first
    return arguments


def _is_same(left: object, right: object) -> bool:
    """Whether two arguments are equal, without running code of their classes."""
    if left is right:
        return True
    kinds = (str, int, float, bool, bytes)
    return type(left) is type(right) and type(left) in kinds and left == right
