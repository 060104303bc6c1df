"""Futures of variables that other futures bring.

Owns how a variable is derived from what an operation returns, and its errors with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import TypeVar

from sgl_vllm.lang.transcript import Variable
from sgl_vllm.lang.waiting import Awaited

T = TypeVar("T")


def reasoning_of(future: Future[Variable]) -> Future[Variable]:
    """The variable that holds a generation's reasoning."""
    return _derived(future, lambda variable: Variable.of(variable.reasoning))


def one_of(future: Future[Mapping[str, Variable]], name: str) -> Future[Variable]:
    """One of the variables that a block makes."""
    return _derived(future, lambda variables: variables[name])


def _derived(future: Future[T], variable_of: Callable[[T], Variable]) -> Future[Variable]:
    derived: Awaited[Variable] = Awaited(lambda _: [future])

    def resolve(done: Future[T]) -> None:
        error = done.exception()
        if error is not None:
            derived.set_exception(error)
        else:
            derived.set_result(variable_of(done.result()))

    future.add_done_callback(resolve)
    return derived
