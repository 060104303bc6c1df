"""Draws forks and joins as SVG: a lane per branch, and a block per operation.

Owns the layout in lanes; the template `lanes.svg` owns how it looks. A block's width grows with the
square root of its text's length, so that long texts leave room for the rest.

::

    main     [text][gen]─┬──────────────────┬─[text]
    fork[0]              ├─[text][gen]──────┤
    fork[1]              └─[text][gen     ]─┘
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from math import sqrt

from sgl_vllm.lang.views.picture import DrawnBranch, DrawnFork, DrawnJoin, DrawnTurn, Picture, Piece
from sgl_vllm.pages import rendered, visible

MAX_LANES = 64
"""The most lanes of one fork. Further branches are only counted."""

_LANE_HEIGHT = 34
_BLOCK_HEIGHT = 18
_LEFT, _TOP = 10, 12
_GAP = 16
_SHOWN_CHARS = 240


@dataclass(frozen=True)
class _Shape:
    """A wire (`path`), words, the cross of a failed branch, or the block of an operation, at
    (`x`, `y`); pale if its branch is discarded."""

    is_pale: bool
    x: float = 0
    y: float = 0
    path: str = ""
    words: str = ""
    words_kind: str = ""
    tooltip: str = ""
    is_cross: bool = False
    block: str = ""
    width: float = 0


@dataclass
class _Sheet:
    """What has been drawn so far, and its size. Wires are below everything else."""

    wires: list[_Shape] = field(default_factory=list)
    shapes: list[_Shape] = field(default_factory=list)
    width: float = 0
    num_lanes: int = 0

    def take_lane(self) -> int:
        self.num_lanes += 1
        return self.num_lanes - 1


def fork_tree_svg_of(picture: Picture) -> str:
    """The picture as an ``<svg>`` element, light or dark as the reader's system prefers."""
    sheet = _Sheet()
    _draw_branch(sheet, picture.root, _LEFT, from_wire=None)
    shapes = [*sheet.wires, *sheet.shapes]
    return rendered(
        "lanes.svg",
        shapes=shapes,
        # Ids are shared with the rest of the page, so they must differ between pictures.
        mark=hashlib.blake2s(repr(shapes).encode(errors="replace"), digest_size=5).hexdigest(),
        width=round(sheet.width + _LEFT + 8),
        height=_TOP + sheet.num_lanes * _LANE_HEIGHT + 2,
        block_height=_BLOCK_HEIGHT,
        num_prompts=len(picture.all_branches),
    )


def _draw_branch(
    sheet: _Sheet, branch: DrawnBranch, x: float, from_wire: tuple[float, int] | None
) -> tuple[float, int]:
    """Draw a branch and its own branches, starting at `x`. Returns where its lane ends, and the
    lane's number."""
    lane = sheet.take_lane()
    y = _middle_of(lane)
    pale = branch.status == "discarded"
    if from_wire is not None:
        sheet.wires.append(_Shape(pale, path=_wire(from_wire, (x, lane))))
    label = branch.label or "main"
    sheet.shapes.append(_Shape(pale, x, y - 13, words=label, words_kind="lane-label"))
    begin, ends = x, dict[str, tuple[float, int]]()
    for block in branch.blocks:
        match block:
            case DrawnTurn(role, pieces):
                for piece in pieces:
                    shape = _block_of(piece, role, x, y, pale)
                    sheet.shapes.append(shape)
                    x += shape.width + 2
            case DrawnFork(branches):
                for child in branches[:MAX_LANES]:
                    ends[child.label] = _draw_branch(sheet, child, x + _GAP, (x, lane))
                if len(branches) > MAX_LANES:
                    more = f"and {len(branches) - MAX_LANES:,} more"
                    y_more = _middle_of(sheet.take_lane()) + 4
                    sheet.shapes.append(
                        _Shape(pale, x + _GAP, y_more, words=more, words_kind="more")
                    )
                x += 6
            case DrawnJoin(labels):
                back = [ends[label] for label in labels if label in ends]
                x = max([x, *(end for end, _ in back)]) + _GAP
                sheet.wires += [_Shape(pale, path=_wire(end, (x, lane))) for end in back]
                x += 4
    if branch.error is not None and branch.status == "failed":
        sheet.shapes.append(_Shape(pale, x + 5, y - 5, is_cross=True, tooltip=branch.error))
        x += 20
    elif branch.status in ("running", "waiting"):
        tooltip = branch.busy or branch.status
        sheet.shapes.append(_Shape(pale, x + 5, y + 3, words="…", tooltip=tooltip))
        x += 18
    if x > begin:
        sheet.wires.append(_Shape(pale, path=f"M{begin:.1f} {y}H{x:.1f}"))
    sheet.width = max(sheet.width, x, begin + 6.2 * len(label))
    return x, lane


def _middle_of(lane: int) -> int:
    return _TOP + lane * _LANE_HEIGHT + _LANE_HEIGHT // 2


def _wire(begin: tuple[float, int], end: tuple[float, int]) -> str:
    (x0, lane0), (x1, lane1) = begin, end
    y0, y1 = _middle_of(lane0), _middle_of(lane1)
    near = x0 if lane1 > lane0 else x1 - _GAP  # the vertical part is next to the parent
    return (
        f"M{x0:.1f} {y0}H{near:.1f}"
        f"C{near + _GAP * 0.8:.1f} {y0} {near + _GAP * 0.2:.1f} {y1} {near + _GAP:.1f} {y1}"
        f"H{x1:.1f}"
    )


def _block_of(piece: Piece, role: str | None, x: float, y: float, pale: bool) -> _Shape:
    """The block of an operation, with as much of its name as fits."""
    text, name = piece.text, visible(piece.name or "")
    width = 24.0 if piece.media is not None and not text else min(12 + 3.2 * sqrt(len(text)), 190.0)
    if piece.kind == "text":
        label = ""
    else:
        width = max(width, min(10 + 6.4 * len(name), 130.0)) if name else width
        fits = max(1, int((width - 8) / 6.2))
        label = name if len(name) <= fits else name[: fits - 1] + "…"
    shown = text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + " …"
    title = f"{role or ''} {piece.kind} {name}".strip()
    tooltip = "\n".join(filter(None, [title, *piece.facts, shown]))
    return _Shape(pale, x, y, block=piece.kind, width=width, words=label, tooltip=tooltip)
