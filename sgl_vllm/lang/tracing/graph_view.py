"""Shows a graph: as text, as a picture (SVG), as a page (HTML).

Owns the drawing. What a program says is untrusted: everything that is shown is escaped. The SVG is
laid out by hand and needs no library: a column per stream, a row per operation in the program's
order, lines for fork and join, curves for variables.
"""

from __future__ import annotations

import html
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from sgl_vllm.lang.ir import Gen, RoleBegin, RoleEnd, Select, Tool
from sgl_vllm.lang.tracing.deferred import Deferred
from sgl_vllm.lang.tracing.graph import (
    Evaluate,
    EvaluateDeferred,
    Fork,
    Graph,
    Join,
    Node,
    ReadPrompt,
    SetVariable,
    StreamTrace,
    Write,
)

MOST_STREAMS = 40
"""Streams that a picture shows; it says how many more there are."""
LABEL_CHARS = 31

# --- words ---------------------------------------------------------------------------------------


def text_of(pieces: Sequence[str | Deferred]) -> str:
    """Text with its deferred pieces in braces."""
    return "".join(
        piece if isinstance(piece, str) else "{" + piece.source + "}" for piece in pieces
    )


def label(node: Node) -> str:
    """One operation in a few words."""
    match node.operation:
        case Write(pieces):
            return f"text {text_of(pieces)!r}"
        case Evaluate(expr):
            return str(expr)
        case EvaluateDeferred(value):
            name = f" {value.name!r}" if value.name is not None else ""
            return f"{value.kind}{name} {value.source}"
        case SetVariable(name, template):
            given = ", ".join(part.source for part in template.inputs)
            shape = template.shape
            known = repr(shape) if type(shape) in (str, int, float, bool) else type(shape).__name__
            return f"set {name!r} = {given or known}"
        case ReadPrompt():
            return "read the prompt"
        case Fork(children):
            return f"fork({len(children)})"
        case Join(_, mode):
            return "join" if mode == "gather_variable" else "join of texts"


def _kind(node: Node) -> str:
    match node.operation:
        case Write() as write:
            return "constant" if write.known_text is not None else "text"
        case Evaluate(Gen()):
            return "gen"
        case Evaluate(Select()):
            return "select"
        case Evaluate(Tool()):
            return "tool"
        case Evaluate(RoleBegin() | RoleEnd()):
            return "role"
        case EvaluateDeferred(value):
            return "select" if value.kind == "select" else "gen" if value.name else "text"
        case Fork() | Join():
            return "branch"
    return "other"


