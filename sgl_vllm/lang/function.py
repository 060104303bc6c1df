"""`@function`: makes a program of a Python function.

Owns the decorator and the program it returns, which can be traced and compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence

# Any: arguments of the user's function
from typing import TYPE_CHECKING, Any, Concatenate, overload

from sgl_vllm.lang.backends.base import Backend
from sgl_vllm.lang.batch import Item
from sgl_vllm.lang.call_types import Decorator, P
from sgl_vllm.lang.ir import Expr
from sgl_vllm.lang.keywords import suggests
from sgl_vllm.lang.ordering import NOTHING_PLANNED, PlannedOrders, mentions, planned
from sgl_vllm.lang.program import Program
from sgl_vllm.lang.state import AsyncProgramState, ProgramState, R

if TYPE_CHECKING:
    from sgl_vllm.lang.compiler import CompiledProgram
    from sgl_vllm.lang.tracing.graph import Graph


class FunctionProgram(Program[P, R]):
    """A program that runs by calling its function."""

    def bind(self, /, **kwargs: Any) -> FunctionProgram[..., R]:
        self._check_names(kwargs)
        return type(self)(self.func, {**self.bound, **kwargs}, self.num_api_spec_tokens)

    # Tracing and compiling are imported when used: few programs do, and it costs milliseconds.

    def trace(self, /, *args: Any, backend: Backend | None = None, **known: Any) -> Graph:
        from sgl_vllm.lang.tracing.trace import trace

        return trace(self, *args, **known)

    def compile(
        self, /, *args: Any, backend: Backend | None = None, **known: Any
    ) -> CompiledProgram[R]:
        from sgl_vllm.lang.compiler import compile_program

        return compile_program(self, *args, **known)

    def _plan_orders(self, items: Sequence[Item]) -> PlannedOrders:
        if not mentions(self.func, "any_order"):
            return NOTHING_PLANNED
        from sgl_vllm.lang.tracing.trace import first_any_orders

        return planned(first_any_orders(self, items))

    def _shared_prefix(self, items: Sequence[Item]) -> tuple[Expr, ...]:
        from sgl_vllm.lang.tracing.trace import shared_prefix

        return shared_prefix(self, items)


@overload
def function(func: None = None, num_api_spec_tokens: int | None = None) -> Decorator: ...
@overload
def function(
    func: Callable[Concatenate[AsyncProgramState, P], Coroutine[Any, Any, R]],
    num_api_spec_tokens: int | None = None,
) -> Program[P, R]: ...
@overload
def function(
    func: Callable[Concatenate[ProgramState, P], R], num_api_spec_tokens: int | None = None
) -> Program[P, R]: ...
@suggests
def function(
    func: Callable[..., Any] | None = None, num_api_spec_tokens: int | None = None
) -> Program | Callable[[Callable[..., Any]], Program]:
    """Make a program of a function, plain or async, whose first parameter is `s`, its prompt.

    Use it as ``@function`` or ``@function()``. With `num_api_spec_tokens`, a generation may run
    that many tokens past its end, and the text after it answers the next operations for as long
    as it matches them (API speculative execution). That saves calls and input tokens at services
    that offer only an API.
    """

    def program(func: Callable[..., Any]) -> Program:
        return FunctionProgram(func, num_api_spec_tokens=num_api_spec_tokens)

    return program if func is None else program(func)
