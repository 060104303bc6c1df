"""What a traced program does: operations of every prompt, and which variables they hand on.

Owns the graph as frozen values. Knows neither how it is made (`trace.py`) nor how it is run
(`compiler.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from sgl_vllm.lang.ir import Expr, RoleBegin, RoleEnd, Show, Text, VarScopeBegin, VarScopeEnd
from sgl_vllm.lang.tracing.deferred import Arguments, Deferred, Definition, Template


@dataclass(frozen=True)
class Write:
    """Append text that is made of known and deferred pieces, in order."""

    pieces: tuple[str | Deferred, ...]

    @property
    def known_text(self) -> str | None:
        """The whole text, if all of it is known."""
        return "".join(self.pieces) if _all_known(self.pieces) else None  # type: ignore[arg-type]


@dataclass(frozen=True)
class Evaluate:
    """Run an expression that is known: a gen, a select, a role change."""

    expr: Expr


@dataclass(frozen=True)
class EvaluateDeferred:
    """Run an expression, such as a gen, whose options only a run knows."""

    value: Deferred


@dataclass(frozen=True)
class SetVariable:
    """Give a variable a value of the program's own."""

    name: str
    value: Template


@dataclass(frozen=True)
class ReadPrompt:
    """Read the prompt as it is here."""


@dataclass(frozen=True)
class Fork:
    """Go on in these streams too."""

    children: tuple[int, ...]


@dataclass(frozen=True)
class Join:
    """Bring back what these streams wrote since the fork."""

    branches: tuple[int, ...]
    mode: str


Operation: TypeAlias = Write | Evaluate | EvaluateDeferred | SetVariable | ReadPrompt | Fork | Join


@dataclass(frozen=True, eq=False)
class Node:
    """One operation of a graph. `index` counts in the program's order, over all streams."""

    index: int
    stream: int
    operation: Operation
    reads: tuple[Definition, ...]
    writes: tuple[Definition, ...]
    line: int

    def __str__(self) -> str:
        from sgl_vllm.lang.tracing import graph_view

        return graph_view.label(self)


@dataclass(frozen=True)
class StreamTrace:
    """One prompt: the root (index 0, no parent), or branch `branch` of a fork of `parent`."""

    index: int
    parent: int | None
    branch: int
    nodes: tuple[Node, ...]

    @property
    def name(self) -> str:
        return "s" if self.parent is None else f"fork[{self.branch}]"


@dataclass(frozen=True)
class Edge:
    """Node `reader` depends on what node `writer` gives; `name` is None for a prompt's text."""

    writer: int
    reader: int
    name: str | None


@dataclass(frozen=True)
class Graph:
    """What a program does, as far as it does not depend on what only a run knows.

    `nodes` are in the program's order; each stream's own are among them in the same order. An
    edge goes from an earlier to a later node, so that the order of nodes is one that can be run.
    `parameters` are those the trace knew no value of, `known` the names of the others. `stopped`
    says why it ends before the program does, if it does; `returned` is what the program returns.
    """

    name: str
    parameters: tuple[str, ...]
    known: tuple[str, ...]
    streams: tuple[StreamTrace, ...]
    nodes: tuple[Node, ...]
    returned: Template
    stopped: str | None = None

    @property
    def edges(self) -> tuple[Edge, ...]:
        """Which node needs what of which."""
        return tuple(
            Edge(read.node, node.index, read.name) for node in self.nodes for read in node.reads
        )

    def stream(self, index: int) -> StreamTrace:
        return self.streams[index]

    def prefix(self, arguments: Mapping[str, Any] | None = None) -> tuple[Expr, ...]:
        """What the root prompt surely begins with: known text and turns, up to the first
        operation, or piece of text, that only a run knows. `arguments` are known as well."""
        environment = Arguments(arguments or {})
        known: list[Expr] = []
        for node in self.streams[0].nodes:
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
                case Evaluate(VarScopeBegin() | VarScopeEnd()) | SetVariable() | ReadPrompt():
                    continue
                case _:
                    break
        return tuple(known)

    def __str__(self) -> str:
        from sgl_vllm.lang.tracing import graph_view

        return graph_view.as_text(self)

    def to_svg(self) -> str:
        """A picture: a column per stream, boxes for operations, curves for variables."""
        from sgl_vllm.lang.tracing import graph_view

        return graph_view.as_svg(self)

    def to_html(self, path: str | Path | None = None) -> str:
        """A page with the picture and the text of every operation; written to `path` if given."""
        from sgl_vllm.lang.tracing import graph_view

        page = graph_view.as_html(self)
        if path is not None:
            Path(path).write_text(page, encoding="utf-8")
        return page

    def _repr_svg_(self) -> str:
        return self.to_svg()

    def _repr_html_(self) -> str:
        return f'<div style="overflow: auto">{self.to_svg()}</div>'


PREFIX_EXPRESSIONS: tuple[type[Expr], ...] = (RoleBegin, RoleEnd, Show)


def _all_known(pieces: Sequence[str | Deferred]) -> bool:
    return all(isinstance(piece, str) for piece in pieces)
