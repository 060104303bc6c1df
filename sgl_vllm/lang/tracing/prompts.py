"""Stand-ins for `s` and its turns while a program is traced.

Owns how operations on a prompt become nodes of a graph. The branches of a fork are in
`branches.py`. Sends no request.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import cast

from sgl_vllm.lang.ir import (
    Expr,
    Role,
    RoleBegin,
    RoleEnd,
    Text,
    Value,
    VarScopeBegin,
    VarScopeEnd,
    name_of,
    names_made,
    names_read,
    parts_of,
    refuse_joined,
)
from sgl_vllm.lang.primitives import PRIMITIVES
from sgl_vllm.lang.tracing.branches import TracedGroup
from sgl_vllm.lang.tracing.deferred import (
    Deferred,
    Definition,
    Piece,
    Prompt,
    Reading,
    leaf,
    merged,
    readings_of,
)
from sgl_vllm.lang.tracing.evaluation import Evaluator
from sgl_vllm.lang.tracing.frames import Args, At, Host, Kwargs, LocalFunction
from sgl_vllm.lang.tracing.graph import Graph, ends_prefix
from sgl_vllm.lang.tracing.nodes import (
    Evaluate,
    Fork,
    Join,
    Node,
    Operation,
    ReadPrompt,
    SetVariable,
    StreamTrace,
    Write,
)

MAX_BRANCHES = 10_000


class PrefixDone(Exception):
    """The prefix is complete, so the rest of the program does not matter."""


class Recorder:
    """Collects the nodes of a trace. Ends the trace after the prefix if only that matters.

    `gathers_known_names` is as in `ProgramGroup`.
    """

    def __init__(self, evaluator: Evaluator, *, gathers_known_names: bool = True) -> None:
        self.evaluator = evaluator
        self.gathers_known_names = gathers_known_names
        self._nodes: list[Node] = []
        self._streams: list[StreamTrace] = []
        self._waited: set[Definition] = set()

    def new_state(self, parent: TracedState | None, branch: int, at: At | None) -> TracedState:
        if at is not None and len(self._streams) >= MAX_BRANCHES:
            at.stop(f"the program has more than {MAX_BRANCHES} branches")
        index = len(self._streams)
        self._streams.append(StreamTrace(index, parent.index if parent else None, branch))
        return TracedState(self, index, parent)

    def add(
        self,
        stream: int,
        operation: Operation,
        at: At,
        reads: Sequence[Definition] = (),
        writes: Sequence[str | None] = (),
    ) -> Node:
        """Record an operation, which reads definitions and makes variables of these names."""
        index = len(self._nodes)
        made = tuple(Definition(name, index) for name in writes)
        num_steps = len(self.evaluator.steps_of_function)
        reads, line = tuple(dict.fromkeys(reads)), at.node.lineno
        node = Node(index, stream, operation, reads, made, line, num_steps)
        self._nodes.append(node)
        if self.evaluator.is_prefix_only and stream == 0 and ends_prefix(operation):
            raise PrefixDone
        return node

    def wait(self, definition: Definition) -> None:
        """Record that the function waits for a definition."""
        if definition not in self._waited:  # else it is there
            self._waited.add(definition)
            self.evaluator.steps_of_function.append(definition)

    def is_joined(self, definition: Definition) -> bool:
        """Whether a definition is of a variable that a join made."""
        return isinstance(self._nodes[definition.node].operation, Join)

    def graph(
        self, name: str, arguments: Mapping[str, Value], returned: Value, stopped: str | None
    ) -> Graph:
        unknown = tuple(n for n, value in arguments.items() if isinstance(value, Deferred))
        known = tuple(n for n in arguments if n not in unknown)
        nodes, streams = tuple(self._nodes), tuple(self._streams)
        steps = tuple(self.evaluator.steps_of_function)
        return Graph(name, unknown, known, streams, nodes, returned, steps, stopped)


def _names_made(expr: Expr | Deferred) -> Sequence[str]:
    """The variables that an expression makes."""
    if isinstance(expr, Deferred):
        return [] if expr.name is None else [expr.name]
    return names_made(expr)


def _names_read(expr: Expr | Deferred) -> Sequence[str]:
    """The variables that an expression reads by their names, without waiting for them."""
    exprs = expr.exprs if isinstance(expr, Deferred) else (expr,)
    return [name for one in exprs for name in names_read(one)]


class _Block(Host):
    """The context of a `with` statement: a turn, or a variable's scope.

    `end` closes it. It is None for a turn that was given its content.
    """

    description = "a turn"

    def __init__(self, state: TracedState, begin: Expr | None, end: Expr | None) -> None:
        self._state = state
        self._begin = begin
        self._end = end

    def enter(self, at: At) -> Value:
        if self._end is None:
            at.fail(ValueError("a turn that was given its content takes no with block"))
        self._state.append(self._begin or "", at)
        return self._state

    def exit(self, at: At) -> None:
        self._state.append(self._end, at)


_ROLES = ("system", "user", "assistant")


class TracedState(Host):
    """Stands for `s`, or for a branch: its variables, and where each got its value."""

    description = "the prompt"

    def __init__(self, recorder: Recorder, index: int, parent: TracedState | None) -> None:
        self.recorder = recorder
        self.index = index
        self.variables: dict[str, Value] = dict(parent.variables) if parent else {}
        self.definitions: dict[str, Definition] = dict(parent.definitions) if parent else {}
        self.written: dict[str, None] = {}
        self.last_node: int | None = None
        self.copied_from: TracedGroup | None = None

    def _add(
        self,
        operation: Operation,
        at: At,
        reads: Sequence[Definition] = (),
        writes: Mapping[str, Value] | None = None,
    ) -> Node:
        """Record an operation. `writes` are the variables it makes, with their values."""
        writes = writes or {}
        node = self.recorder.add(self.index, operation, at, reads, list(writes))
        self.last_node = node.index
        for definition, (name, value) in zip(node.writes, writes.items(), strict=True):
            self.variables[name], self.definitions[name] = value, definition
            self.written[name] = None
        return node

    # --- writing -------------------------------------------------------------------------------

    def append(self, value: Value, at: At) -> None:
        """``s += value``."""
        if isinstance(value, (Host, LocalFunction)):
            at.stop("only text and expressions can be appended to a prompt")
        try:
            pieces = value.pieces if isinstance(value, Deferred) else parts_of(value)
        except TypeError as error:
            at.fail(error)
        text: list[Piece] = []
        for piece in [q for p in pieces for q in (parts_of(p) if isinstance(p, Expr) else (p,))]:
            if isinstance(piece, Text):
                text.append(piece.value)
            elif isinstance(piece, Expr) or (isinstance(piece, Deferred) and piece.is_expression):
                self._write(text, at)
                self._evaluate(piece, at)
                text = []
            else:
                if isinstance(piece, Deferred) and not piece.is_text:
                    self.recorder.evaluator.defer("parts_of", [piece], at)
                text.append(piece)
        self._write(text, at)

    def _write(self, text: Sequence[Piece], at: At) -> None:
        pieces = tuple(piece for piece in merged(text) if not isinstance(piece, Expr))
        if pieces:
            self._add(Write(pieces), at, readings_of(pieces))

    def _evaluate(self, expr: Expr | Deferred, at: At) -> None:
        reads = list(readings_of([expr]))
        # A primitive makes variables itself, which expressions among its arguments may read.
        is_primitive = isinstance(expr, Deferred) and expr.operation in PRIMITIVES
        for name in _names_read(expr):
            if name in self.definitions or not is_primitive:
                reads.append(self._definition(name, at))
        node = self._add(Evaluate(expr), at, reads, dict.fromkeys(_names_made(expr)))
        for definition in node.writes:
            self.variables[cast(str, definition.name)] = leaf(Reading(definition, "value"))

    def set_item(self, name: Value, value: Value, at: At) -> None:
        operation = SetVariable(_name(name, at), self.recorder.evaluator.snapshot(value, at))
        self._add(operation, at, readings_of([operation.value]), {operation.name: value})

    _call_set_var = set_item

    # --- reading -------------------------------------------------------------------------------

    def _definition(self, name: str, at: At) -> Definition:
        if name not in self.variables:
            known = ", ".join(map(repr, self.variables)) or "none"
            at.fail(KeyError(f"the program has no variable {name!r} (it has: {known})"))
        return self.definitions[name]

    def item(self, name: Value, at: At) -> Value:
        key, name = name, _name_read(name, at)
        definition = self._definition(name, at)
        self.recorder.wait(definition)
        try:
            refuse_joined(key, self.recorder.is_joined(definition))
        except TypeError as error:
            at.fail(error)
        return self.variables[name]

    _call_get_var = item

    def contains(self, key: Value, at: At) -> bool:
        return _name(key, at) in self.variables

    def as_value(self, at: At) -> Deferred:
        return leaf(Prompt(self.index))

    def attribute(self, name: str, at: At) -> Value:
        at.stop(f"s.{name} depends on the run", "read it after run()")

    # --- methods -------------------------------------------------------------------------------

    def enter(self, at: At) -> Value:
        return self

    def exit(self, at: At) -> None:
        if self.copied_from is not None:
            self.copied_from.join(at)

    def call(self, name: str, args: Args, kwargs: Kwargs, at: At) -> Value:
        role, _, edge = name.partition("_")
        if role in _ROLES and edge in ("", "begin", "end"):
            name, args = "_".join(filter(None, ("turn", edge))), [role, *args]
        method = getattr(self, f"_call_{name}", None)
        if method is None:
            at.stop(f"the result of s.{name}() depends on the run")
        try:
            inspect.signature(method).bind(*args, at=at, **kwargs)
        except TypeError as error:
            at.fail(error)
        return method(*args, at=at, **kwargs)

    def _call_turn(self, role: Role, expr: Value = None, *, at: At) -> _Block:
        self.append(RoleBegin(role), at)
        if expr is None:
            return _Block(self, None, RoleEnd(role))
        self.append(expr, at)
        self.append(RoleEnd(role), at)
        return _Block(self, None, None)

    def _call_turn_begin(self, role: Role, *, at: At) -> None:
        self.append(RoleBegin(role), at)

    def _call_turn_end(self, role: Role, *, at: At) -> None:
        self.append(RoleEnd(role), at)

    def _call_var_scope(self, name: Value, *, at: At) -> _Block:
        return _Block(self, VarScopeBegin(_name(name, at)), VarScopeEnd(name))

    def _call_get_meta_info(self, name: Value, *, at: At) -> Value:
        definition = self._definition(_name_read(name, at), at)
        self.recorder.wait(definition)
        return leaf(Reading(definition, "meta"))

    def _call_text(self, *, at: At) -> Value:
        return leaf(Reading(self._read(at), "text"))

    def _call_messages(self, *, at: At) -> Value:
        return leaf(Reading(self._read(at), "messages"))

    def _read(self, at: At) -> Definition:
        node = self.recorder.add(self.index, ReadPrompt(), at, writes=[None])
        self.last_node = node.index
        self.recorder.wait(node.writes[0])
        return node.writes[0]

    def _call_sync(self, *, at: At) -> None:
        self._read(at)

    def _call_fork(
        self, size: Value = 1, position_ids_offset: Value = None, *, at: At
    ) -> TracedGroup:
        if isinstance(size, Deferred):
            at.decides_on(size)
        if not isinstance(size, int) or size < 0:
            at.fail(ValueError(f"fork needs a number of branches, not {size!r}"))
        states = [self.recorder.new_state(self, i, at) for i in range(size)]
        if states:
            self._add(Fork(tuple(state.index for state in states)), at)
        return TracedGroup(self, states)

    def _call_copy(self, position_ids_offset: Value = None, *, at: At) -> TracedState:
        group = self._call_fork(1, at=at)
        group.states[0].copied_from = group
        return group.states[0]


def _name(key: Value, at: At) -> str:
    """The name of a variable, which must be known."""
    if isinstance(key, Deferred):
        at.stop(f"the name of a variable depends on {key.why()}")
    if not isinstance(key, str):
        at.fail(TypeError(f"the name of a variable is a string, not {type(key).__name__}"))
    return key


def _name_read(key: Value, at: At) -> str:
    """The name of a variable that is read, by that or by the expression that makes it."""
    if isinstance(key, Deferred) and key.name is not None:
        return key.name
    try:
        return _name(name_of(key), at)
    except TypeError as error:
        at.fail(error)
