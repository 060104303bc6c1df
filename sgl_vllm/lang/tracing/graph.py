"""What a traced program does: the operations of every prompt, and the variables they hand on.

Owns the graph as a frozen value. How it is made is in `trace.py`, how it runs in `compiler.py`, how
it is drawn in `graph_view.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from sgl_vllm.lang.ir import Expr, RoleBegin, RoleEnd, Show, Text, Value, VarScopeBegin, VarScopeEnd
from sgl_vllm.lang.tracing import graph_view
from sgl_vllm.lang.tracing.deferred import Arguments, Deferred, Step
from sgl_vllm.lang.tracing.description import described
from sgl_vllm.lang.tracing.nodes import Evaluate, Fork, Join, Node, Operation, StreamTrace, Write

PREFIX_EXPRESSIONS: tuple[type[Expr], ...] = (RoleBegin, RoleEnd, Show)
"""Expressions that belong to a prompt's known beginning."""


def ends_prefix(operation: Operation) -> bool:
    """Whether the known beginning of a prompt ends at, or within, this operation."""
    match operation:
        case Write():
            return not operation.is_constant
        case Evaluate(expr):
            return not isinstance(expr, (*PREFIX_EXPRESSIONS, VarScopeBegin, VarScopeEnd))
    return isinstance(operation, (Fork, Join))


@dataclass(frozen=True)
class Graph:
    """What a program does, as far as that does not depend on what only a run knows.

    `nodes` are in the program's order, which is an order that can run: every node reads only what
    earlier nodes write. `parameters` are the arguments that are unknown, `known` the names of the
    others. `returned` is what the program returns. `stopped` says why the graph ends before the
    program does, if it does.

    `steps` are what the program's function does itself, in its order: definitions that it waits for
    and values that it computes, if that may fail. What calls functions of the user's runs after the
    steps before it. Nothing else has to.
    """

    name: str
    parameters: tuple[str, ...]
    known: tuple[str, ...]
    streams: tuple[StreamTrace, ...]
    nodes: tuple[Node, ...]
    returned: Value
    steps: tuple[Step, ...] = ()
    stopped: str | None = None

    @property
    def title(self) -> str:
        """The program's name with the arguments that a run takes."""
        return f"{self.name}({', '.join(self.parameters)})"

    @cached_property
    def _nodes_by_stream(self) -> dict[int, list[Node]]:
        nodes: dict[int, list[Node]] = {stream.index: [] for stream in self.streams}
        for node in self.nodes:
            nodes[node.stream].append(node)
        return nodes

    def nodes_of(self, stream: int) -> Sequence[Node]:
        """The operations of one stream, in order."""
        return self._nodes_by_stream[stream]

    def prefix(self, arguments: Mapping[str, Value] | None = None) -> tuple[Expr, ...]:
        """The known text and turns at the beginning of the root prompt, given `arguments`."""
        environment = Arguments(arguments or {})
        known: list[Expr] = []
        for node in self.nodes_of(0):
            match node.operation:
                case Write(pieces):
                    texts = [environment.text_of(piece) for piece in pieces]
                    end = texts.index(None) if None in texts else len(texts)
                    unknown = pieces[end] if end < len(pieces) else ""
                    head = unknown.head if isinstance(unknown, Deferred) else ""
                    text = "".join(filter(None, texts[:end])) + head
                    if text:
                        known.append(Text(text))
                    if end < len(pieces):
                        break
                case Evaluate(expr) if isinstance(expr, PREFIX_EXPRESSIONS):
                    known.append(expr)
                case operation if ends_prefix(operation):
                    break
        return tuple(known)

    def as_dict(self) -> dict[str, Value]:
        """The graph as plain data that JSON can hold; see `description.described`.

        ValueError if the program uses a value that JSON cannot hold, such as an object.
        """
        return described(self)

    def __str__(self) -> str:
        return graph_view.as_text(self)

    def to_svg(self) -> str:
        """A picture: a column per stream, boxes for operations, curves for variables."""
        return graph_view.as_svg(self)

    def to_html(self, path: str | Path | None = None) -> str:
        """A page with the picture and the text of every operation. Written to `path` if given."""
        page = graph_view.as_html(self)
        if path is not None:
            Path(path).write_text(page, encoding="utf-8")
        return page

    def _repr_svg_(self) -> str:
        return self.to_svg()

    def _repr_html_(self) -> str:
        return f'<div style="overflow: auto">{self.to_svg()}</div>'
