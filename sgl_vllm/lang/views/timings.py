"""When a run waited for which request or tool, as bars, and durations in words."""

from __future__ import annotations

from dataclasses import dataclass

from sgl_vllm.lang.transcript import SpanKind
from sgl_vllm.lang.views.picture import Picture

MAX_BARS = 64
"""Of more requests and tools, those that took longest are shown."""
MAX_OPEN_BARS = 12
"""The bars are folded if there are more."""


def duration(seconds: float) -> str:
    """A time span in words: 450 ms, 2.31 s, 75.2 s, 12.4 min."""
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 10:
        return f"{seconds:.2f} s"
    return f"{seconds:.1f} s" if seconds < 100 else f"{seconds / 60:.1f} min"


@dataclass(frozen=True)
class Bar:
    """A request or tool. `left` and `width` are percentages of the whole run's time."""

    name: str
    kind: SpanKind
    branch: str
    begin: str
    end: str
    took: str
    left: float
    width: float


@dataclass(frozen=True)
class Timings:
    """A bar for each request and tool that the program waited for, in the order of their begin."""

    bars: list[Bar]
    num_left_out: int
    is_open: bool


def timings_of(picture: Picture) -> Timings:
    # A prompt that goes on as one of its branches has the branch's pieces: they are shown once.
    timed = {
        id(piece.timing): (branch, piece, piece.timing)
        for branch in picture.all_branches
        for piece in branch.pieces
        if piece.timing is not None
    }
    ends_s = (timing.end_s for _, _, timing in timed.values())
    percent = 100 / (max(picture.elapsed_s or 0, *ends_s, 0) or 1)
    longest = sorted(timed.values(), key=lambda one: one[2].took_s, reverse=True)[:MAX_BARS]
    bars = [
        Bar(
            name=piece.name or piece.kind,
            kind=piece.kind,
            branch=branch.label,
            begin=duration(timing.begin_s),
            end=duration(timing.end_s),
            took=duration(timing.took_s),
            left=percent * timing.begin_s,
            width=percent * timing.took_s,
        )
        for branch, piece, timing in sorted(longest, key=lambda one: one[2].begin_s)
    ]
    return Timings(bars, len(timed) - len(bars), len(timed) <= MAX_OPEN_BARS)
