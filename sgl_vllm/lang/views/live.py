"""A picture that follows a run: in a terminal, or in a notebook's output.

Owns when to draw. The drawing thread is the caller's.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any  # Any: IPython has no types

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.segment import Segment

from sgl_vllm.lang.stream import Stream
from sgl_vllm.lang.views.capture import picture_of, streams_below
from sgl_vllm.lang.views.html import fragment_of
from sgl_vllm.lang.views.picture import Picture
from sgl_vllm.lang.views.terminal import TerminalView
from sgl_vllm.lang.waiting import waiting

MAX_PER_SECOND = 8


def follow(stream: Stream, draw: Callable[[Picture], None]) -> None:
    """Call `draw` with every new picture of a run, at most `MAX_PER_SECOND` times per second.

    Blocks until the run has ended; the last picture shows its end. While nothing changes, nothing
    runs. RuntimeError on the language's own event loop.
    """
    stream.run.background.refuse_to_wait()
    changed, watched = threading.Event(), set[Stream]()
    with ExitStack() as listening:
        while True:
            changed.clear()
            is_end = _has_ended(stream)
            began_s = time.monotonic()
            for new in set(streams_below(stream)) - watched:
                watched.add(new)
                listening.callback(new.listeners.add(changed.set))
                changed.set()  # it may have changed before
            draw(picture_of(stream))
            if is_end:
                return
            # A picture that takes long to draw leaves at least as much time to the run.
            took_s = time.monotonic() - began_s
            time.sleep(max(1 / MAX_PER_SECOND - took_s, took_s))
            with waiting(*stream.queue.unfinished()):
                changed.wait()


def _has_ended(stream: Stream) -> bool:
    run = stream.run
    has_returned = run.has_returned or run.is_called_from_inside
    return has_returned and all(below.is_idle for below in streams_below(stream))


# --- where to draw ---------------------------------------------------------------------------


def follow_in_terminal(stream: Stream, console: Console | None) -> None:
    """Redraw in place, as many of the last lines as fit, and print everything at the end. If the
    output is not a terminal, print only the end."""

    console = console or Console(highlight=False)
    drawn = TerminalView(picture_of(stream))
    live = Live(console=console, auto_refresh=False, transient=True, vertical_overflow="visible")

    def draw(picture: Picture) -> None:
        nonlocal drawn
        drawn = TerminalView(picture)
        if console.is_terminal:
            live.update(_LastLines(drawn), refresh=True)

    try:
        with live if console.is_terminal else nullcontext():
            follow(stream, draw)
    finally:
        console.print(drawn)


@dataclass(frozen=True)
class _LastLines:
    """The end of a view, as much as fits into the terminal: new text appears there."""

    view: TerminalView

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:

        lines = console.render_lines(self.view, options, pad=False)
        for line in lines[-max(1, console.height - 1) :]:
            yield from line
            yield Segment.line()


def follow_in_notebook(stream: Stream) -> None:
    """Redraw one output of a notebook."""
    from IPython.display import HTML, display  # type: ignore[import-not-found, unused-ignore]

    handle: Any = None

    def draw(picture: Picture) -> None:
        nonlocal handle
        drawn = HTML(fragment_of(picture))
        if handle is None:
            handle = display(drawn, display_id=True)
        else:
            handle.update(drawn)

    follow(stream, draw)


def runs_in_notebook() -> bool:
    """Whether this is a Jupyter kernel. Imports nothing."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and hasattr(shell, "kernel")
