"""Shows a graph as text, and as what a run's picture is drawn from: a lane per stream."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sgl_vllm.lang.ir import Role, RoleBegin, RoleEnd
from sgl_vllm.lang.text import shortened
from sgl_vllm.lang.tracing.nodes import Evaluate, Node, TracedFork, TracedJoin, Write
from sgl_vllm.lang.tracing.standin import source_of
from sgl_vllm.lang.transcript import SpanKind
from sgl_vllm.lang.usage import Usage
from sgl_vllm.lang.views.picture import (
    MAX_DEPTH,
    DrawnBlock,
    DrawnBranch,
    DrawnFork,
    DrawnJoin,
    DrawnTurn,
    Picture,
    Piece,
    Slice,
    Status,
)
from sgl_vllm.lang.views.svg import fork_tree_svg_of
from sgl_vllm.pages import rendered

if TYPE_CHECKING:
    from sgl_vllm.lang.tracing.trace import Graph

_KINDS: dict[str, SpanKind] = {
    "gen": "gen",
    "gen_int": "gen",
    "gen_string": "gen",
    "select": "select",
    "set": "variable",
    "var": "variable",
    "image": "media",
    "video": "media",
    "audio": "media",
}
"""By the first word of an operation. All others are shown as tools are."""


def as_text(graph: Graph) -> str:
    """The graph for a terminal: a block per stream, an operation per line with its number, what
    it reads, and where that comes from."""
    lines = [f"program {graph.title}"]
    if graph.known:
        lines[0] += f" with {', '.join(graph.known)} known"
    for stream in graph.streams:
        lines.append(str(stream))
        for node in graph.nodes_of(stream.index):
            words = shortened(str(node), 100)
            lines.append(f"  {node.index:>4}  {words}" + _after(node))
    if graph.returned is not None:
        lines.append(f"returns {source_of(graph.returned)}")
    if graph.stopped is not None:
        lines.append(f"stopped: {graph.stopped}")
    return "\n".join(lines)


def _after(node: Node) -> str:
    match node.operation:
        case TracedFork(children):
            return f" -> streams {', '.join(map(str, children))}"
        case TracedJoin(branches, _):
            return f" <- streams {', '.join(map(str, branches))}"
    return f"  [{_sources(node)}]" if node.reads else ""


def _sources(node: Node) -> str:
    """The variables that a node reads, and the nodes that they come from."""
    return ", ".join(f"{read.name or 'text'} of {read.node}" for read in node.reads)


def as_svg(graph: Graph) -> str:
    """The picture, as one SVG element that needs nothing else: see `svg.py`."""
    return fork_tree_svg_of(Picture(_branch(graph, 0), Usage(), program=graph.name))


def _branch(graph: Graph, index: int, depth: int = 0) -> DrawnBranch:
    blocks: list[DrawnBlock] = []
    role: Role | None = None
    for node in graph.nodes_of(index):
        match node.operation:
            case TracedFork(children) if depth < MAX_DEPTH:
                branches = (_branch(graph, child, depth + 1) for child in children)
                blocks.append(DrawnFork(tuple(branches)))
            case TracedJoin(branches, name):
                labels = tuple(f"stream {branch}" for branch in branches)
                blocks.append(DrawnJoin(labels, (name or "",), as_text=name is None))
            case Evaluate(RoleBegin(begun)):
                role = begun
            case Evaluate(RoleEnd()):
                role = None
            case _:
                blocks.append(DrawnTurn(role, (_piece(node),)))
    error = graph.stopped if index == 0 else None
    status: Status = "done" if error is None else "failed"
    return DrawnBranch(f"stream {index}" if index else "", status, tuple(blocks), 0, error=error)


def _piece(node: Node) -> Piece:
    shown, facts = str(node), [f"line {node.line}"]
    if node.reads:
        facts.append(f"reads {_sources(node)}")
    if isinstance(node.operation, Write):
        kind: SpanKind = "text" if node.operation.is_constant else "variable"
        return Piece(kind, (Slice(node.operation.text),), facts=tuple(facts))
    called = shown.partition(" ")[0]
    name = next((made.name for made in node.writes), None) or called
    return Piece(_KINDS.get(called, "tool"), (), name, (shortened(shown, 2000), *facts))


def as_html(graph: Graph) -> str:
    """A page that needs nothing else: the picture and the text."""
    return rendered("graph_page.html", title=graph.name, picture=as_svg(graph), text=as_text(graph))
