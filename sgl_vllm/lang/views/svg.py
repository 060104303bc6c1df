"""Draws forks and joins as SVG: a lane per branch, and a block per operation.

Owns the layout in lanes. A block's width grows with the square root of its text's length, so that
long texts leave room for the rest.

::

    main     [text][gen]─┬──────────────────┬─[text]
    fork[0]              ├─[text][gen]──────┤
    fork[1]              └─[text][gen     ]─┘
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from math import sqrt

from sgl_vllm.lang.views.picture import Branch, Fork, Join, Picture, Piece, Turn, escaped, visible

MAX_LANES = 64
"""The most lanes of one fork. Further branches are only counted."""

_LANE_HEIGHT = 34
_BLOCK_HEIGHT = 18
_LEFT, _TOP = 10, 12
_GAP = 16
_SHOWN_CHARS = 240

# The pattern of each kind of block, drawn over its tint.
_PATTERNS = {
    "gen": '<path d="M0 8L8 0M-2 2L2 -2M6 10L10 6"/>',
    "select": '<circle cx="2" cy="2" r="1.2"/><circle cx="6" cy="6" r="1.2"/>',
    "tool": '<path d="M0 4H8M4 0V8"/>',
    "variable": '<path d="M0 2H8M0 6H8"/>',
    "media": '<path d="M2 0V8M6 0V8"/>',
}
_KINDS = ("text", *_PATTERNS)

_STYLE = """
.sgl-lanes-picture { --ink: #16191f; --soft: #5a6272; --surface: #ffffff; --text: #8b94a3;
  --gen: #0f766e; --select: #7e22ce; --tool: #b45309; --variable: #1d4ed8; --media: #be185d;
  --bad: #b91c1c; font: 10.5px system-ui, sans-serif; background: var(--surface); }
@media (prefers-color-scheme: dark) { .sgl-lanes-picture { --ink: #e8eaee; --soft: #9aa3b2;
  --surface: #191d24; --text: #77808f; --gen: #2cc5b5; --select: #c99bff; --tool: #f0a03c;
  --variable: #82aaff; --media: #f472b6; --bad: #ff7a70; } }
.sgl-lanes-picture text { fill: var(--ink); paint-order: stroke; stroke: var(--surface);
  stroke-width: 3px; stroke-linejoin: round; }
.sgl-lanes-picture .lane-label { fill: var(--soft); }
.sgl-lanes-picture .wire { fill: none; stroke: var(--soft); stroke-width: 1.3; }
.sgl-lanes-picture .discarded { opacity: .45; }
.sgl-lanes-picture .discarded .wire { stroke-dasharray: 4 3; }
.sgl-lanes-picture .cross { stroke: var(--bad); stroke-width: 2.4; fill: none; }
.sgl-lanes-picture .more { fill: var(--soft); }
"""


@dataclass
class _Sheet:
    """What has been drawn so far, and its size."""

    parts: list[str] = field(default_factory=list)
    wires: list[str] = field(default_factory=list)
    width: float = 0
    num_lanes: int = 0

    def take_lane(self) -> int:
        self.num_lanes += 1
        return self.num_lanes - 1


def fork_tree_svg_of(picture: Picture) -> str:
    """The picture as an ``<svg>`` element, light or dark as the reader's system prefers."""
    sheet = _Sheet()
    _draw_branch(sheet, picture.root, _LEFT, from_wire=None)
    width, height = sheet.width + _LEFT + 8, _TOP + sheet.num_lanes * _LANE_HEIGHT + 2
    body = "".join(sheet.wires) + "".join(sheet.parts)
    # Ids are shared with the rest of the page, so they must differ between pictures.
    mark = hashlib.blake2s(body.encode(), digest_size=5).hexdigest()
    patterns = "".join(
        f'<pattern id="sgl-{kind}-{mark}" width="8" height="8" patternUnits="userSpaceOnUse">'
        f'<g style="fill: var(--{kind}); stroke: var(--{kind})" stroke-width=".9" '
        f'fill-opacity=".7" stroke-opacity=".7">{shape}</g></pattern>'
        for kind, shape in _PATTERNS.items()
    )
    fills = "".join(
        f".sgl-lanes-{mark} .{kind} {{ stroke: var(--{kind}); "
        f"fill: color-mix(in srgb, var(--{kind}) 17%, var(--surface)); }}"
        + (
            f".sgl-lanes-{mark} .{kind}-over {{ fill: url(#sgl-{kind}-{mark}); }}"
            * (kind != "text")
        )
        for kind in _KINDS
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="sgl-lanes-picture sgl-lanes-{mark}" '
        f'width="{width:.0f}" height="{height}" viewBox="0 0 {width:.0f} {height}" role="img" '
        f'aria-label="fork and join: {len(picture.all_branches)} prompts">'
        f"<style>{_STYLE}{fills}</style><defs>{patterns}</defs>{body}</svg>"
    )


def _draw_branch(
    sheet: _Sheet, branch: Branch, x: float, from_wire: tuple[float, int] | None
) -> tuple[float, int]:
    """Draw a branch and its own branches, starting at `x`. Returns where its lane ends, and the
    lane's number."""
    lane = sheet.take_lane()
    y = _middle_of(lane)
    dim = ' class="discarded"' if branch.status == "discarded" else ""
    if from_wire is not None:
        sheet.wires.append(f"<g{dim}>{_wire(from_wire, (x, lane))}</g>")
    sheet.parts.append(f"<g{dim}>")
    label = escaped(branch.label or "main")
    sheet.parts.append(f'<text class="lane-label" x="{x:.1f}" y="{y - 13}">{label}</text>')
    begin, ends = x, dict[str, tuple[float, int]]()
    for block in branch.blocks:
        match block:
            case Turn(role, pieces):
                for piece in pieces:
                    x = _draw_piece(sheet, piece, role, x, y)
            case Fork(branches):
                sheet.parts.append("</g>")
                for child in branches[:MAX_LANES]:
                    ends[child.label] = _draw_branch(sheet, child, x + _GAP, (x, lane))
                if len(branches) > MAX_LANES:
                    more = f"and {len(branches) - MAX_LANES:,} more"
                    y_more = _middle_of(sheet.take_lane())
                    sheet.parts.append(
                        f'<text class="more" x="{x + _GAP:.1f}" y="{y_more + 4}">{more}</text>'
                    )
                sheet.parts.append(f"<g{dim}>")
                x += 6
            case Join(labels):
                back = [ends[label] for label in labels if label in ends]
                x = max([x, *(end for end, _ in back)]) + _GAP
                sheet.wires += [f"<g{dim}>{_wire(end, (x, lane))}</g>" for end in back]
                x += 4
    if branch.error is not None and branch.status == "failed":
        sheet.parts.append(
            f'<path class="cross" d="M{x + 5:.1f} {y - 5}l10 10m0 -10l-10 10">'
            f"<title>{escaped(branch.error)}</title></path>"
        )
        x += 20
    elif branch.status in ("running", "waiting"):
        tooltip = escaped(branch.busy or branch.status)
        sheet.parts.append(f'<text x="{x + 5:.1f}" y="{y + 3}">…<title>{tooltip}</title></text>')
        x += 18
    sheet.parts.append("</g>")
    if x > begin:
        sheet.wires.append(f'<g{dim}><path class="wire" d="M{begin:.1f} {y}H{x:.1f}"/></g>')
    sheet.width = max(sheet.width, x, begin + 6.2 * len(branch.label or "main"))
    return x, lane


def _middle_of(lane: int) -> int:
    return _TOP + lane * _LANE_HEIGHT + _LANE_HEIGHT // 2


def _wire(begin: tuple[float, int], end: tuple[float, int]) -> str:
    (x0, lane0), (x1, lane1) = begin, end
    y0, y1 = _middle_of(lane0), _middle_of(lane1)
    near = x0 if lane1 > lane0 else x1 - _GAP  # the vertical part is next to the parent
    return (
        f'<path class="wire" d="M{x0:.1f} {y0}H{near:.1f}'
        f"C{near + _GAP * 0.8:.1f} {y0} {near + _GAP * 0.2:.1f} {y1} {near + _GAP:.1f} {y1}"
        f'H{x1:.1f}"/>'
    )


def _draw_piece(sheet: _Sheet, piece: Piece, role: str | None, x: float, y: float) -> float:
    """Draw a block at `x`. Returns where the next one starts."""
    text = piece.text
    width = 24.0 if piece.media is not None and not text else min(12 + 3.2 * sqrt(len(text)), 190.0)
    name = visible(piece.name or "")
    if piece.kind != "text" and name:
        width = max(width, min(10 + 6.4 * len(name), 130.0))
    shown = text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + " …"
    tooltip = "\n".join(
        filter(None, [f"{role or ''} {piece.kind} {name}".strip(), *piece.facts, shown])
    )
    top = y - _BLOCK_HEIGHT / 2
    box = f'x="{x:.1f}" y="{top}" width="{width:.1f}" height="{_BLOCK_HEIGHT}" rx="3"'
    sheet.parts.append(f'<g><title>{escaped(tooltip)}</title><rect class="{piece.kind}" {box}/>')
    if piece.kind != "text":
        sheet.parts.append(f'<rect class="{piece.kind}-over" {box}/>')
    if piece.kind != "text" and name:
        fits = max(1, int((width - 8) / 6.2))
        label = name if len(name) <= fits else name[: fits - 1] + "…"
        sheet.parts.append(f'<text x="{x + 5:.1f}" y="{y + 3.5}">{escaped(label)}</text>')
    sheet.parts.append("</g>")
    return x + width + 2
