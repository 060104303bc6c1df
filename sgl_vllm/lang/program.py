"""Programs: what `@function` makes, and what compiling makes of that.

Owns what can be done with a program beside running it (`runnable.py`): fixing arguments, tracing,
caching its prefix, compiling it, and moving its code.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass

# Any: arguments of the user's function
from typing import TYPE_CHECKING, Any, Concatenate, Generic, Protocol, Unpack, overload

from sgl_vllm.lang.backends.base import Backend
from sgl_vllm.lang.body import Item
from sgl_vllm.lang.ir import Expr, Text, Value
from sgl_vllm.lang.keywords import refuse_unknown, suggests
from sgl_vllm.lang.loop import background_loop
from sgl_vllm.lang.options import Options, P, RunOptions
from sgl_vllm.lang.ordering import NOTHING_PLANNED, PlannedOrders, mentions, planned
from sgl_vllm.lang.runnable import RUN_OPTIONS, Runnable
from sgl_vllm.lang.settings import chosen_backend
from sgl_vllm.lang.state import AsyncProgramState, ProgramState, R, State
from sgl_vllm.lang.tracing.errors import stop
from sgl_vllm.lang.tracing.standin import Recorded
from sgl_vllm.lang.transcript import Transcript
from sgl_vllm.lang.usage import Usage
from sgl_vllm.lang.waiting import waiting

if TYPE_CHECKING:
    from sgl_vllm.lang.graph_run import GraphRun
    from sgl_vllm.lang.reordering import Planner, PromptPiece
    from sgl_vllm.lang.tracing.trace import Graph

# What tracing needs is imported when used: few programs do, and it costs milliseconds.


class Program(Runnable[P, R]):
    """A function whose first parameter `s` is the prompt it writes; made by `@function`.

    The function is a plain ``def``, whose `s` is a `ProgramState`, or an ``async def``, whose `s`
    is an `AsyncProgramState`. Both kinds run with `run` and `run_batch`, which block the thread,
    and with `run_async` and `run_batch_async` in code that is itself async.

    Type checkers know the parameters `P` without `s`, and the type `R` of what it returns.
    """

    def bind(self, /, **kwargs: Any) -> Program[..., R]:
        """This program with some of its arguments fixed; a call can still replace them. TypeError
        for unknown arguments."""
        self._check_names(kwargs)
        return type(self)(self.func, {**self.bound, **kwargs}, self.num_api_spec_tokens)

    def with_options(self, **options: Unpack[RunOptions]) -> ProgramWithOptions[P, R]:
        """The program with these options of `run` for its calls: ``run`` and ``run_async`` then
        take the program's own arguments alone, and type checkers check all of both."""
        refuse_unknown("with_options", options, RUN_OPTIONS)
        return ProgramWithOptions(self, Options.of(options))

    def trace(self, /, *args: Any, backend: Backend | None = None, **known: Any) -> Graph:
        """The program as a graph: what it appends, forks and joins, and which operations use which
        variables. The function is called, with stand-ins for the arguments that are not given and
        for what the model will answer; no request is sent.

        Raises TraceError where the program asks a stand-in for its value, such as to branch on it,
        and where it is about to have an effect outside of its prompt; `TraceError.graph` is then
        the part before that. `backend` is accepted for SGLang's programs and ignored.
        """
        from sgl_vllm.lang.tracing.trace import trace

        return trace(self, *args, **known)

    def compile(
        self, /, *args: Any, backend: Backend | None = None, **known: Any
    ) -> CompiledProgram[R]:
        """A program that gives the same results by running the graph instead of the function. The
        arguments given are fixed. Raises TraceError, and ignores `backend`, as `trace` does."""
        return CompiledProgram(self, self.trace(*args, **known))

    def cache(self, /, backend: Backend | None = None, **known: Any) -> Usage:
        """Have the server compute and cache what the prompts of all runs begin with: constant text
        and turns, up to the first generation or argument that is not in `known`.

        Does nothing if that is short. Raises BackendError if the server does not answer.
        """
        prefix = self._shared_prompt([known])
        if not prefix.is_worth_warming:
            return Usage()
        background = background_loop()
        return background.wait_for(background.start(chosen_backend(backend).warm(prefix.prompt())))

    def _shared_prefix(self, items: Sequence[Item]) -> tuple[Expr, ...]:
        from sgl_vllm.lang.prefixes import shared_prefix

        return shared_prefix(self, items)

    def _shared_prompt(self, items: Sequence[Item]) -> Transcript:
        return self.state_class.transcript_class.of(self._shared_prefix(items))

    def _plan_orders(self, items: Sequence[Item]) -> PlannedOrders:
        if not mentions(self.func, "any_order"):
            return NOTHING_PLANNED
        from sgl_vllm.lang.prefixes import first_any_orders

        return planned(first_any_orders(self, items))


class ProgramWithOptions(Generic[P, R]):
    """A program whose options are set, made by `Program.with_options`. Its calls take exactly the
    program's parameters, also those with the name of an option."""

    def __init__(self, program: Program[P, R], options: Options) -> None:
        self._program = program
        self._options = options

    def run(self, /, *args: P.args, **kwargs: P.kwargs) -> ProgramState[R]:
        """As `Program.run`, with these options."""
        self._program._check_names(kwargs)
        return self._program._run(self._options, args, kwargs)

    async def run_async(self, /, *args: P.args, **kwargs: P.kwargs) -> ProgramState[R]:
        """As `Program.run_async`, with these options."""
        self._program._check_names(kwargs)
        return await self._program._run_async(self._options, args, kwargs)


