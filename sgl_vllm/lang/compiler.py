"""Compiled programs: a graph that runs without the function it came from.

Owns the program that is made of a graph. Tracing is in `tracing/trace.py`, how a graph runs in
`graph_run.py`, code movement in `reordering.py`.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any  # Any: arguments of the user's function

from sgl_vllm.lang.backends.base import Backend
from sgl_vllm.lang.batch import Item
from sgl_vllm.lang.graph_run import GraphRun
from sgl_vllm.lang.ir import Expr, Value
from sgl_vllm.lang.program import Program
from sgl_vllm.lang.reordering import (
    Planner,
    PromptPiece,
    ReorderError,
    constants_first,
    difference,
    num_shared_chars,
    reorder,
)
from sgl_vllm.lang.state import ProgramState, R, State
from sgl_vllm.lang.tracing.generations import generations_of
from sgl_vllm.lang.tracing.graph import Graph
from sgl_vllm.lang.tracing.trace import common_arguments, trace
from sgl_vllm.lang.waiting import waiting

__all__ = ["CompiledProgram", "ReorderError", "Reordering", "compile_program"]


class CompiledProgram(Program[..., R]):
    """A program whose operations are known before it runs.

    It runs as any program does (`run`, `run_batch`, `run_async`, ...), and gives the same
    variables, text, messages, returned value and usage as the program it was made of. It calls the
    same tools, and none that is not read-only before the function would. It takes the arguments
    that were not given when it was compiled. A run holds no thread, and computes only what depends
    on arguments or variables. Globals of the program were read when it was compiled.
    """

    def __init__(self, program: Program[..., R], graph: Graph) -> None:
        signature = _open_signature(program, graph)
        generations = generations_of(graph)

        def submit(s: State, /, *args: Any, **kwargs: Any) -> GraphRun:
            bound = signature.bind(s, *args, **kwargs)
            bound.apply_defaults()
            state = program.state_class(s._stream)
            run = GraphRun(graph, generations, state, bound.arguments)
            run.submit()
            return run

        @functools.wraps(program.func)
        async def body(s: State, /, *args: Any, **kwargs: Any) -> Value:
            run = submit(s, *args, **kwargs)
            s._stream.run.lookahead.function_returned()  # it only waits from here on
            return await run.result()

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
        run_inside = functools.partial(self._run_inside, *args, **{**self.bound, **kwargs})
        if isinstance(args[0], ProgramState):
            stream = args[0]._stream
            with waiting(*stream.last()):
                return stream.run.background.call(run_inside)
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
        return self.program.trace(*args, backend=backend, **known)

    def compile(
        self, /, *args: Any, backend: Backend | None = None, **known: Any
    ) -> CompiledProgram[R]:
        """As `Program.compile`, of the program that was compiled."""
        return self.program.compile(*args, backend=backend, **known)

    def _shared_prefix(self, items: Sequence[Item]) -> tuple[Expr, ...]:
        try:
            return self.graph.prefix(common_arguments(self, items))
        except Exception:
            return ()

    def print_graph(self) -> None:
        """Print the graph."""
        print(self.graph)

    def reordered(self, planner: Planner | None = None) -> Reordering:
        """The same program with its prompt's leading pieces in another order; see `Reordering`.

        `planner` gets the pieces and returns the new order of their numbers. By default, constants
        move before pieces that depend on arguments. ReorderError if the planner's answer is no
        permutation of the pieces, or puts a piece before another that it depends on.
        """
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


def compile_program(program: Program[..., R], /, *args: Any, **known: Any) -> CompiledProgram[R]:
    """Compile `program`. Arguments that are given are fixed, the others are left to runs.

    TraceError if the program cannot be traced to its end (see `trace`); TypeError for arguments
    that it does not take. The function is not called, neither now nor by the runs.
    """
    return CompiledProgram(program, trace(program, *args, **known))


@dataclass(frozen=True)
class Reordering:
    """A program before and after code movement (the SGLang paper, appendix D).

    The text that all runs share comes first, so that the server finds more of each prompt in its
    cache. The model reads a different prompt and may answer differently: read `diff` before you use
    `program`.
    """

    before: CompiledProgram
    program: CompiledProgram
    order: tuple[int, ...]
    pieces: tuple[PromptPiece, ...]

    @property
    def shared_chars_before(self) -> int:
        """The number of characters that all prompts begin with, without the reordering."""
        return num_shared_chars(self.before.graph)

    @property
    def shared_chars_after(self) -> int:
        """The number of characters that all prompts begin with, with it."""
        return num_shared_chars(self.program.graph)

    def diff(self) -> str:
        """The prompt before and after as a unified diff; "" if nothing moved."""
        return difference(self.pieces, self.order)
