"""Traces a program to a graph: the operations of every prompt, without running any of them.

Owns what stands for prompts while `tracing/evaluation.py` follows a program's source. No request is
made, the function is not called, and none of its side effects happens.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from sgl_vllm.lang import api
from sgl_vllm.lang.ir import (
    Computed,
    Expr,
    Gen,
    Role,
    RoleBegin,
    RoleEnd,
    Select,
    Text,
    Tool,
    Var,
    VarScopeBegin,
    VarScopeEnd,
    parts_of,
)
from sgl_vllm.lang.program import Program
from sgl_vllm.lang.tracing.deferred import (
    Argument,
    Deferred,
    Definition,
    Piece,
    Prompt,
    Reading,
    Template,
    template_of,
)
from sgl_vllm.lang.tracing.evaluation import MAX_STEPS, Evaluator
from sgl_vllm.lang.tracing.frames import NOT_HANDLED, At, Host, LocalFunction, Raised, TraceError
from sgl_vllm.lang.tracing.graph import (
    PREFIX_EXPRESSIONS,
    Evaluate,
    EvaluateDeferred,
    Fork,
    Graph,
    Join,
    Node,
    Operation,
    ReadPrompt,
    SetVariable,
    StreamTrace,
    Write,
)

PREFIX_MAX_STEPS = 50_000
"""Expressions evaluated at most to find a shared prefix: about a quarter of a second."""
MAX_BRANCHES = 10_000


# --- tracing -------------------------------------------------------------------------------------


class _PrefixDone(Exception):
    """The prefix is complete: the rest of the program is of no interest."""


class _Stream:
    """What is known of a prompt while it is traced."""

    def __init__(self, index: int, parent: _Stream | None, branch: int) -> None:
        self.index = index
        self.parent = parent
        self.branch = branch
        self.variables: dict[str, Any] = dict(parent.variables) if parent else {}
        self.definitions: dict[str, Definition] = dict(parent.definitions) if parent else {}
        self.written: dict[str, None] = {}
        self.nodes: list[Node] = []

    def bind(self, name: str, value: Any, definition: Definition) -> None:
        self.variables[name] = value
        self.definitions[name] = definition
        self.written[name] = None


class _Recorder:
    """Collects the nodes of a trace."""

    def __init__(self, *, prefix_only: bool) -> None:
        self.nodes: list[Node] = []
        self.streams: list[_Stream] = []
        self._prefix_only = prefix_only

    def new_stream(self, parent: _Stream | None, branch: int) -> _Stream:
        stream = _Stream(len(self.streams), parent, branch)
        self.streams.append(stream)
        return stream

    def add(
        self,
        stream: _Stream,
        operation: Operation,
        at: At | None,
        reads: Sequence[Definition] = (),
        writes: Sequence[str | None] = (),
    ) -> tuple[Definition, ...]:
        """Record an operation; the definitions it makes are returned."""
        if at is not None:
            at.evaluator.certain(at)
        index = len(self.nodes)
        made = tuple(Definition(name, stream.index, index) for name in writes)
        line = at.line if at is not None else 0
        node = Node(index, stream.index, operation, tuple(dict.fromkeys(reads)), made, line)
        self.nodes.append(node)
        stream.nodes.append(node)
        if self._prefix_only and stream.index == 0 and _ends_prefix(operation):
            raise _PrefixDone
        return made

    def text(self, stream: _Stream, pieces: Sequence[str | Deferred], at: At) -> None:
        if pieces:
            reads = [d for p in pieces if isinstance(p, Deferred) for d in p.readings]
            self.add(stream, Write(_merged(pieces)), at, reads)

    def expression(self, stream: _Stream, expr: Expr, at: At) -> None:
        names = _names_made(expr)
        reads = [
            stream.definitions[name] for name in _names_read(expr) if name in stream.definitions
        ]
        for missing in _names_read(expr):
            if missing not in stream.definitions:
                at.fail(KeyError(f"the program has no variable {missing!r}"))
        for definition in self.add(stream, Evaluate(expr), at, reads, names):
            self._bind_read(stream, definition)

    def deferred_expression(self, stream: _Stream, value: Deferred, at: At) -> None:
        names = [value.name] if value.name is not None else []
        made = self.add(stream, EvaluateDeferred(value), at, value.readings, names)
        for definition in made:
            self._bind_read(stream, definition)

    @staticmethod
    def _bind_read(stream: _Stream, definition: Definition) -> None:
        assert definition.name is not None
        stream.bind(definition.name, Deferred(None, leaf=Reading(definition, "value")), definition)

    def append(self, stream: _Stream, value: Any, at: At) -> None:
        """``s += value``."""
        if isinstance(value, Deferred):
            pieces: Sequence[Piece] = value.pieces or (value,)
        else:
            try:
                pieces = parts_of(value)
            except TypeError as error:
                if isinstance(value, (Host, LocalFunction)):
                    at.stop(f"{getattr(value, 'description', 'a function')} cannot be appended")
                at.fail(error)
        text: list[str | Deferred] = []
        for piece in pieces:
            if isinstance(piece, Text):
                text.append(piece.value)
            elif isinstance(piece, str) or (isinstance(piece, Deferred) and piece.kind is None):
                text.append(piece)
            else:
                self.text(stream, text, at)
                text = []
                if isinstance(piece, Deferred):
                    self.deferred_expression(stream, piece, at)
                else:
                    for part in parts_of(piece):
                        self.append(stream, part, at) if isinstance(
                            part, Text
                        ) else self.expression(stream, part, at)
        self.text(stream, text, at)

    def graph(
        self,
        name: str,
        arguments: Mapping[str, Any],
        returned: Template,
        stopped: str | None,
    ) -> Graph:
        unknown = [n for n, value in arguments.items() if isinstance(value, Deferred)]
        return Graph(
            name,
            tuple(unknown),
            tuple(n for n in arguments if n not in unknown),
            tuple(
                StreamTrace(s.index, s.parent.index if s.parent else None, s.branch, tuple(s.nodes))
                for s in self.streams
            ),
            tuple(self.nodes),
            returned,
            stopped,
        )


def _ends_prefix(operation: Operation) -> bool:
    match operation:
        case Write() as write:
            return write.known_text is None
        case Evaluate(expr):
            return not isinstance(expr, (*PREFIX_EXPRESSIONS, VarScopeBegin, VarScopeEnd))
        case EvaluateDeferred() | Fork() | Join():
            return True
    return False


def _merged(pieces: Sequence[str | Deferred]) -> tuple[str | Deferred, ...]:
    merged: list[str | Deferred] = []
    for piece in pieces:
        if isinstance(piece, str) and merged and isinstance(merged[-1], str):
            merged[-1] += piece
        else:
            merged.append(piece)
    return tuple(piece for piece in merged if piece != "")


def _names_made(expr: Expr) -> list[str]:
    """The variables that an expression makes."""
    match expr:
        case Gen(name) if name is not None:
            return [name] if expr.reasoning_name is None else [name, expr.reasoning_name]
        case Select(name) | VarScopeEnd(name) | Tool(name) if name is not None:
            return [name]
        case Computed() if expr.name is not None:
            return [expr.name]
    return []


def _names_read(expr: Expr) -> list[str]:
    """The variables of the program that an expression reads by their names."""
    match expr:
        case Var(name):
            return [name]
        case Computed(_, needs):
            return list(needs)
        case Tool(_, _, args, kwargs):
            given = (*args, *(value for _, value in kwargs))
            return [value.name for value in given if isinstance(value, Var)]
    return []


class _Turn(Host):
    """What ``with s.user():`` enters."""

    description = "a turn"

    def __init__(self, state: TracedState, role: Role, *, is_open: bool) -> None:
        self._state = state
        self._role = role
        self._is_open = is_open

    def enter(self, at: At) -> Any:
        if not self._is_open:
            at.fail(ValueError("a turn that was given its content takes no with block"))
        return self._state

    def exit(self, at: At) -> None:
        self._state.recorder.expression(self._state.stream, RoleEnd(self._role), at)


class _Scope(Host):
    """What ``with s.var_scope(name):`` enters."""

    description = "a variable's scope"

    def __init__(self, state: TracedState, name: str) -> None:
        self._state = state
        self._name = name

    def enter(self, at: At) -> Any:
        self._state.recorder.expression(self._state.stream, VarScopeBegin(self._name), at)
        return self._state

    def exit(self, at: At) -> None:
        self._state.recorder.expression(self._state.stream, VarScopeEnd(self._name), at)


class TracedState(Host):
    """Stands for `s`, or a branch, while a program is traced."""

    description = "the prompt"

    def __init__(self, recorder: _Recorder, stream: _Stream) -> None:
        self.recorder = recorder
        self.stream = stream
        self._copied_from: TracedGroup | None = None

    def append(self, value: Any, at: At) -> None:
        self.recorder.append(self.stream, value, at)

    def _named(self, name: Any, at: At) -> str:
        if isinstance(name, Deferred):
            at.stop(f"the name of a variable depends on {name.why()}")
        if not isinstance(name, str):
            at.fail(TypeError(f"the name of a variable is a string, not {type(name).__name__}"))
        return name

    def item(self, key: Any, at: At) -> Any:
        name = self._named(key, at)
        if name not in self.stream.variables:
            known = ", ".join(map(repr, self.stream.variables)) or "none"
            at.fail(KeyError(f"the program has no variable {name!r} (it has: {known})"))
        return self.stream.variables[name]

    def contains(self, key: Any, at: At) -> bool:
        return self._named(key, at) in self.stream.variables

    def set_item(self, key: Any, value: Any, at: At) -> None:
        name = self._named(key, at)
        template = at.evaluator.template(value, at)
        reads = [d for part in template.inputs for d in part.readings]
        operation = SetVariable(name, template)
        (definition,) = self.recorder.add(self.stream, operation, at, reads, [name])
        self.stream.bind(name, value, definition)

    def deferred(self) -> Deferred:
        return Deferred(None, leaf=Prompt(self.stream.index))

    def enter(self, at: At) -> Any:
        return self

    def exit(self, at: At) -> None:
        if self._copied_from is not None:
            self._copied_from.join("gather_variable", at)

    def attribute(self, name: str, at: At) -> Any:
        if name in self._METHODS:
            at.stop(f"s.{name} is not called")
        at.stop(f"s.{name} depends on the run", "read it after run()")

    def call(self, name: str, args: list[Any], kwargs: dict[str, Any], at: At) -> Any:
        method = self._METHODS.get(name)
        if method is None and (role := name.removesuffix("_begin").removesuffix("_end")) in _ROLES:
            kind = RoleBegin if name.endswith("_begin") else RoleEnd
            if not args and not kwargs:
                self.recorder.expression(self.stream, kind(role), at)  # type: ignore[arg-type]
                return None
        if method is None:
            at.stop(
                f"what s.{name}() gives depends on the run",
                "run the program as it is, without compiling",
            )
        try:
            bound = inspect.signature(method).bind(self, *args, **kwargs, at=at)
        except TypeError as error:
            at.fail(error)
        return method(*bound.args, **bound.kwargs)

    def _turn(self, role: Role, expr: Any, at: At) -> _Turn:
        self.recorder.expression(self.stream, RoleBegin(role), at)
        if expr is not None:
            self.append(expr, at)
            self.recorder.expression(self.stream, RoleEnd(role), at)
        return _Turn(self, role, is_open=expr is None)

    def _system(self, expr: Any = None, *, at: At) -> _Turn:
        return self._turn("system", expr, at)

    def _user(self, expr: Any = None, *, at: At) -> _Turn:
        return self._turn("user", expr, at)

    def _assistant(self, expr: Any = None, *, at: At) -> _Turn:
        return self._turn("assistant", expr, at)

    def _var_scope(self, name: Any, *, at: At) -> _Scope:
        return _Scope(self, self._named(name, at))

    def _get_var(self, name: Any, *, at: At) -> Any:
        return self.item(name, at)

    def _set_var(self, name: Any, value: Any, *, at: At) -> None:
        self.set_item(name, value, at)

    def _get_meta_info(self, name: Any, *, at: At) -> Any:
        self.item(name, at)
        definition = self.stream.definitions[self._named(name, at)]
        return Deferred(None, leaf=Reading(definition, "meta"))

    def _text(self, *, at: At) -> Any:
        (definition,) = self.recorder.add(self.stream, ReadPrompt(), at, writes=[None])
        return Deferred(None, leaf=Reading(definition, "text"))

    def _messages(self, *, at: At) -> Any:
        (definition,) = self.recorder.add(self.stream, ReadPrompt(), at, writes=[None])
        return Deferred(None, leaf=Reading(definition, "messages"))

    def _sync(self, *, at: At) -> None:
        """What follows waits for what it needs."""

    def _fork(self, size: Any = 1, position_ids_offset: Any = None, *, at: At) -> TracedGroup:
        if isinstance(size, Deferred):
            at.decides_on(size)
        if not isinstance(size, int):
            at.fail(TypeError(f"fork takes a number, not {type(size).__name__}"))
        if size < 1:
            at.fail(ValueError(f"fork needs at least one branch, not {size}"))
        if len(self.recorder.streams) + size > MAX_BRANCHES:
            at.stop(f"the program has more than {MAX_BRANCHES} branches")
        at.evaluator.certain(at)
        children = [self.recorder.new_stream(self.stream, i) for i in range(size)]
        self.recorder.add(self.stream, Fork(tuple(c.index for c in children)), at)
        return TracedGroup(self, [TracedState(self.recorder, child) for child in children])

    def _copy(self, position_ids_offset: Any = None, *, at: At) -> TracedState:
        group = self._fork(1, at=at)
        (state,) = group.states
        state._copied_from = group
        return state

    _METHODS: ClassVar[dict[str, Callable[..., Any]]] = {
        "system": _system,
        "user": _user,
        "assistant": _assistant,
        "var_scope": _var_scope,
        "get_var": _get_var,
        "set_var": _set_var,
        "get_meta_info": _get_meta_info,
        "text": _text,
        "messages": _messages,
        "sync": _sync,
        "fork": _fork,
        "copy": _copy,
    }


_ROLES = ("system", "user", "assistant")


def _for_branch(value: Any, index: int, count: int) -> Any:
    """What branch `index` gets of a value that was appended to all of `count`."""
    if isinstance(value, (str, Expr)):
        return value
    if not isinstance(value, (list, tuple)):
        raise TypeError(
            f"a compiled program appends texts, expressions or lists of them to a fork, not "
            f"{type(value).__name__}"
        )
    if len(value) != count:
        raise ValueError(f"{len(value)} values for {count} branches")
    return value[index]


class TracedGroup(Host):
    """Stands for the branches of a fork while a program is traced."""

    description = "the group of branches"

    def __init__(self, parent: TracedState, states: list[TracedState]) -> None:
        self.parent = parent
        self.states = states

    def iterate(self, at: At) -> list[Any]:
        return list(self.states)

    def length(self, at: At) -> int:
        return len(self.states)

    def item(self, key: Any, at: At) -> Any:
        if isinstance(key, Deferred):
            at.decides_on(key)
        try:
            return self.states[key]
        except (IndexError, TypeError) as error:
            at.fail(error)

    def set_item(self, key: Any, value: Any, at: At) -> None:
        if value is not self.item(key, at):
            at.fail(TypeError("a branch cannot be replaced: append to it with +="))

    def append(self, value: Any, at: At) -> None:
        count = len(self.states)
        evaluator = at.evaluator
        if isinstance(value, Deferred) and not value.pieces and value.kind is None:
            values: list[Any] = [
                evaluator.defer(_for_branch, (value, i, count), {}, at) for i in range(count)
            ]
        elif isinstance(value, (Expr, str, Deferred)):
            values = [value] * count
        elif isinstance(value, (list, tuple)):
            values = list(value)
            if len(values) != count:
                at.fail(ValueError(f"{len(values)} values for {count} branches"))
        elif isinstance(value, Host):
            at.stop(f"{value.description} cannot be appended to branches")
        else:
            values = [evaluator.call(value, [i], {}, at) for i in range(count)]
        for state, item in zip(self.states, values, strict=True):
            state.append(item, at)

    def call(self, name: str, args: list[Any], kwargs: dict[str, Any], at: At) -> Any:
        if name != "join":
            at.stop(f"which branch .{name}() takes is only known in a run")
        given = [*args, *kwargs.values()]
        if len(given) > 1 or set(kwargs) - {"mode"}:
            at.fail(TypeError("join takes one argument, mode"))
        mode = given[0] if given else "gather_variable"
        if isinstance(mode, Deferred):
            at.decides_on(mode)
        self.join(mode, at)

    def attribute(self, name: str, at: At) -> Any:
        at.stop(f".{name} of a group of branches cannot be traced")

    def join(self, mode: str, at: At) -> None:
        parent, recorder = self.parent.stream, self.parent.recorder
        streams = [state.stream for state in self.states]
        operation = Join(tuple(stream.index for stream in streams), mode)
        if mode == "concate_and_append":
            ends = [Definition(None, s.index, s.nodes[-1].index) for s in streams if s.nodes]
            recorder.add(parent, operation, at, ends)
            return
        if mode != "gather_variable":
            at.fail(
                ValueError(f"join mode must be gather_variable or concate_and_append, not {mode}")
            )
        names = list(dict.fromkeys(name for stream in streams for name in stream.written))
        sources = {n: [s for s in streams if n in s.written] for n in names}
        reads = [stream.definitions[name] for name in names for stream in sources[name]]
        for definition in recorder.add(parent, operation, at, reads, names):
            assert definition.name is not None
            values = [s.variables[definition.name] for s in sources[definition.name]]
            parent.bind(definition.name, at.evaluator.share(values), definition)

    def enter(self, at: At) -> Any:
        return self


_TURN_MAKERS: dict[Any, Role] = {
    api.system: "system",
    api.user: "user",
    api.assistant: "assistant",
}
_PLAIN_MAKERS = (api.gen, api.gen_int, api.gen_string, api.select, api.var)
_MAKERS = {
    *_TURN_MAKERS,
    *(api.system_begin, api.system_end, api.user_begin, api.user_end),
    *(api.assistant_begin, api.assistant_end),
    *_PLAIN_MAKERS,
    *(api.tool, api.image, api.video, api.separate_reasoning),
}


def _call_of_the_language(callee: Any, args: list[Any], kwargs: dict[str, Any], at: At) -> Any:
    """What a call of a program or of an expression's maker gives."""
    if _is_program(callee):
        if args and isinstance(args[0], Host):
            return at.evaluator.call(callee.func, args, {**callee.bound, **kwargs}, at)
        at.stop(
            "it starts a run of its own",
            "give the other program this prompt, other(s, ...), or pass its result as an argument",
        )
    evaluator = at.evaluator
    if callee is asyncio.gather:
        return evaluator.share(args)
    if not isinstance(callee, types.FunctionType) or callee not in _MAKERS:
        return NOT_HANDLED
    if callee in _TURN_MAKERS and len(args) + len(kwargs) == 1:
        content = args[0] if args else kwargs.get("expr")
        if isinstance(content, Deferred):
            role = _TURN_MAKERS[callee]
            inside = content.pieces or (content,)
            return evaluator.concatenate([RoleBegin(role), *inside, RoleEnd(role)], at)
    if callee is api.separate_reasoning and args and isinstance(args[0], Deferred):
        return evaluator.concatenate(_reasoned(args[0], args[1:], kwargs, at), at)
    given = [*args, *kwargs.values()]
    for value in given:
        if isinstance(value, Host):
            at.stop(f"{value.description} is no value: read a variable with s['name']")
        if isinstance(value, LocalFunction):
            at.stop(
                f"{value.name} is made inside of the program, and does not exist before it runs",
                "define it outside",
            )
    if callee in _PLAIN_MAKERS:
        for key, value in (*enumerate(args), *kwargs.items()):
            if key not in ("json_schema", "regex", "dtype", "choices_method") and not isinstance(
                value, type
            ):
                evaluator.require_plain(value, at)
    if not any(map(evaluator.holds_deferred, given)):
        try:
            return callee(*args, **kwargs)
        except Exception as error:
            at.fail(error)
    if any(isinstance(value, Var) for value in given):
        at.stop(f"{callee.__name__} of what is not known yet", "give it values that are known")
    takes_name = "name" in inspect.signature(callee).parameters
    name = (args[0] if args else kwargs.get("name")) if takes_name else None
    if isinstance(name, Deferred):
        at.stop(f"the name of a variable depends on {name.why()}")
    return evaluator.defer(callee, args, kwargs, at, kind=callee.__name__, name=name)


