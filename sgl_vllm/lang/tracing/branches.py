"""The stand-in for the branches of a fork while a program is traced.

Owns appending to all of them, and joining them. A branch itself is a `TracedState` like any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sgl_vllm.lang.group import names_to_gather
from sgl_vllm.lang.ir import Expr, Value
from sgl_vllm.lang.tracing.deferred import Deferred, Definition
from sgl_vllm.lang.tracing.frames import Args, At, Host, Kwargs
from sgl_vllm.lang.tracing.nodes import Join

if TYPE_CHECKING:
    from sgl_vllm.lang.tracing.prompts import TracedState


class TracedGroup(Host):
    """Stands for the branches of a fork."""

    description = "the group of branches"

    def __init__(self, parent: TracedState, states: list[TracedState]) -> None:
        self.parent = parent
        self.states = states

    def iterate(self, at: At) -> list[Value]:
        return list(self.states)

    def length(self, at: At) -> int:
        return len(self.states)

    def item(self, key: Value, at: At) -> Value:
        if isinstance(key, Deferred):
            at.decides_on(key)
        try:
            return self.states[key]
        except (IndexError, TypeError) as error:
            at.fail(error)

    def set_item(self, key: Value, value: Value, at: At) -> None:
        if value is not self.item(key, at):
            at.fail(TypeError("a branch cannot be replaced: append to it with +="))

    def append(self, value: Value, at: At) -> None:
        evaluator, count = self.parent.recorder.evaluator, len(self.states)
        if isinstance(value, (Expr, str, Deferred, Host)):
            values: Sequence[Value] = [value] * count
        elif isinstance(value, (list, tuple)):
            values = value
        else:
            values = [evaluator.call(value, [i], {}, at) for i in range(count)]
        if len(values) != count:
            at.fail(ValueError(f"{len(values)} values for {count} branches"))
        for state, item in zip(self.states, values, strict=True):
            state.append(item, at)

    def call(self, name: str, args: Args, kwargs: Kwargs, at: At) -> Value:
        if name != "join":
            at.stop(f"the result of .{name}() of a group depends on the run")
        if len(args) + len(kwargs) > 1 or set(kwargs) - {"mode"}:
            at.fail(TypeError("join takes one argument, mode"))
        self.join(at, *args, **kwargs)

    def join(self, at: At, mode: Value = "gather_variable") -> None:
        parent, states = self.parent, self.states
        if isinstance(mode, Deferred):
            at.decides_on(mode)
        if mode not in ("gather_variable", "concate_and_append"):
            at.fail(
                ValueError(f"join mode must be gather_variable or concate_and_append, not {mode}")
            )
        if not states:
            return
        operation = Join(tuple(state.index for state in states), mode)
        if mode == "concate_and_append":
            ends = [Definition(None, s.last_node) for s in states if s.last_node is not None]
            parent._add(operation, at, ends)
            return
        written = [state.written for state in states]
        names = names_to_gather(written, parent.variables, parent.recorder.gathers_known_names)
        writers = {name: [s for s in states if name in s.written] for name in names}
        reads = [state.definitions[name] for name in names for state in writers[name]]
        values = {name: [s.variables[name] for s in writers[name]] for name in names}
        share = parent.recorder.evaluator.share
        parent._add(operation, at, reads, {name: share(v) for name, v in values.items()})
