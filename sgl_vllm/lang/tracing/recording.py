"""The prompt `s` of a traced program: the interface of a running one, which records.

Owns how what a function appends, forks, joins and reads becomes nodes of a graph. Sends nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Literal, NoReturn  # Any: as in the classes that are replaced here

from sgl_vllm.lang.ir import Expr, Text, Value, VariableExpr, name_of, names_read, parts_of
from sgl_vllm.lang.operations import variable_named
from sgl_vllm.lang.state import AsyncProgramState, State
from sgl_vllm.lang.tracing.errors import Stop, program_frame, stop, unwatched
from sgl_vllm.lang.tracing.nodes import (
    Evaluate,
    Node,
    ReadPrompt,
    SetVariable,
    StreamTrace,
    TracedFork,
    TracedJoin,
    TracedOperation,
    Write,
    ends_prefix,
)
from sgl_vllm.lang.tracing.standin import (
    Definition,
    Leaf,
    Notes,
    Recorded,
    StandIn,
    definitions_in,
    exprs_in,
    fixed,
    names_of,
    pieces_of,
    why,
)
from sgl_vllm.lang.transcript import Variable

MAX_NODES = 50_000


class TraceRecorder(Notes):
    """Collects the nodes of one trace. With `is_prefix_only`, ends it after the prompt's prefix."""

    def __init__(self, *, is_prefix_only: bool) -> None:
        super().__init__()
        self.nodes: list[Node] = []
        self.streams: list[StreamTrace] = []
        self.values: dict[Definition, Value] = {}
        self.joined: set[Definition] = set()
        self.is_prefix_only = is_prefix_only
        self._read: dict[Leaf, StandIn] = {}

    def new_stream(self, parent: RecordingStream | None, branch: int) -> RecordingStream:
        index = len(self.streams)
        self.streams.append(StreamTrace(index, parent.index if parent else None, branch))
        return RecordingStream(self, index, parent)

    def value(self, definition: Definition) -> Value:
        """What is known of a variable."""
        if definition not in self.values:
            self.values[definition] = StandIn.of(Leaf("value", definition.name, definition))
        return self.values[definition]

    def read(
        self, definition: Definition, aspect: Literal["value", "meta", "text", "messages"]
    ) -> StandIn:
        """What the function reads, for which it waits."""
        leaf = Leaf(aspect, definition.name, definition)
        if leaf not in self._read:
            self._read[leaf] = StandIn.of(leaf, is_text=aspect == "text")
            self.actions.append(self._read[leaf])
        return self._read[leaf]


