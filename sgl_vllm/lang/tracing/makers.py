"""Expressions with stand-ins in them, such as ``sgl.gen("x", stop=s["end"])``: the run makes them.

Owns how a function that makes an expression is given stand-ins, and which variables expressions
with stand-ins make and read.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any  # Any: the arguments of whatever is called

from sgl_vllm.lang.ir import Expr, ExprList, Value, names_made, parts_of
from sgl_vllm.lang.tracing.errors import RUN_IT, CallableT, captured_by, is_tracing, stop, unwatched
from sgl_vllm.lang.tracing.standin import StandIn, fixed, holds_standin, why


def deferrable(maker: CallableT) -> CallableT:
    """Let `maker`, which makes an expression, be given stand-ins while a program is traced. Cost:
    0.2 microseconds per call."""

    @unwatched
    def traced(*args: Any, **kwargs: Any) -> Any:
        given = (*args, *kwargs.values())
        for value in given:
            for part in value if isinstance(value, list | tuple) else (value,):
                _refuse_captured(part)
        if not any(map(holds_standin, given)):
            return maker(*args, **kwargs)
        made = StandIn(maker.__name__, maker, args, kwargs, is_expr=True)
        made._name = _name_made(maker, args, kwargs)
        return made

    @functools.wraps(maker)
    def make(*args: Any, **kwargs: Any) -> Any:
        return traced(*args, **kwargs) if is_tracing() else maker(*args, **kwargs)

    return make  # type: ignore[return-value]


def _name_made(
    maker: Callable[..., Any], args: Sequence[Value], kwargs: Mapping[str, Value]
) -> str | None:
    """The variable that ``maker(...)`` makes, if any."""
    first = next(iter(inspect.signature(maker).parameters))
    if first not in ("name", "answer"):
        return None
    given = args[0] if args else kwargs.get(first)
    if isinstance(given, Expr) and not isinstance(given, StandIn):
        names = names_of(given)
        return names[-1] if names else None
    if holds_standin(given):
        stop(f"the name of a variable depends on {why(fixed(given))}")
    assert given is None or isinstance(given, str)
    return given


def names_of(expr: Expr) -> list[str]:
    """The variables that an expression makes."""
    if isinstance(expr, ExprList):
        return [name for item in expr.items for name in names_of(item)]
    if isinstance(expr, StandIn):
        return [] if expr._name is None else [expr._name]
    return [*names_made(expr)]


def exprs_in(value: object) -> Iterator[Expr]:
    """The expressions that a value or its arguments have."""
    if isinstance(value, StandIn):
        for part in (*value._args, *value._kwargs.values()):
            yield from exprs_in(part)
    elif isinstance(value, Expr):
        yield from parts_of(value)


def _refuse_captured(function: Value) -> None:
    """Stop at a function that uses a stand-in or a prompt of the trace: no run would give it the
    value."""
    if any(map(holds_standin, captured_by(function))):
        stop(
            f"the local function {function.__name__} uses a value that only a run knows",
            f"pass the value as an argument, or {RUN_IT}",
        )
