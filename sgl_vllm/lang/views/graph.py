"""Shows a graph as text, as a picture (SVG), as a page (HTML), and as plain data.

Owns the layout: a column per stream, a row per operation in the program's order, lines for fork and
join, curves for variables. Text from programs is untrusted, so everything shown is escaped.
"""

from __future__ import annotations

import dataclasses
import enum
import html
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from sgl_vllm.lang.ir import RoleBegin, RoleEnd, Value
from sgl_vllm.lang.tracing.nodes import Evaluate, Fork, Join, Node, StreamTrace, Write
from sgl_vllm.lang.tracing.standin import StandIn, source_of

MOST_STREAMS = 40
"""A picture shows at most this many streams, and says how many more there are."""
LABEL_CHARS = 31


class Graph(Protocol):
    """What is shown of a traced program."""

    @property
    def name(self) -> str: ...
    @property
    def title(self) -> str: ...
    @property
    def known(self) -> tuple[str, ...]: ...
    @property
    def streams(self) -> tuple[StreamTrace, ...]: ...
    @property
    def nodes(self) -> tuple[Node, ...]: ...
    @property
    def returned(self) -> Value: ...
    @property
    def stopped(self) -> str | None: ...
    def nodes_of(self, stream: int) -> Sequence[Node]: ...


def _kind(node: Node) -> str:
    """Which color a node has."""
    match node.operation:
        case Write() as write:
            return "constant" if write.is_constant else "text"
        case Fork() | Join():
            return "branch"
        case Evaluate(RoleBegin() | RoleEnd()):
            return "role"
        case Evaluate():
            word = str(node).partition(" ")[0].partition("_")[0]
            return word if word in _KINDS else "other"
    return "other"


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
        case Fork(children):
            return f" -> streams {', '.join(map(str, children))}"
        case Join(branches, _):
            return f" <- streams {', '.join(map(str, branches))}"
    return f"  [{sources}]" if sources else ""


# --- picture -------------------------------------------------------------------------------------

_WIDTH, _HEIGHT, _COLUMN, _ROW, _MARGIN, _TOP = 250, 30, 300, 44, 24, 64

_KINDS = ("constant", "text", "gen", "select", "tool", "role", "branch", "other")
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
""" + "".join(f".sgl-graph .{kind} {{ fill: var(--{kind}) }}\n" for kind in _KINDS)


@dataclass(frozen=True)
class _Box:
    """Where a node is drawn, in pixels."""

    node: Node
    left: int
    top: int

    @property
    def right(self) -> int:
        return self.left + _WIDTH

    @property
    def middle(self) -> int:
        return self.top + _HEIGHT // 2

    @property
    def center(self) -> int:
        return self.left + _WIDTH // 2


def _before(graph: Graph) -> dict[int, list[int]]:
    """The nodes right before each node: in its stream, at the fork that its stream comes from, and
    at the ends of the branches that it joins."""
    before: dict[int, list[int]] = {}
    last: dict[int, int] = {}  # the last node of each stream so far
    for node in graph.nodes:
        ends = [node.stream]
        if isinstance(node.operation, Join):
            ends += node.operation.branches
        before[node.index] = [last[stream] for stream in ends if stream in last]
        last[node.stream] = node.index
        if isinstance(node.operation, Fork):
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
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="sgl-graph" role="img" '
        f'width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'aria-label="{_escaped(f"graph of the program {graph.name}")}">',
        f"<style>{_STYLE}</style>",
        f'<rect x="0" y="0" width="{width}" height="{height}" style="fill: var(--paper); '
        f'stroke: none"/>',
        _line_of_text(_MARGIN, 22, graph.title, "title"),
        *(_line_of_text(_MARGIN + s.index * _COLUMN, 48, str(s), "note") for s in streams),
    ]
    for box in boxes.values():
        parts += [_lane(boxes[i], box) for i in before[box.node.index] if i in boxes]
    for box in boxes.values():
        if not isinstance(box.node.operation, Join):
            reads = [read for read in box.node.reads if read.node in boxes]
            parts += [_edge(boxes[read.node], box, read.name) for read in reads]
    parts += [_shape(box) for box in boxes.values()]
    for i, note in enumerate(notes):
        parts.append(_line_of_text(_MARGIN, bottom + 14 + 18 * i, _shortened(note, 160), "note"))
    return "\n".join([*parts, "</svg>"])


def _escaped(text: str) -> str:
    """Safe in SVG, which is XML: also without the control characters that it does not allow."""
    shown = "".join(c if c.isprintable() else "·" for c in text)
    return html.escape(shown, quote=True)


def _line_of_text(x: int, y: int, text: str, kind: str) -> str:
    return f'<text x="{x}" y="{y}" class="{kind}">{_escaped(text)}</text>'


def _shape(box: _Box) -> str:
    words = str(box.node)
    return (
        f"<g><title>{_escaped(_shortened(words, 2000))} (line {box.node.line})</title>"
        f'<rect x="{box.left}" y="{box.top}" width="{_WIDTH}" height="{_HEIGHT}" rx="5" '
        f'class="{_kind(box.node)}"/>'
        f'<text x="{box.left + 8}" y="{box.top + 19}">'
        f"{_escaped(_shortened(words, LABEL_CHARS))}</text></g>"
    )


def _lane(before: _Box, after: _Box) -> str:
    """From below one box to above another, or into a join from the side."""
    x, y = before.center, before.top + _HEIGHT
    if before.left > after.left:
        end = f"{x} {after.middle} {after.right} {after.middle}"
    else:
        end = f"{after.center} {y} {after.center} {after.top}"
    return f'<path d="M{x} {y}Q{end}" class="lane"/>'


def _edge(writer: _Box, reader: _Box, name: str | None) -> str:
    """A curve from a variable's writer to its reader, with its name as a tooltip."""
    if writer.left == reader.left:
        x, to_x = writer.right, reader.right
        bend = x + min(44, 14 + abs(reader.top - writer.top) // 9)
    else:
        goes_right = reader.left > writer.left
        x, to_x = (writer.right, reader.left) if goes_right else (writer.left, reader.right)
        bend = (x + to_x) // 2
    y, to_y = writer.middle, reader.middle
    return (
        f"<g><title>{_escaped(name if name is not None else 'the text of the prompt')}</title>"
        f'<path d="M{x} {y}C{bend} {y} {bend} {to_y} {to_x} {to_y}" class="edge"/>'
        f'<circle cx="{to_x}" cy="{to_y}" r="3.5" class="tip"/></g>'
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


# --- plain data ----------------------------------------------------------------------------------


def as_dict(value: Value) -> Value:
    """A value as plain data; see `Graph.as_dict`."""
    match value:
        case enum.Enum():
            return as_dict(value.value)
        case None | bool() | int() | float() | str():
            return value
        case StandIn():
            if value._leaf is not None:
                return as_dict(value._leaf)
            kwargs = {key: as_dict(arg) for key, arg in value._kwargs.items()}
            return {
                "operation": value._operation,
                "args": as_dict(value._args),
                **({"kwargs": kwargs} if kwargs else {}),
            }
        case list() | tuple():
            return [as_dict(item) for item in value]
        case Mapping():
            return {"type": "dict", "items": as_dict(list(value.items()))}
    if inspect.isroutine(value) or isinstance(value, type):
        return {"function": f"{value.__module__}.{value.__qualname__}"}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        given = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        parts = {name: as_dict(part) for name, part in given.items() if part is not None}
        return {"type": type(value).__name__, **parts}
    raise ValueError(f"a {type(value).__qualname__} in a program has no form in JSON")