class CompiledProgram(Program[..., R]):
    """A program whose operations are known before it runs.

    It runs as any program does (`run`, `run_batch`, `run_async`, ...), and gives the same
    variables, text, messages, returned value and usage as the program it was made of. It calls the
    same tools, and none that is not read-only before the function would. It takes the arguments
    that were not given when it was compiled. A run holds no thread, and computes only what depends
    on arguments or variables. What the function computed without them was computed when it was
    compiled.
    """

    def __init__(self, program: Program[..., R], graph: Graph) -> None:
        from sgl_vllm.lang.graph_run import GraphRun

        signature = _open_signature(program, graph)

        def submit(s: State, /, *args: Any, **kwargs: Any) -> GraphRun:
            bound = signature.bind(s, *args, **kwargs)
            bound.apply_defaults()
            state = program.state_class(s._stream)
            run = GraphRun(graph, state, bound.arguments)
            run.submit()
            return run

        @functools.wraps(program.func)
        async def body(s: State, /, *args: Any, **kwargs: Any) -> Value:
            return await submit(s, *args, **kwargs).result()

        body.__signature__ = signature  # type: ignore[attr-defined]
        super().__init__(body, None, program.num_api_spec_tokens)
        self.state_class = program.state_class
        self._submit = submit
        self.program = program
        self.graph = graph

    def __call__(self, /, *args: Any, **kwargs: Any) -> Value:
        """The same as `run`. Inside another program, ``compiled(s, ...)`` writes to that program's
        prompt."""
        if not (args and isinstance(args[0], State)):
            return self.run(*args, **kwargs)
        if isinstance(args[0], Recorded):
            stop("a compiled program cannot be traced", "call the program it was made of")
        run_inside = functools.partial(self._run_inside, *args, **{**self.bound, **kwargs})
        if isinstance(args[0], ProgramState):
            stream = args[0]._stream
            with waiting(*stream.queue.last()):
                return stream.run.background.run_blocking(run_inside)
        return run_inside()

    async def _run_inside(self, s: State, /, *args: Any, **kwargs: Any) -> Value:
        """In another program, which goes on afterwards."""
        return await self._submit(s, *args, **kwargs).result()

    def bind(self, /, **kwargs: Any) -> CompiledProgram[R]:
        """This program with some of its arguments given. TypeError for unknown ones."""
        self._check_names(kwargs)
        bound = copy.copy(self)
        bound.bound = {**self.bound, **kwargs}
        return bound

    def trace(self, /, *args: Any, backend: Backend | None = None, **known: Any) -> Graph:
        """As `Program.trace`, of the program that was compiled."""
        return self.program.trace(*args, **known)

    def compile(
        self, /, *args: Any, backend: Backend | None = None, **known: Any
    ) -> CompiledProgram[R]:
        """As `Program.compile`, of the program that was compiled."""
        return self.program.compile(*args, **known)

    def _shared_prefix(self, items: Sequence[Item]) -> tuple[Expr, ...]:
        from sgl_vllm.lang.prefixes import common_arguments, known_prefix

        return known_prefix(self.graph, common_arguments(self, items))

    def _plan_orders(self, items: Sequence[Item]) -> PlannedOrders:
        return NOTHING_PLANNED

    def print_graph(self) -> None:
        """Print the graph."""
        print(self.graph)

    def reordered(self, planner: Planner | None = None) -> Reordering[R]:
        """The same program with its prompt's leading pieces in another order; see `Reordering`.

        `planner` gets the pieces and returns the new order of their numbers. By default, constants
        move before pieces that depend on arguments. ReorderError if the planner's answer is no
        permutation of the pieces, or puts a piece before another that it depends on.
        """
        from sgl_vllm.lang.reordering import constants_first, reorder

        graph, pieces, order = reorder(self.graph, planner or constants_first)
        return Reordering(self, CompiledProgram(self.program, graph), order, pieces)

    def _repr_html_(self) -> str:
        return self.graph._repr_html_()


def _open_signature(program: Program, graph: Graph) -> inspect.Signature:
    """The function's signature without the known arguments; those after one are keyword-only."""
    kinds = inspect.Parameter
    first, *others = inspect.signature(program.func).parameters.values()
    parameters = [first.replace(kind=kinds.POSITIONAL_ONLY)]
    was_left_out = False
    for parameter in others:
        if parameter.kind in (kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD):
            raise TypeError(f"{graph.name} takes any number of arguments: it cannot be compiled")
        if parameter.name in graph.known:
            was_left_out = True
        else:
            kind = kinds.KEYWORD_ONLY if was_left_out else parameter.kind
            parameters.append(parameter.replace(kind=kind))
    return inspect.Signature(parameters)


@dataclass(frozen=True)
class Reordering(Generic[R]):
    """A program before and after code movement (the SGLang paper, appendix D).

    The text that all runs share comes first, so that the server finds more of each prompt in its
    cache. The model reads a different prompt and may answer differently: read `diff` before you use
    `program`.
    """

    before: CompiledProgram[R]
    program: CompiledProgram[R]
    order: tuple[int, ...]
    pieces: tuple[PromptPiece, ...]

    @property
    def shared_chars_before(self) -> int:
        """The number of characters that all prompts begin with, without the reordering."""
        return _num_shared_chars(self.before)

    @property
    def shared_chars_after(self) -> int:
        """The number of characters that all prompts begin with, with it."""
        return _num_shared_chars(self.program)

    def diff(self) -> str:
        """The prompt before and after as a unified diff; "" if nothing moved."""
        from sgl_vllm.lang.reordering import difference

        return difference(self.pieces, self.order)


def _num_shared_chars(program: CompiledProgram) -> int:
    """The number of characters that all prompts begin with."""
    from sgl_vllm.lang.prefixes import known_prefix

    return sum(len(one.value) for one in known_prefix(program.graph) if isinstance(one, Text))


# --- the decorator --------------------------------------------------------------------------------


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