def _shortened(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


# --- text ----------------------------------------------------------------------------------------


def as_text(graph: Graph) -> str:
    """The graph for a terminal: a block per stream, an operation per line with its number, what
    it reads, and where that comes from."""
    lines = [f"program {graph.name}({', '.join(graph.parameters)})"]
    if graph.known:
        lines[0] += f" with {', '.join(graph.known)} known"
    for stream in graph.streams:
        lines.append(_title(stream))
        for node in stream.nodes:
            sources = ", ".join(f"{read.name or 'text'} of {read.node}" for read in node.reads)
            lines.append(
                f"  {node.index:>4}  {_shortened(label(node), 100)}" + _after(node, sources)
            )
    if graph.returned.inputs:
        lines.append("returns " + ", ".join(part.source for part in graph.returned.inputs))
    if graph.stopped is not None:
        lines.append(f"stopped: {graph.stopped}")
    return "\n".join(lines)


def _title(stream: StreamTrace) -> str:
    if stream.parent is None:
        return "stream 0 (s)"
    return f"stream {stream.index} ({stream.name} of stream {stream.parent})"


def _after(node: Node, sources: str) -> str:
    match node.operation:
        case Fork(children):
            return f" -> streams {', '.join(map(str, children))}"
        case Join(branches, _):
            return f" <- streams {', '.join(map(str, branches))}"
    return f"  [{sources}]" if sources else ""


# --- picture -------------------------------------------------------------------------------------

_WIDTH, _HEIGHT, _COLUMN, _ROW, _MARGIN, _TOP = 250, 30, 300, 44, 24, 64

_STYLE = """
.sgl-graph { --ink: #1f2430; --paper: #ffffff; --line: #8a93a6; --edge: #b4562c;
  --constant: #eef1f6; --text: #dfe9fb; --gen: #d9f2dd; --select: #fdeccb; --tool: #f6dcf0;
  --role: #e9e2fa; --branch: #e2e6ec; --other: #f3f3f3; background: var(--paper);
  font: 12px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace }
@media (prefers-color-scheme: dark) { .sgl-graph { --ink: #e7eaf0; --paper: #14171d;
  --line: #78839a; --edge: #f0a070; --constant: #262b35; --text: #213757; --gen: #1d4427;
  --select: #55421a; --tool: #502746; --role: #3a2f5c; --branch: #333b48; --other: #2a2a2a } }
.sgl-graph text { fill: var(--ink) }
.sgl-graph .title { font-weight: bold }
.sgl-graph .note { font-style: italic }
.sgl-graph rect { stroke: var(--line); stroke-width: 1 }
.sgl-graph .lane { stroke: var(--line); stroke-width: 1.5; fill: none }
.sgl-graph .edge { stroke: var(--edge); stroke-width: 1.5; fill: none; opacity: 0.8 }
.sgl-graph .tip { fill: var(--edge) }
""" + "".join(
    f".sgl-graph .{kind} {{ fill: var(--{kind}) }}\n"
    for kind in ("constant", "text", "gen", "select", "tool", "role", "branch", "other")
)


@dataclass(frozen=True)
class _Box:
    """Where a node is drawn, in pixels."""

    node: Node
    column: int
    row: int

    @property
    def left(self) -> int:
        return _MARGIN + self.column * _COLUMN

    @property
    def right(self) -> int:
        return self.left + _WIDTH

    @property
    def top(self) -> int:
        return _TOP + self.row * _ROW

    @property
    def middle(self) -> int:
        return self.top + _HEIGHT // 2

    @property
    def center(self) -> int:
        return self.left + _WIDTH // 2


def _boxes(graph: Graph) -> dict[int, _Box]:
    """Rows: below what comes before it in its stream, below the fork that its stream comes from,
    and below what it reads or joins."""
    shown = {stream.index for stream in graph.streams[:MOST_STREAMS]}
    next_row = dict.fromkeys(shown, 0)
    boxes: dict[int, _Box] = {}
    for node in graph.nodes:
        if node.stream not in shown:
            continue
        row = next_row[node.stream]
        below = [boxes[read.node].row + 1 for read in node.reads if read.node in boxes]
        if isinstance(node.operation, Join):
            below += [next_row[b] for b in node.operation.branches if b in shown]
        row = max([row, *below])
        boxes[node.index] = _Box(node, node.stream, row)
        next_row[node.stream] = row + 1
        if isinstance(node.operation, Fork):
            for child in node.operation.children:
                if child in shown:
                    next_row[child] = row + 1
    return boxes


def as_svg(graph: Graph) -> str:
    """The picture, as one SVG element that needs nothing else."""
    boxes = _boxes(graph)
    num_columns = min(len(graph.streams), MOST_STREAMS)
    num_rows = max((box.row for box in boxes.values()), default=0) + 1
    notes = _notes(graph)
    width = 2 * _MARGIN + num_columns * _COLUMN - (_COLUMN - _WIDTH)
    height = _TOP + num_rows * _ROW + _MARGIN + 18 * len(notes)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="sgl-graph" role="img" '
        f'width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'aria-label="{_escaped(f"graph of the program {graph.name}")}">',
        f"<style>{_STYLE}</style>",
        f'<rect x="0" y="0" width="{width}" height="{height}" style="fill: var(--paper); '
        f'stroke: none"/>',
        _line_of_text(_MARGIN, 22, f"{graph.name}({', '.join(graph.parameters)})", "title"),
    ]
    for stream in graph.streams[:MOST_STREAMS]:
        left = _MARGIN + stream.index * _COLUMN
        parts.append(_line_of_text(left, 48, _title(stream), "note"))
        parts += _lane(stream, boxes)
    for node in graph.nodes:
        if node.index in boxes:
            parts += _branch_lines(node, graph, boxes)
    for edge in graph.edges:
        if edge.writer in boxes and edge.reader in boxes:
            is_join = isinstance(boxes[edge.reader].node.operation, Join)
            if not is_join:
                parts.append(_edge(boxes[edge.writer], boxes[edge.reader], edge.name))
    parts += [_box(box) for box in boxes.values()]
    for i, note in enumerate(notes):
        y = _TOP + num_rows * _ROW + 14 + 18 * i
        parts.append(_line_of_text(_MARGIN, y, _shortened(note, 160), "note"))
    return "\n".join([*parts, "</svg>"])


