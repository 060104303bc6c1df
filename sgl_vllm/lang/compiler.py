"""Compiled programs: a graph that is run without the function it came from; and code movement.

Owns how a graph becomes operations of a run, and the reordering of prompts. Tracing is
`trace.py`'s, running the operations the interpreter's: every stream of a graph is a stream there,
with its own task, and nothing waits for a variable but the operations that need it.
"""

from __future__ import annotations

import copy
import difflib
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from sgl_vllm.lang.backends.base import Backend
from sgl_vllm.lang.batch import Item
from sgl_vllm.lang.errors import ProgramError
from sgl_vllm.lang.group import ProgramGroup
from sgl_vllm.lang.ir import Computed, Expr, ExprList, Gen, Select, Text, Tool, Var
from sgl_vllm.lang.loop import new_future, result_of
from sgl_vllm.lang.program import Program
from sgl_vllm.lang.state import ProgramState, State
from sgl_vllm.lang.stream import Stream
from sgl_vllm.lang.tracing.deferred import (
    Argument,
    Deferred,
    Definition,
    Environment,
    Leaf,
    Prompt,
    Reading,
    Template,
    concatenation,
)
from sgl_vllm.lang.tracing.graph import (
    Evaluate,
    EvaluateDeferred,
    Fork,
    Graph,
    Join,
    Node,
    ReadPrompt,
    SetVariable,
    Write,
)
from sgl_vllm.lang.tracing.graph_view import text_of
from sgl_vllm.lang.tracing.trace import common_arguments, trace
from sgl_vllm.lang.transcript import Transcript, Variable, meta_info

# --- running a graph -----------------------------------------------------------------------------


class _Frame(Environment):
    """One run of a compiled program: its arguments, its prompts, the futures of its variables."""

    def __init__(self, root: State, arguments: Mapping[str, Any], num_streams: int) -> None:
        super().__init__()
        self.arguments = arguments
        self.states: list[Any] = [root] + [None] * (num_streams - 1)
        self.groups: dict[tuple[int, ...], ProgramGroup[Any]] = {}
        self.futures: dict[Definition, Future[Any]] = {}
        self.awaited: list[Future[Any]] = []
        self.error: Exception | None = None

    def stream(self, index: int) -> Stream:
        stream: Stream = self.states[index]._stream
        return stream

    def leaf(self, leaf: Leaf) -> Any:
        match leaf:
            case Argument(name):
                return self.arguments[name]
            case Prompt(index):
                return self.states[index]
            case Reading(definition, aspect):
                return self._read(definition, aspect)

    def _read(self, definition: Definition, aspect: str) -> Any:
        future = self.futures[definition]
        assert future.done(), f"{definition} was used before it was waited for"
        variable: Variable = future.result()
        if aspect == "value":
            return variable.value
        if aspect == "meta":
            return meta_info(variable)
        transcript: Transcript = variable.value
        if aspect == "text":
            return transcript.text
        return [message.as_dict() for message in transcript.all_messages()]

    @contextmanager
    def raising_own_errors(self) -> Iterator[None]:
        """What an expression of the program raised comes out as it is, as it would if the function
        had run."""
        try:
            yield
        except ProgramError:
            if self.error is not None:
                raise self.error from None
            raise

    def later(self, wanted: Deferred) -> Any:
        """The value of `wanted`, inside of the run; what it raises is the program's own error."""
        try:
            return self.value(wanted)
        except ProgramError:
            raise
        except Exception as error:
            self.error = self.error or error
            raise


_Step: TypeAlias = Callable[[_Frame], None]


def _appending(stream: int, parts: Sequence[Expr | Deferred], keep: Sequence[Definition]) -> _Step:
    """Append expressions, some of which only depend on arguments."""
    kept = [(definition, definition.name) for definition in keep if definition.name is not None]
    if all(isinstance(part, Expr) for part in parts):
        constant = ExprList(tuple(parts))  # type: ignore[arg-type]

        def append_constant(frame: _Frame) -> None:
            target = frame.stream(stream)
            target.append(constant)
            for definition, name in kept:
                frame.futures[definition] = target.variables[name]

        return append_constant

    def append(frame: _Frame) -> None:
        target = frame.stream(stream)
        for part in parts:
            target.append(frame.value(part) if isinstance(part, Deferred) else part)
        for definition, name in kept:
            frame.futures[definition] = target.variables[name]

    return append


