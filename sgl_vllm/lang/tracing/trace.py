"""Traces a program to a graph.

Owns the graph as a frozen value, and how the function is called: with stand-ins for what only a
run knows, and a prompt that records. `guard.py` ends the trace before the function has an effect.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any  # Any: arguments of the user's function

from sgl_vllm.lang.ir import Value
from sgl_vllm.lang.runnable import Runnable
from sgl_vllm.lang.tracing.errors import Stop, TraceError, failure, home, package_of, stop
from sgl_vllm.lang.tracing.guard import guarded
from sgl_vllm.lang.tracing.nodes import Node, StreamTrace
from sgl_vllm.lang.tracing.recording import TraceRecorder, recording_class
from sgl_vllm.lang.tracing.standin import Leaf, StandIn, fixed, notes
from sgl_vllm.lang.views import graph as view

MAX_S = 10.0
"""A trace ends after this long."""


@dataclass(frozen=True)
class Graph:
    """What a program does, as far as that does not depend on what only a run knows.

    `nodes` are in the program's order: every node reads only what earlier nodes write. `parameters`
    are the unknown arguments, `known` the names of the others. `stopped` says why the graph ends
    before the program does, if it does.

    `actions` are what the program's function does itself, in its order: what it waits for, and the
    values that it computes. What calls functions of the user's runs after the actions before it.
    """

    name: str
    parameters: tuple[str, ...]
    known: tuple[str, ...]
    streams: tuple[StreamTrace, ...]
    nodes: tuple[Node, ...]
    returned: Value
    actions: tuple[StandIn, ...] = field(default=(), repr=False)
    stopped: str | None = None

    @property
    def title(self) -> str:
        """The program's name with the arguments that a run takes."""
        return f"{self.name}({', '.join(self.parameters)})"

    def nodes_of(self, stream: int) -> Sequence[Node]:
        """The operations of one stream, in order."""
        return [node for node in self.nodes if node.stream == stream]

    def __str__(self) -> str:
        return view.as_text(self)

    def to_svg(self) -> str:
        """A picture: a column per stream, boxes for operations, curves for variables."""
        return view.as_svg(self)

    def to_html(self, path: str | Path | None = None) -> str:
        """A page with the picture and the text of every operation. Written to `path` if given."""
        page = view.as_html(self)
        if path is not None:
            Path(path).write_text(page, encoding="utf-8")
        return page

    def _repr_html_(self) -> str:
        return f'<div style="overflow: auto">{self.to_svg()}</div>'


def trace(program: Runnable, /, *args: Any, **kwargs: Any) -> Graph:
    """The graph of `program`, as `Program.trace`. TypeError for unknown arguments."""
    signature = inspect.signature(program.func)
    given = signature.bind_partial(None, *args, **{**program.bound, **kwargs}).arguments
    graph, error = traced(
        program, {name: given[name] for name in program.arg_names if name in given}, MAX_S
    )
    if error is not None:
        error.graph = graph
        raise error
    return graph


def traced(
    program: Runnable, known: Mapping[str, Value], max_s: float, *, is_prefix_only: bool = False
) -> tuple[Graph, TraceError | None]:
    """The graph, with `known` arguments, and what ended the trace before the program's end. With
    `is_prefix_only`, it ends where the prompt's known beginning does."""
    recorder = TraceRecorder(is_prefix_only=is_prefix_only)
    stream = recorder.new_stream(None, 0)
    state = recording_class(program.state_class, program.is_async)(stream)  # type: ignore[arg-type]
    arguments: dict[str, Value] = {
        name: _copied(known[name]) if name in known else StandIn.of(Leaf("argument", name))
        for name in program.arg_names
    }
    signature = inspect.signature(program.func)
    first = next(iter(signature.parameters))
    call = inspect.BoundArguments(signature, OrderedDict({first: state, **arguments}))
    returned, error = None, None
    tokens = home.set(package_of(getattr(program.func, "__globals__", {}))), notes.set(recorder)
    try:
        with guarded(program.func, max_s):
            returned = fixed(_result_of(program.func(*call.args, **call.kwargs)))
    except Stop as stopped:
        error = stopped.error
    except Exception as raised:
        error = failure(raised)
        error.__cause__ = raised
    finally:
        home.reset(tokens[0])
        notes.reset(tokens[1])
    unknown = [name for name in program.arg_names if name not in known]
    graph = Graph(
        getattr(program.func, "__name__", type(program.func).__name__),
        tuple(unknown),
        tuple(known),
        tuple(recorder.streams),
        tuple(recorder.nodes),
        returned,
        tuple(recorder.actions),
        None if error is None else str(error),
    )
    return graph, error


def _result_of(returned: Value) -> Value:
    """What the function returns, or if it is a coroutine, what that does."""
    if not inspect.iscoroutine(returned):
        return returned
    try:
        returned.send(None)
    except StopIteration as end:
        return end.value
    finally:
        returned.close()
    stop("the program awaits something else than its prompt", "call it with sgl.tool(...)")


def _copied(value: Value) -> Value:
    """An argument, or a copy of a container, which the program may change."""
    return value.copy() if type(value) in (list, dict, set) else value