def _notes(graph: Graph) -> list[str]:
    notes = []
    if len(graph.streams) > MOST_STREAMS:
        notes.append(f"and {len(graph.streams) - MOST_STREAMS} more streams")
    if graph.stopped is not None:
        notes.append(f"stopped: {graph.stopped}")
    return notes


def _escaped(text: str) -> str:
    """Safe in SVG, which is XML: also without the control characters that it does not allow."""
    shown = "".join(c if c.isprintable() else "·" for c in text)
    return html.escape(shown, quote=True)


def _line_of_text(x: int, y: int, text: str, kind: str) -> str:
    return f'<text x="{x}" y="{y}" class="{kind}">{_escaped(text)}</text>'


def _box(box: _Box) -> str:
    kind, words = _kind(box.node), label(box.node)
    return (
        f"<g><title>{_escaped(_shortened(words, 2000))} (line {box.node.line})</title>"
        f'<rect x="{box.left}" y="{box.top}" width="{_WIDTH}" height="{_HEIGHT}" rx="5" '
        f'class="{kind}"/>'
        f'<text x="{box.left + 8}" y="{box.top + 19}">'
        f"{_escaped(_shortened(words, LABEL_CHARS))}</text></g>"
    )


def _path(commands: str, kind: str) -> str:
    return f'<path d="{commands}" class="{kind}"/>'


def _lane(stream: StreamTrace, boxes: dict[int, _Box]) -> list[str]:
    own = [boxes[node.index] for node in stream.nodes if node.index in boxes]
    return [
        _path(f"M{a.center} {a.top + _HEIGHT}V{b.top}", "lane") for a, b in itertools.pairwise(own)
    ]


def _branch_lines(node: Node, graph: Graph, boxes: dict[int, _Box]) -> list[str]:
    here = boxes[node.index]
    match node.operation:
        case Fork(children):
            ends = [graph.stream(child).nodes[:1] for child in children]
            starts = [boxes[end[0].index] for end in ends if end and end[0].index in boxes]
            return [
                _path(
                    f"M{here.right} {here.middle}H{to.center - 20}"
                    f"Q{to.center} {here.middle} {to.center} {to.top}",
                    "lane",
                )
                for to in starts
            ]
        case Join(branches, _):
            ends = [graph.stream(branch).nodes[-1:] for branch in branches]
            last = [boxes[end[0].index] for end in ends if end and end[0].index in boxes]
            return [
                _path(
                    f"M{begin.center} {begin.top + _HEIGHT}V{here.middle - 20}"
                    f"Q{begin.center} {here.middle} {begin.center - 20} {here.middle}"
                    f"H{here.right}",
                    "lane",
                )
                for begin in last
            ]
    return []


def _edge(writer: _Box, reader: _Box, name: str | None) -> str:
    if writer.column == reader.column:
        bend = writer.right + min(44, 14 + 5 * abs(reader.row - writer.row))
        start = f"M{writer.right} {writer.middle}"
        curve = f"C{bend} {writer.middle} {bend} {reader.middle} {reader.right} {reader.middle}"
        tip_x = reader.right
    else:
        goes_right = reader.column > writer.column
        x0 = writer.right if goes_right else writer.left
        tip_x = reader.left if goes_right else reader.right
        half = (x0 + tip_x) // 2
        start = f"M{x0} {writer.middle}"
        curve = f"C{half} {writer.middle} {half} {reader.middle} {tip_x} {reader.middle}"
    words = _escaped(name if name is not None else "the prompt's text")
    return (
        f"<g><title>{words}</title>{_path(start + curve, 'edge')}"
        f'<circle cx="{tip_x}" cy="{reader.middle}" r="3.5" class="tip"/></g>'
    )


# --- page ----------------------------------------------------------------------------------------

_PAGE_STYLE = """
:root { color-scheme: light dark }
body { font: 14px system-ui, sans-serif; margin: 24px }
.picture { overflow: auto; border: 1px solid #8a93a6; border-radius: 6px }
pre { overflow: auto; padding: 12px; border: 1px solid #8a93a6; border-radius: 6px }
"""


def as_html(graph: Graph) -> str:
    """A page that needs nothing else: the picture and the text."""
    name = html.escape(graph.name)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{name}</title>'
        f"<style>{_PAGE_STYLE}</style></head>\n<body><h1>{name}</h1>\n"
        f'<div class="picture">{as_svg(graph)}</div>\n'
        f"<pre>{html.escape(as_text(graph))}</pre>\n</body></html>\n"
    )
