"""Shows a graph as text, as a picture (SVG), and as a page (HTML).

Owns the layout: a column per stream, a row per operation in the program's order, lines for fork and
join, curves for variables; the templates `graph.svg` and `graph_page.html` own how it looks, and
escape everything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sgl_vllm.lang.ir import RoleBegin, RoleEnd
from sgl_vllm.lang.tracing.nodes import Evaluate, Node, TracedFork, TracedJoin, Write
from sgl_vllm.lang.tracing.standin import source_of
from sgl_vllm.pages import rendered

if TYPE_CHECKING:
    from sgl_vllm.lang.tracing.trace import Graph

MOST_STREAMS = 40
"""A picture shows at most this many streams, and says how many more there are."""
LABEL_CHARS = 31


def _shortened(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


# --- text ----------------------------------------------------------------------------------------


def as_text(graph: Graph) -> str:
    """The graph for a terminal: a block per stream, an operation per line with its number, what
    it reads, and where that comes from."""
    lines = [f"program {graph.title}"]
    if graph.known:
        lines[0] += f" with {', '.join(graph.known)} known"
    for stream in graph.streams:
        lines.append(str(stream))
        for node in graph.nodes_of(stream.index):
            sources = ", ".join(f"{read.name or 'text'} of {read.node}" for read in node.reads)
            words = _shortened(str(node), 100)
            lines.append(f"  {node.index:>4}  {words}" + _after(node, sources))
    if graph.returned is not None:
        lines.append(f"returns {source_of(graph.returned)}")
    if graph.stopped is not None:
        lines.append(f"stopped: {graph.stopped}")
    return "\n".join(lines)


def _after(node: Node, sources: str) -> str:
    match node.operation:
        case TracedFork(children):
            return f" -> streams {', '.join(map(str, children))}"
        case TracedJoin(branches, _):
            return f" <- streams {', '.join(map(str, branches))}"
    return f"  [{sources}]" if sources else ""


# --- picture -------------------------------------------------------------------------------------

_WIDTH, _HEIGHT, _COLUMN, _ROW, _MARGIN, _TOP = 250, 30, 300, 44, 24, 64


@dataclass(frozen=True)
class _Box:
    """Where a node is drawn, in pixels."""

    node: Node
    left: int
    top: int
    width: int = _WIDTH
    height: int = _HEIGHT

    @property
    def right(self) -> int:
        return self.left + self.width

    @property
    def middle(self) -> int:
        return self.top + self.height // 2

    @property
    def center(self) -> int:
        return self.left + self.width // 2

    @property
    def kind(self) -> str:
        """Which color it has, if the picture has one for it."""
        match self.node.operation:
            case Write() as write:
                return "constant" if write.is_constant else "text"
            case TracedFork() | TracedJoin():
                return "branch"
            case Evaluate(RoleBegin() | RoleEnd()):
                return "role"
        return str(self.node).partition(" ")[0].partition("_")[0]

    def words(self, most: int) -> str:
        return _shortened(str(self.node), most)


@dataclass(frozen=True)
class _Edge:
    """A curve from a variable's writer to its reader, ending at (`x`, `y`)."""

    title: str
    path: str
    x: int
    y: int


def _before(graph: Graph) -> dict[int, list[int]]:
    """The nodes right before each node: in its stream, at the fork that its stream comes from, and
    at the ends of the branches that it joins."""
    before: dict[int, list[int]] = {}
    last: dict[int, int] = {}  # the last node of each stream so far
    for node in graph.nodes:
        ends = [node.stream]
        if isinstance(node.operation, TracedJoin):
            ends += node.operation.branches
        before[node.index] = [last[stream] for stream in ends if stream in last]
        last[node.stream] = node.index
        if isinstance(node.operation, TracedFork):
            last.update(dict.fromkeys(node.operation.children, node.index))
    return before


def as_svg(graph: Graph) -> str:
    """The picture, as one SVG element that needs nothing else."""
    before = _before(graph)
    boxes: dict[int, _Box] = {}
    for node in graph.nodes:
        if node.stream < MOST_STREAMS:
            above = (*before[node.index], *(read.node for read in node.reads))
            top = max((boxes[i].top + _ROW for i in above if i in boxes), default=_TOP)
            boxes[node.index] = _Box(node, _MARGIN + node.stream * _COLUMN, top)
    streams = graph.streams[:MOST_STREAMS]
    notes = [f"stopped: {graph.stopped}"] if graph.stopped is not None else []
    if len(graph.streams) > MOST_STREAMS:
        notes.insert(0, f"and {len(graph.streams) - MOST_STREAMS} more streams")
    bottom = max((box.top for box in boxes.values()), default=_TOP) + _ROW
    width = 2 * _MARGIN + len(streams) * _COLUMN - (_COLUMN - _WIDTH)
    height = bottom + _MARGIN + 18 * len(notes)
    column = {stream.index: _MARGIN + stream.index * _COLUMN for stream in streams}
    texts = [(_MARGIN, 22, "title", graph.title)]
    texts += [(column[stream.index], 48, "note", str(stream)) for stream in streams]
    texts += [
        (_MARGIN, bottom + 14 + 18 * i, "note", _shortened(note, 160))
        for i, note in enumerate(notes)
    ]
    readers = [box for box in boxes.values() if not isinstance(box.node.operation, TracedJoin)]
    return rendered(
        "graph.svg",
        name=graph.name,
        width=width,
        height=height,
        texts=texts,
        lanes=[
            _lane(boxes[i], box)
            for box in boxes.values()
            for i in before[box.node.index]
            if i in boxes
        ],
        edges=[
            _edge(boxes[read.node], box, read.name)
            for box in readers
            for read in box.node.reads
            if read.node in boxes
        ],
        boxes=boxes.values(),
        label_chars=LABEL_CHARS,
    )


def _lane(before: _Box, after: _Box) -> str:
    """From below one box to above another, or into a join from the side."""
    x, y = before.center, before.top + _HEIGHT
    if before.left > after.left:
        end = f"{x} {after.middle} {after.right} {after.middle}"
    else:
        end = f"{after.center} {y} {after.center} {after.top}"
    return f"M{x} {y}Q{end}"


def _edge(writer: _Box, reader: _Box, name: str | None) -> _Edge:
    if writer.left == reader.left:
        x, to_x = writer.right, reader.right
        bend = x + min(44, 14 + abs(reader.top - writer.top) // 9)
    else:
        goes_right = reader.left > writer.left
        x, to_x = (writer.right, reader.left) if goes_right else (writer.left, reader.right)
        bend = (x + to_x) // 2
    y, to_y = writer.middle, reader.middle
    path = f"M{x} {y}C{bend} {y} {bend} {to_y} {to_x} {to_y}"
    return _Edge("the text of the prompt" if name is None else name, path, to_x, to_y)


# --- page ----------------------------------------------------------------------------------------


def as_html(graph: Graph) -> str:
    """A page that needs nothing else: the picture and the text."""
    return rendered("graph_page.html", title=graph.name, picture=as_svg(graph), text=as_text(graph))
