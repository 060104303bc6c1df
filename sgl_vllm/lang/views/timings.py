"""Draws how long a run took, and when it waited for which request or tool, as HTML.

Owns the heading and the bars, and durations in words. The whole fragment is in `html.py`.
"""

from __future__ import annotations

from sgl_vllm.lang.transcript import Timing
from sgl_vllm.lang.views.picture import Branch, Picture, Piece, escaped

MAX_BARS = 64
"""Of more requests and tools, those that took longest are shown."""
MAX_OPEN_BARS = 12
"""The bars are folded if there are more."""

STYLE = """
.sgl-view .sgl-heading {
  display: flex; flex-wrap: wrap; gap: 0 12px; align-items: baseline; margin: 0 0 4px;
}
.sgl-view .sgl-heading h2 { font-size: 16px; font-weight: 600; margin: 0; overflow-wrap: anywhere; }
.sgl-view .sgl-status { color: var(--soft); font-variant-numeric: tabular-nums; }
.sgl-view .sgl-status[data-status="running"] { color: var(--gen); font-weight: 600; }
.sgl-view .sgl-status[data-status="failed"] { color: var(--bad); font-weight: 600; }
.sgl-view .sgl-timings { margin: 6px 0; font-size: 12px; font-variant-numeric: tabular-nums; }
.sgl-view .sgl-timings > summary { color: var(--soft); }
.sgl-view .sgl-timings ul { list-style: none; margin: 4px 0; padding: 0; }
.sgl-view .sgl-timings li {
  display: grid; grid-template-columns: minmax(0, 12em) minmax(0, 1fr) 4.5em; gap: 10px; margin: 0;
  align-items: center;
}
.sgl-view .sgl-timed { overflow: hidden; text-overflow: ellipsis; white-space: nowrap; }
.sgl-view .sgl-timed small { color: var(--soft); font-size: 11px; }
.sgl-view .sgl-took { text-align: right; }
.sgl-view .sgl-track {
  position: relative; height: 10px; background: var(--page); border-radius: 3px;
}
.sgl-view .sgl-bar {
  position: absolute; top: 0; bottom: 0; min-width: 2px; border-radius: 2px; background: var(--hue);
}
"""


def duration(seconds: float) -> str:
    """A time span in words: 450 ms, 2.31 s, 75.2 s, 12.4 min."""
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 10:
        return f"{seconds:.2f} s"
    return f"{seconds:.1f} s" if seconds < 100 else f"{seconds / 60:.1f} min"


def heading_of(picture: Picture) -> str:
    """The program's name, and how far the run is and how long it has taken."""
    name = picture.program.rpartition(".")[2] or "A program's run"
    status = picture.status
    words: str = status
    if picture.elapsed_s is not None:
        preposition = {"running": "for", "done": "in"}.get(status, "after")
        words += f" {preposition} {duration(picture.elapsed_s)}"
    num_failed = sum(branch.status == "failed" for branch in picture.all_branches[1:])
    if num_failed and status != "failed":
        words += f", {num_failed} {'branch' if num_failed == 1 else 'branches'} failed"
    return (
        f'<div class="sgl-heading"><h2>{escaped(name)}</h2>'
        f'<span class="sgl-status" data-status="{status}">{words}</span></div>'
    )


def timings_of(picture: Picture) -> str:
    """A bar for each request and tool that the program waited for, in the order of their begin."""
    # A prompt that goes on as one of its branches has the branch's pieces: they are shown once.
    timed = {
        id(piece.timing): (branch, piece, piece.timing)
        for branch in picture.all_branches
        for piece in branch.pieces
        if piece.timing is not None
    }
    if not timed:
        return ""
    ends_s = (timing.end_s for _, _, timing in timed.values())
    end_s = max(picture.elapsed_s or 0, *ends_s) or 1
    longest = sorted(timed.values(), key=lambda one: one[2].took_s, reverse=True)[:MAX_BARS]
    bars = "".join(_bar(*one, end_s) for one in sorted(longest, key=lambda one: one[2].begin_s))
    if len(timed) > MAX_BARS:
        bars += f'<li class="sgl-note">and {len(timed) - MAX_BARS:,} shorter ones</li>'
    opened = " open" * (len(timed) <= MAX_OPEN_BARS)
    return (
        f'<details class="sgl-timings"{opened}><summary>when it waited for requests and tools'
        f'</summary><ul aria-label="timings">{bars}</ul></details>'
    )


def _bar(branch: Branch, piece: Piece, timing: Timing, end_s: float) -> str:
    left, width = 100 * timing.begin_s / end_s, 100 * timing.took_s / end_s
    return (
        f'<li title="from {duration(timing.begin_s)} to {duration(timing.end_s)}">'
        f'<span class="sgl-timed">{escaped(piece.name or piece.kind)} '
        f"<small>{escaped(branch.label)}</small></span>"
        f'<span class="sgl-track"><span class="sgl-bar sgl-{piece.kind}-kind" '
        f'style="left: {left:.2f}%; width: {width:.2f}%"></span></span>'
        f'<span class="sgl-took">{duration(timing.took_s)}</span></li>'
    )