def _computing(
    stream: int, wanted: Deferred, waits_for: Sequence[Definition], made: Sequence[Definition]
) -> _Step:
    """Append what depends on variables, once the variables of other streams are there too."""

    def compute(frame: _Frame) -> None:
        target = frame.stream(stream)
        name = made[0].name if made else None
        needed = {str(i): frame.futures[d] for i, d in enumerate(waits_for)}
        expr = Computed(lambda values: frame.later(wanted), name=name)
        future = target.submit(expr, needed)
        frame.awaited.append(future)
        if name is not None:
            target.bind(name, future)
            frame.futures[made[0]] = future

    return compute


def _setting(stream: int, name: str, template: Template, made: Definition) -> _Step:
    readings = [d for part in template.inputs for d in part.readings]

    def assign(frame: _Frame) -> None:
        frame.states[stream].set_var(name, frame.filled(template))
        frame.futures[made] = frame.stream(stream).variables[name]

    def assign_later(frame: _Frame) -> None:
        def value() -> Variable:
            return Variable.of(frame.filled(template))

        future = _after([frame.futures[d] for d in readings], value)
        frame.awaited.append(future)
        frame.stream(stream).bind(name, future)
        frame.futures[made] = future

    return assign_later if readings else assign


def _after(sources: Sequence[Future[Any]], value: Callable[[], Any]) -> Future[Any]:
    """A future of `value()`, which is called when all `sources` are done; of the first's error if
    one fails."""
    future: Future[Any] = new_future()
    lock = threading.Lock()
    remaining = len(sources)

    def one_done(_: Future[Any]) -> None:
        nonlocal remaining
        with lock:
            remaining -= 1
            if remaining:
                return
        try:
            for source in sources:
                source.result()
            future.set_result(value())
        except Exception as error:
            future.set_exception(error)

    for source in sources:
        source.add_done_callback(one_done)
    return future


def _reading(stream: int, made: Definition) -> _Step:
    def read(frame: _Frame) -> None:
        transcript = frame.stream(stream).read()
        frame.futures[made] = _after(
            [transcript], lambda: Variable(value=transcript.result(), text="")
        )

    return read


def _forking(stream: int, children: tuple[int, ...]) -> _Step:
    def fork(frame: _Frame) -> None:
        group = frame.states[stream].fork(len(children))
        frame.groups[children] = group
        for child, state in zip(children, group, strict=True):
            frame.states[child] = state

    return fork


def _joining(operation: Join, stream: int, made: Sequence[Definition]) -> _Step:
    def join(frame: _Frame) -> None:
        frame.groups[operation.branches].join(operation.mode)  # type: ignore[arg-type]
        variables = frame.stream(stream).variables
        for definition in made:
            assert definition.name is not None
            frame.futures[definition] = variables[definition.name]

    return join


