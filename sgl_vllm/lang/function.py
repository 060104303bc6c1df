"""`@function`: makes a program of a Python function."""

from __future__ import annotations

from collections.abc import Callable, Coroutine

# Any: arguments of the user's function
from typing import Any, Concatenate, Protocol, overload

from sgl_vllm.lang.call_types import P
from sgl_vllm.lang.keywords import suggests
from sgl_vllm.lang.program import Program
from sgl_vllm.lang.state import AsyncProgramState, ProgramState, R


class Decorator(Protocol):
    """``@function()``, with or without options of its own."""

    @overload
    def __call__(
        self, func: Callable[Concatenate[AsyncProgramState, P], Coroutine[Any, Any, R]], /
    ) -> Program[P, R]: ...
    @overload
    def __call__(self, func: Callable[Concatenate[ProgramState, P], R], /) -> Program[P, R]: ...


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
        return Program(func, num_api_spec_tokens=num_api_spec_tokens)

    return program if func is None else program(func)
