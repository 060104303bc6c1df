"""Draws a program's state as HTML: a fragment for a notebook, and a page.

Owns what is shown of a picture; the templates `view.html` and `view.css` own how. The fragment
includes its style, limited to a class of its own, and no script. Text of prompts and models is
untrusted: the templates escape all of it, and media are shown only from http(s) URLs, and from
``data:`` URLs of their own kind.

The kinds of text also differ without color: each has its own kind of underline, and its variable's
name in front. Forced text is hatched and italic. Cached text has a shaded background and a line
above it.
"""

from __future__ import annotations

from sgl_vllm.lang.media import Media
from sgl_vllm.lang.usage import usage_facts
from sgl_vllm.lang.views.picture import DrawnBranch, Picture, Piece, Slice, join_line
from sgl_vllm.lang.views.svg import MAX_LANES, fork_tree_svg_of
from sgl_vllm.pages import rendered

ELIDE_FROM_CHARS = 2000
"""The middle of longer constant text is folded."""
KEPT_CHARS = 600
"""How much of it is shown at either end."""
MAX_FOLDED_CHARS = 50_000
"""How much of the middle can be unfolded. The rest is only counted."""
MAX_OPEN_LANES = 12
"""The picture of forks and joins is folded if it has more lanes."""
MAX_OPEN_BRANCHES = 6
"""In a fork of more branches, those that are done are folded."""

_LABELS = {
    "gen": "generated",
    "select": "selected",
    "tool": "tool",
    "variable": "variable",
    "media": "media",
    "text": "constant",
}


def fragment_of(picture: Picture) -> str:
    """A self-contained fragment."""
    return rendered("view.html", **_values_of(picture))


def page_of(picture: Picture, title: str) -> str:
    """A complete page with the fragment."""
    return rendered("view_page.html", title=title, **_values_of(picture))


def _values_of(picture: Picture) -> dict[str, object]:
    """What `view.html` asks for."""
    branches = picture.all_branches
    return {
        "picture": picture,
        "name": picture.program.rpartition(".")[2] or "A program's run",
        "status_line": _status_line(picture),
        "usage": usage_facts(picture.usage),
        "lanes": fork_tree_svg_of(picture) if picture.root.forks else None,
        "lanes_open": len(branches) <= MAX_OPEN_LANES,
        "legend": _legend_of([piece for branch in branches for piece in branch.pieces]),
        "has_discarded": any(branch.status == "discarded" for branch in branches),
        "labels": _LABELS,
        "max_lanes": MAX_LANES,
        "tooltip_of": _tooltip_of,
        "source_of": _source_of,
        "folded_of": _folded_of,
        "is_open": _is_open,
        "join_line": join_line,
    }


def _status_line(picture: Picture) -> str:
    """How far the run is."""
    num_failed = sum(branch.status == "failed" for branch in picture.all_branches[1:])
    if not num_failed or picture.status == "failed":
        return picture.status
    branches = "branch" if num_failed == 1 else "branches"
    return f"{picture.status}, {num_failed} {branches} failed"


def _legend_of(pieces: list[Piece]) -> list[tuple[str, str]]:
    """Classes of text that are shown, each with what it means."""
    kinds = {piece.kind for piece in pieces if piece.kind != "media" or piece.text}
    items = [
        (f"sgl-{kind}-kind", "spoken" if kind == "media" else label)
        for kind, label in _LABELS.items()
        if kind in kinds
    ]
    slices = [part for piece in pieces for part in piece.slices]
    if any(part.forced for part in slices):
        items.append(("sgl-gen-kind sgl-forced", "forced by the constraint"))
    if any(part.cached for part in slices):
        meaning = (
            "found in the server's cache when first sent (estimated from the cached share of "
            "tokens)"
        )
        items.append(("sgl-text-kind sgl-cached", meaning))
    return items


def _tooltip_of(piece: Piece) -> str:
    called = f" {piece.name}" if piece.name else ""
    return "\n".join((_LABELS[piece.kind] + called, *piece.facts))


def _source_of(media: Media) -> str | None:
    """The URL to show media from; None if it may not be shown."""
    allowed = ("http://", "https://", f"data:{media.kind}/")
    return media.url if media.url.startswith(allowed) else None


def _is_open(branch: DrawnBranch, among: tuple[DrawnBranch, ...]) -> bool:
    if branch.status == "discarded":
        return False
    return len(among) <= MAX_OPEN_BRANCHES or branch.status in ("failed", "running")


def _folded_of(piece: Piece) -> dict[str, object] | None:
    """A long constant, whose middle is folded; `num_left_out` characters of it are not there."""
    num_chars = len(piece.text)
    if piece.kind != "text" or num_chars <= ELIDE_FROM_CHARS:
        return None
    middle_end = num_chars - KEPT_CHARS
    reach = min(middle_end, KEPT_CHARS + MAX_FOLDED_CHARS)
    return {
        "head": _between(piece, 0, KEPT_CHARS),
        "middle": _between(piece, KEPT_CHARS, reach),
        "tail": _between(piece, middle_end, num_chars),
        "num_folded": middle_end - KEPT_CHARS,
        "num_left_out": middle_end - reach,
    }


def _between(piece: Piece, begin: int, end: int) -> list[Slice]:
    """The slices of ``piece.text[begin:end]``."""
    found, position = [], 0
    for part in piece.slices:
        first, last = max(begin - position, 0), min(end - position, len(part.text))
        if first < last:
            found.append(Slice(part.text[first:last], part.forced, part.cached))
        position += len(part.text)
    return found