def _reasoned(content: Deferred, args: list[Any], kwargs: dict[str, Any], at: At) -> list[Piece]:
    """The pieces of ``separate_reasoning(content, ...)``."""
    pieces: list[Piece] = []
    for piece in content.pieces or (content,):
        if isinstance(piece, Expr):
            pieces += api.separate_reasoning(piece, *args, **kwargs).items
        elif isinstance(piece, Deferred) and piece.kind is not None:
            at.stop("separate_reasoning of what is not known yet", "give it values that are known")
        else:
            pieces.append(piece)
    return pieces


def _is_program(value: object) -> bool:
    return isinstance(value, Program)


def _arguments(program: Program, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """A value for each parameter; deferred for those that are not given."""
    signature = inspect.signature(program.func)
    bound = signature.bind_partial(None, *args, **{**program.bound, **kwargs}).arguments
    names = list(signature.parameters)[1:]
    return {
        name: bound[name] if name in bound else Deferred(None, leaf=Argument(name))
        for name in names
    }


def trace(program: Program, /, *args: Any, **kwargs: Any) -> Graph:
    """The graph of `program`. Arguments that are given are known, the others are placeholders.

    The function is not called: its source is followed, no side effect happens and no request is
    made. Raises TraceError where the program decides on something unknown, or would do what
    tracing must not; its `graph` is what comes before that place. TypeError for arguments that the
    program does not take. Cost: about 5 microseconds per expression; at most 200,000 of them.
    """
    graph, error = _traced(program, _arguments(program, args, kwargs), MAX_STEPS)
    if error is not None:
        error.graph = graph
        raise error
    return graph


def _traced(
    program: Program, arguments: Mapping[str, Any], max_steps: int, *, prefix_only: bool = False
) -> tuple[Graph, TraceError | None]:
    recorder = _Recorder(prefix_only=prefix_only)
    root = TracedState(recorder, recorder.new_stream(None, 0))
    home = (program.func.__module__ or "").split(".")[0]
    evaluator = Evaluator(_call_of_the_language, home, max_steps)
    first = next(iter(inspect.signature(program.func).parameters))
    returned = Template(None, ())
    failure: TraceError | None = None
    try:
        value = evaluator.follow_program(program.func, {first: root, **arguments})
        returned = _returned(value, evaluator)
    except _PrefixDone:
        pass
    except TraceError as error:
        failure = error
    except Raised as raised:
        failure = _raised(raised)
    except RecursionError:
        failure = TraceError("the program nests its expressions too deeply", "")
    reason = None if failure is None else str(failure)
    return recorder.graph(program.func.__name__, arguments, returned, reason), failure


def _raised(raised: Raised) -> TraceError:
    kind = type(raised.error).__name__
    try:
        evaluator = Evaluator(_call_of_the_language, "")
        evaluator.stop(raised.node, raised.frame, f"the program raises {kind}: {raised.error}", "")
    except TraceError as error:
        error.__cause__ = raised.error
        return error


def _returned(value: Any, evaluator: Evaluator) -> Template:
    def as_deferred(part: object) -> object:
        return part.deferred() if isinstance(part, Host) else part

    return template_of(value, evaluator.is_own, as_deferred)


# --- what the items of a batch share -------------------------------------------------------------


def shared_prefix(program: Program, items: Sequence[Mapping[str, Any]]) -> tuple[Expr, ...]:
    """What the prompts of all `items` (arguments by name) begin with: known text and turns.

    Arguments that are equal in all items, or that all leave at their default, count as known. Up
    to the first generation, fork, or piece of text that depends on anything else. Never raises: ()
    when nothing can be told. Cost: one comparison per item and argument, and one trace, which ends
    where the prefix does, after 50,000 expressions (a quarter of a second) at most.
    """
    try:
        arguments = {
            name: Deferred(None, leaf=Argument(name))
            for name in list(inspect.signature(program.func).parameters)[1:]
        }
        arguments |= common_arguments(program, items)
        graph, _ = _traced(program, arguments, PREFIX_MAX_STEPS, prefix_only=True)
        return graph.prefix()
    except Exception:
        return ()


def common_arguments(program: Program, items: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The arguments that have one known value in all `items`, by name."""
    parameters = inspect.signature(program.func).parameters
    missing = object()
    arguments: dict[str, Any] = {}
    for name in itertools.islice(parameters, 1, None):
        default = program.bound.get(name, parameters[name].default)
        values: Iterator[Any] = (item.get(name, missing) for item in items)
        first = next(values, missing)
        is_common = all(_is_same(first, value) for value in values)
        if first is missing:
            first = default
        if is_common and first is not inspect.Parameter.empty:
            arguments[name] = first
    return arguments


def _is_same(left: object, right: object) -> bool:
    """Whether two arguments are equal, without asking anybody's code."""
    if left is right:
        return True
    kinds = (str, int, float, bool, bytes)
    return type(left) is type(right) and type(left) in kinds and left == right
