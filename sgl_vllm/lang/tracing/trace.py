"""Traces a program to a graph.

Owns how the function is called: with stand-ins for what only a run knows, and a prompt that
records. No request is sent, and the trace ends before the function has an effect (`guard.py`).
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any  # Any: arguments of the user's function

from sgl_vllm.lang.ir import Value
from sgl_vllm.lang.runnable import Runnable
from sgl_vllm.lang.tracing.errors import Stop, TraceError, failure, home, package_of, stop
from sgl_vllm.lang.tracing.graph import Graph
from sgl_vllm.lang.tracing.guard import guarded
from sgl_vllm.lang.tracing.recording import Recorder, recording_class
from sgl_vllm.lang.tracing.standin import Leaf, StandIn, fixed, notes

MAX_S = 10.0
"""A trace ends after this long."""


def trace(program: Runnable, /, *args: Any, **kwargs: Any) -> Graph:
    """The graph of `program`. Arguments that are given are known, the others are stand-ins.

    The function is called, and no request is sent. TraceError where the program asks for a value
    that only a run knows, and before it has an effect outside of its prompt; its `graph` is what
    comes before that place. TypeError for arguments that the program does not take.
    """
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
    recorder = Recorder(is_prefix_only=is_prefix_only)
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
        tuple(recorder.steps),
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