class _Compilation:
    """Makes the steps of a graph.

    Neighbouring texts become one, and what does not depend on variables is submitted as it is.
    `_settled` are, per stream, the definitions that are there when an operation of it runs.
    """

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._steps: list[_Step] = []
        self._texts: dict[int, list[str | Deferred]] = {}
        self._parts: dict[int, list[Expr | Deferred]] = {}
        self._made: dict[int, list[Definition]] = {}
        self._settled: dict[int, set[Definition]] = {0: set()}

    def steps(self) -> tuple[_Step, ...]:
        for node in self._graph.nodes:
            self._add(node)
        for stream in self._settled:
            self._flush(stream)
        return tuple(self._steps)

    def _add(self, node: Node) -> None:
        stream = node.stream
        settled = self._settled[stream]
        match node.operation:
            case Write(pieces):
                self._texts.setdefault(stream, []).extend(pieces)
                return
            case Evaluate(expr):
                self._flush_text(stream)
                self._parts.setdefault(stream, []).append(expr)
                self._made.setdefault(stream, []).extend(node.writes)
                settled.update(node.reads)
            case EvaluateDeferred(value):
                self._flush_text(stream)
                if node.reads:
                    self._flush(stream)
                    self._compute(stream, value, node.reads, node.writes)
                else:
                    self._parts.setdefault(stream, []).append(value)
                    self._made.setdefault(stream, []).extend(node.writes)
            case SetVariable(name, template):
                self._flush(stream)
                self._steps.append(_setting(stream, name, template, node.writes[0]))
                settled.update(() if node.reads else node.writes)
                return
            case ReadPrompt():
                self._flush(stream)
                self._steps.append(_reading(stream, node.writes[0]))
            case Fork(children):
                self._flush(stream)
                self._steps.append(_forking(stream, children))
                for child in children:
                    self._settled[child] = set(settled)
            case Join(branches, _) as join:
                for other in (*branches, stream):
                    self._flush(other)
                self._steps.append(_joining(join, stream, node.writes))
                if join.mode == "gather_variable":
                    settled.update(node.reads)
                else:
                    settled.update(*(self._settled[branch] for branch in branches))
        settled.update(node.writes)

    def _compute(
        self,
        stream: int,
        value: Deferred,
        reads: Sequence[Definition],
        made: Sequence[Definition] = (),
    ) -> None:
        settled = self._settled[stream]
        for other in {read.stream for read in reads} - {stream}:
            self._flush(other)
        missing = [read for read in reads if read not in settled]
        self._steps.append(_computing(stream, value, missing, made))
        settled.update(reads)

    def _flush_text(self, stream: int) -> None:
        """What was written so far becomes one text, or one computation."""
        pieces = self._texts.pop(stream, [])
        if not pieces:
            return
        deferred = [piece for piece in pieces if isinstance(piece, Deferred)]
        parts = self._parts.setdefault(stream, [])
        if not deferred:
            parts.append(Text("".join(pieces)))  # type: ignore[arg-type]
            return
        whole = deferred[0] if len(pieces) == 1 else concatenation(pieces)
        if not whole.readings:
            parts.append(whole)
            return
        self._flush_parts(stream)
        self._compute(stream, whole, whole.readings)

    def _flush_parts(self, stream: int) -> None:
        parts = self._parts.pop(stream, [])
        if parts:
            self._steps.append(_appending(stream, parts, self._made.pop(stream, [])))

    def _flush(self, stream: int) -> None:
        self._flush_text(stream)
        self._flush_parts(stream)