class RecordingStream:
    """Has the methods of `Stream` that states and groups write through. Definitions take the place
    of the futures of variables."""

    where = ""

    def __init__(self, recorder: TraceRecorder, index: int, parent: RecordingStream | None) -> None:
        self.recorder = recorder
        self.index = index
        self.variables: dict[str, Definition] = dict(parent.variables) if parent else {}
        self.bound_names: dict[str, None] = {}
        self._last: Definition | None = None

    def __getattr__(self, name: str) -> NoReturn:
        stop("this depends on the run", "read it after run()")

    def _add(
        self,
        operation: TracedOperation,
        reads: Sequence[Definition] = (),
        writes: Sequence[str | None] = (),
    ) -> Node:
        """Record an operation, which reads definitions and makes variables of these names."""
        recorder, frame = self.recorder, program_frame()
        index, line = len(recorder.nodes), frame.f_lineno if frame else 0
        if index >= MAX_NODES:
            stop(f"the program has more than {MAX_NODES} operations")
        made = tuple(Definition(name, index) for name in writes)
        read = tuple(dict.fromkeys(reads))
        node = Node(index, self.index, operation, read, made, line, len(recorder.actions))
        recorder.nodes.append(node)
        if recorder.is_prefix_only and self.index == 0 and ends_prefix(operation):
            raise Stop(None)
        self._last = Definition(None, index)
        for definition in made:
            if definition.name is not None:
                self.bind(definition.name, definition)
        return node

    @unwatched
    def append(self, value: Expr | str) -> None:
        """``s += value``."""
        text: list[str | StandIn] = []
        for part in parts_of(value):
            for piece in pieces_of(part.value if isinstance(part, Text) else part):
                if isinstance(piece, str) and text and isinstance(text[-1], str):
                    text[-1] += piece
                elif isinstance(piece, str):
                    text.append(piece)
                elif isinstance(piece, StandIn) and not piece._is_expr:
                    if not piece._is_text:
                        StandIn("parts_of", parts_of, (piece,))  # a step, which may fail
                    text.append(piece)
                else:
                    self._write(text)
                    self._evaluate(piece)
                    text = []
        self._write(text)

    def _write(self, pieces: Sequence[str | StandIn]) -> None:
        if pieces:
            self._add(Write(tuple(pieces)), definitions_in(pieces))

    def _evaluate(self, expr: Expr) -> None:
        reads, inside = [*definitions_in([expr])], [*exprs_in(expr)]
        # A primitive makes variables itself, which expressions among its arguments may read.
        parts = inside if isinstance(expr, StandIn) else []
        made = {name for part in parts for name in names_of(part)}
        for name in (name for part in inside for name in names_read(part)):
            if name in self.variables or name not in made:
                reads.append(self.variable(name))
        self._add(Evaluate(expr), reads, names_of(expr))

    def set(self, name: str, value: Value) -> None:
        """Give a variable a value of the program's own."""
        operation = SetVariable(name, fixed(value))
        (definition,) = self._add(operation, definitions_in([operation.value]), [name]).writes
        self.recorder.values[definition] = operation.value if isinstance(value, str) else value

    def bind(self, name: str, definition: Definition) -> None:
        self.variables[name] = definition
        self.bound_names[name] = None

    def variable(self, name: Value) -> Definition:
        if isinstance(name, StandIn):  # the expression that makes it, at best
            name = name._name or stop(f"the name of a variable depends on {why(name)}")
        found: Any = variable_named(name, self.variables)  # type: ignore[arg-type]
        return found

    def known(self, definition: Definition) -> Variable:
        """What is known of a variable that the function reads."""
        self.recorder.read(definition, "value")
        is_joined = definition in self.recorder.joined
        return Variable(self.recorder.value(definition), "", is_joined=is_joined)

    def read_prompt(self, aspect: Literal["text", "messages"] = "text") -> StandIn:
        """What the function reads of the prompt."""
        (definition,) = self._add(ReadPrompt(), writes=[None]).writes
        return self.recorder.read(definition, aspect)

    def fork(self, size: int) -> list[RecordingStream]:
        branches = [self.recorder.new_stream(self, i) for i in range(size)]
        self._add(TracedFork(tuple(branch.index for branch in branches)))
        return branches

    def gather(self, name: str, branches: Sequence[RecordingStream]) -> None:
        reads = [branch.variables[name] for branch in branches]
        join = TracedJoin(tuple(branch.index for branch in branches), name)
        (definition,) = self._add(join, reads, [name]).writes
        self.recorder.values[definition] = [*map(self.recorder.value, reads)]
        self.recorder.joined.add(definition)

    def append_texts(self, branches: Sequence[RecordingStream]) -> None:
        ends = [branch._last for branch in branches if branch._last is not None]
        self._add(TracedJoin(tuple(branch.index for branch in branches), None), ends)


class _Prompt(Recorded, State):
    """A state that records. What is not here is as in a run."""

    _stream: Any  # a RecordingStream

    def as_standin(self) -> StandIn:
        return StandIn.of(Leaf("state", stream=self._stream.index))

    def set_var(self, name: str, value: object) -> None:
        self._stream.set(name, value)

    def _variable(self, name: str) -> Any:
        return self._stream.known(self._stream.variable(name))

    def get_meta_info(self, name: str | VariableExpr) -> Any:
        return self._stream.recorder.read(self._stream.variable(name_of(name)), "meta")

    def text(self) -> Any:
        return self._stream.read_prompt()

    def messages(self) -> Any:
        return self._stream.read_prompt("messages")

    def sync(self) -> Any:
        self._stream.read_prompt()

    def error(self) -> Any:
        stop("whether an operation fails depends on the run")


def _awaited(method: Callable[..., Any]) -> Callable[..., Coroutine[Any, Any, Any]]:
    async def call(*args: object) -> Any:
        return method(*args)

    return call


class _AsyncPrompt(_Prompt, AsyncProgramState):
    get_meta_info = _awaited(_Prompt.get_meta_info)
    text = _awaited(_Prompt.text)
    messages = _awaited(_Prompt.messages)
    sync = _awaited(_Prompt.sync)

    async def _result(self, future: Any) -> Any:
        return self._stream.known(future)


@functools.cache
def recording_class(state_class: type[State], is_async: bool) -> type[State]:
    """The class of states that record, with the methods of `state_class`."""
    return _AsyncPrompt if is_async else type("Recording", (_Prompt, state_class), {})