class CompiledProgram(Program):
    """A program whose operations are known before it runs.

    It runs as any program does (`run`, `run_batch`, `run_async`, ...), gives the same variables,
    text, messages, returned value and usage as the program it was made of, and takes those of its
    arguments that were not given when it was compiled. A run holds no thread, and computes only
    what depends on arguments or variables. What the program reads from globals was read when it
    was compiled.
    """

    def __init__(self, program: Program, graph: Graph) -> None:
        self.program = program
        self.graph = graph
        self._steps = _Compilation(graph).steps()
        readings = [d for part in graph.returned.inputs for d in part.readings]
        waits = bool(readings) or any(
            node.reads and isinstance(node.operation, (Write, EvaluateDeferred, SetVariable))
            for node in graph.nodes
        )
        self._signature = _open_signature(program, graph)
        self._names = frozenset(list(self._signature.parameters)[1:])
        self._readings = tuple(readings)

        def body(s: ProgramState, /, *args: Any, **kwargs: Any) -> Any:
            frame = self._start(s, args, kwargs)
            if waits:
                with frame.raising_own_errors():
                    s._stream.run.background.wait_for(self._computed(frame))
            return frame.filled(graph.returned)

        async def async_body(s: State, /, *args: Any, **kwargs: Any) -> Any:
            frame = self._start(s, args, kwargs)
            if waits:
                with frame.raising_own_errors():
                    await result_of(self._computed(frame))
            return frame.filled(graph.returned)

        for function in (body, async_body):
            self._dress(function)
        super().__init__(body, None, program.num_api_spec_tokens)
        # The same, without a thread that waits: for many runs, and on an event loop.
        self._threadless = copy.copy(self)
        self._threadless.func = async_body
        self._threadless.is_async = True

    def _dress(self, function: Any) -> None:
        original = self.program.func
        function.__name__, function.__qualname__ = self.graph.name, original.__qualname__
        function.__module__, function.__doc__ = original.__module__, original.__doc__
        function.__signature__ = self._signature

    async def run_async(self, *args: Any, **kwargs: Any) -> ProgramState:
        """As `Program.run_async`."""
        return await Program.run_async(self._threadless, *args, **kwargs)

    def _batch(self, *args: Any) -> Any:
        return Program._batch(self._threadless, *args)

    def _start(self, s: State, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Frame:
        """Submit everything; nothing is waited for."""
        if args or kwargs.keys() != self._names:
            bound = self._signature.bind(s, *args, **kwargs)
            bound.apply_defaults()
            kwargs = bound.arguments
        frame = _Frame(s, kwargs, len(self.graph.streams))
        for step in self._steps:
            step(frame)
        return frame

    def _computed(self, frame: _Frame) -> Future[None]:
        """Done when all that the program itself computes is, and what it returns is known."""
        awaited = [*frame.awaited, *(frame.futures[read] for read in self._readings)]
        return _after(awaited, lambda: None)

    def bind(self, **kwargs: Any) -> CompiledProgram:
        """This program with some of its arguments given. TypeError for unknown ones."""
        self._check_names(kwargs)
        bound, threadless = copy.copy(self), copy.copy(self._threadless)
        bound.bound = threadless.bound = {**self.bound, **kwargs}
        bound._threadless = threadless
        return bound

    def trace(self, *args: Any, backend: Backend | None = None, **known: Any) -> Graph:
        """As `Program.trace`, of the program that was compiled."""
        return self.program.trace(*args, backend=backend, **known)

    def compile(self, *args: Any, backend: Backend | None = None, **known: Any) -> CompiledProgram:
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

        `planner` gets the pieces and gives the new order of their numbers; without one, constants
        come before what depends on arguments. ReorderError if the planner's answer is no order of
        the pieces, or puts a piece before another that it depends on.
        """
        return _reordered(self, planner or constants_first)

    def _repr_html_(self) -> str:
        return self.graph._repr_html_()


def _open_signature(program: Program, graph: Graph) -> inspect.Signature:
    """The function's signature without what is known; what follows that is keyword-only."""
    kinds = inspect.Parameter
    first, *others = inspect.signature(program.func).parameters.values()
    parameters = [first.replace(kind=kinds.POSITIONAL_ONLY)]
    was_left_out = False
    for parameter in others:
        if parameter.kind in (kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD):
            raise TypeError(f"{graph.name} takes any number of arguments: it cannot be compiled")
        if parameter.name in graph.known:
            was_left_out = True
        elif was_left_out:
            parameters.append(parameter.replace(kind=kinds.KEYWORD_ONLY))
        else:
            parameters.append(parameter)
    return inspect.Signature(parameters)


def compile_program(program: Program, /, *args: Any, **known: Any) -> CompiledProgram:
    """Compile `program`; the arguments that are given are fixed, the others are left to runs.

    TraceError if the program cannot be traced to its end (see `trace`); TypeError for arguments
    that it does not take. The function is not called, neither now nor by the runs.
    """
    return CompiledProgram(program, trace(program, *args, **known))


# --- code movement -------------------------------------------------------------------------------


class ReorderError(ValueError):
    """A planner's answer that cannot be used."""


@dataclass(frozen=True)
class PromptPiece:
    """A piece of a prompt that may be moved.

    `text` shows it: arguments and variables are in braces, a generation is in brackets.
    `is_constant` says that it is text that all runs have in common. `needs` are the numbers of
    pieces that must come before it, because it uses their variables.
    """

    number: int
    text: str
    is_constant: bool
    is_text: bool
    needs: frozenset[int]


Planner: TypeAlias = Callable[[Sequence[PromptPiece]], Sequence[int]]


@dataclass(frozen=True)
class Reordering:
    """A program before and after code movement (the SGLang paper, appendix D).

    What all runs have in common comes first, so that the server has more of each prompt in its
    cache. The prompt is another one: a model may answer it differently. Read `diff` before using
    `program`.
    """

    before: CompiledProgram
    program: CompiledProgram
    order: tuple[int, ...]
    pieces: tuple[PromptPiece, ...]

    @property
    def shared_chars_before(self) -> int:
        """Characters that all prompts begin with, without the reordering."""
        return _num_chars(self.before.graph)

    @property
    def shared_chars_after(self) -> int:
        """Characters that all prompts begin with, with it."""
        return _num_chars(self.program.graph)

    def diff(self) -> str:
        """The prompt before and after as a unified diff; "" if nothing moved."""
        before = [line for piece in self.pieces for line in _lines(piece)]
        after = [line for number in self.order for line in _lines(self.pieces[number])]
        return "\n".join(
            difflib.unified_diff(before, after, "before", "after", lineterm="", n=len(before))
        )


def _num_chars(graph: Graph) -> int:
    return sum(len(expr.value) for expr in graph.prefix() if isinstance(expr, Text))


def _lines(piece: PromptPiece) -> list[str]:
    # A line break within a piece is shown as one, and the one at its end is not.
    return piece.text.removesuffix("\n").split("\n")


def constants_first(pieces: Sequence[PromptPiece]) -> list[int]:
    """The built-in planner: of the text before the first generation, constants come first. The
    order among constants, and among all others, stays."""
    end = next((i for i, piece in enumerate(pieces) if not piece.is_text), len(pieces))
    leading, rest = pieces[:end], pieces[end:]
    first = [piece for piece in leading if piece.is_constant]
    others = [piece for piece in leading if not piece.is_constant]
    return [piece.number for piece in (*first, *others, *rest)]


_MOVABLE_EXPRESSIONS = (Gen, Select, Var, Tool)


def _movable(graph: Graph) -> list[Node]:
    """The leading pieces of the root prompt: neighbouring nodes in the same turn, before the first
    fork, from the first text on."""
    region: list[Node] = []
    for node in graph.streams[0].nodes:
        match node.operation:
            case Write() | EvaluateDeferred():
                region.append(node)
            case Evaluate(expr) if isinstance(expr, _MOVABLE_EXPRESSIONS):
                region.append(node)
            case _ if any(_is_varying(n) for n in region):
                break
            case Fork() | Join():
                break
            case _:
                region = []
    return region


def _is_varying(node: Node) -> bool:
    return not isinstance(node.operation, Write) or node.operation.known_text is None


def _pieces(nodes: Sequence[Node]) -> tuple[PromptPiece, ...]:
    number_of = {node.index: number for number, node in enumerate(nodes)}
    return tuple(
        PromptPiece(
            number,
            text_of(node.operation.pieces) if isinstance(node.operation, Write) else f"[{node}]",
            not _is_varying(node),
            isinstance(node.operation, Write) and not node.reads,
            frozenset(number_of[read.node] for read in node.reads if read.node in number_of),
        )
        for number, node in enumerate(nodes)
    )


def _checked(order: Sequence[int], pieces: Sequence[PromptPiece]) -> tuple[int, ...]:
    answer = tuple(order)
    numbers = {i for i in answer if type(i) is int}
    if len(answer) != len(pieces) or numbers != set(range(len(pieces))):
        raise ReorderError(
            f"the planner's order {list(answer)} is no permutation of the pieces 0 to "
            f"{len(pieces) - 1}"
        )
    place = {number: i for i, number in enumerate(answer)}
    for piece in pieces:
        for needed in piece.needs:
            if place[needed] > place[piece.number]:
                raise ReorderError(
                    f"the planner's order {list(answer)} puts piece {piece.number} before piece "
                    f"{needed}, whose variable it uses"
                )
    return answer


def _reordered(compiled: CompiledProgram, planner: Planner) -> Reordering:
    graph = compiled.graph
    nodes = _movable(graph)
    pieces = _pieces(nodes)
    order = _checked(planner(pieces), pieces) if pieces else ()
    moved = iter([nodes[number] for number in order])
    places = {node.index for node in nodes}

    def arranged(old: Sequence[Node]) -> tuple[Node, ...]:
        # The pieces are neighbours in the root stream, and before any fork: so they are in `old`.
        return tuple(new_of[node.index] if node.index in places else node for node in old)

    new_of = {node.index: next(moved) for node in nodes}
    root = replace(graph.streams[0], nodes=arranged(graph.streams[0].nodes))
    after = replace(graph, streams=(root, *graph.streams[1:]), nodes=arranged(graph.nodes))
    return Reordering(compiled, CompiledProgram(compiled.program, after), order, pieces)
