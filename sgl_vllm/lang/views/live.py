"""A picture that follows a run: in a terminal, or in a notebook's output.

Owns when to draw. Listeners on the run's streams wake the drawing thread, which is the caller's.
While nothing changes, nothing runs.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from sgl_vllm.lang.stream import Stream
from sgl_vllm.lang.views.capture import picture_of, streams_below
from sgl_vllm.lang.views.html import fragment_of
from sgl_vllm.lang.views.picture import Picture
from sgl_vllm.lang.views.terminal import TerminalView
from sgl_vllm.lang.waiting import waiting

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

MAX_PER_SECOND = 8

Draw = Callable[[Picture], None]


class Clock(Protocol):
    """The time, as `time` has it."""

    def monotonic(self) -> float: ...

    def sleep(self, seconds: float, /) -> None: ...


def follow(stream: Stream, draw: Draw, clock: Clock = time) -> None:
    """Call `draw` with every new picture of a run, at most `MAX_PER_SECOND` times per second.

    Blocks until the run has ended; the last picture shows its end. RuntimeError on the language's
    own event loop.
    """
    background = stream.run.background
    background.refuse_to_wait()
    with _Changes(stream) as changes:
        while True:
            changes.clear()
            is_end = _has_ended(stream)
            began_s = clock.monotonic()
            changes.watch_new_streams()
            draw(picture_of(stream))
            took_s = clock.monotonic() - began_s
            if is_end:
                return
            with waiting(*stream.queue.unfinished()):
                changes.wait()
            # A picture that takes long to draw leaves at least as much time to the run.
            pause_s = max(1 / MAX_PER_SECOND, 2 * took_s) - (clock.monotonic() - began_s)
            clock.sleep(max(0.0, pause_s))


def _has_ended(stream: Stream) -> bool:
    run = stream.run
    has_returned = run.body is None or run.body.done() or run.is_inside
    return has_returned and all(below.is_idle for below in streams_below(stream))


class _Changes:
    """Whether anything has changed on a stream or below it since `clear`."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._event = threading.Event()
        self._watched: set[Stream] = set()
        self._stack = ExitStack()

    def __enter__(self) -> _Changes:
        return self

    def __exit__(self, *reason: object) -> None:
        self._stack.close()

    def clear(self) -> None:
        self._event.clear()

    def wait(self) -> None:
        self._event.wait()

    def watch_new_streams(self) -> None:
        """Listen to new branches. A new branch counts as a change, because it may have changed
        before this."""
        for stream in streams_below(self._stream):
            if stream not in self._watched:
                self._watched.add(stream)
                self._stack.callback(stream.listeners.add(self._event.set))
                self._event.set()


# --- where to draw ---------------------------------------------------------------------------


def follow_in_terminal(stream: Stream, console: Console | None) -> None:
    """Redraw in place, as many of the last lines as fit, and print everything at the end. If the
    output is not a terminal, print only the end."""
    from rich.console import Console
    from rich.live import Live

    console = console or Console(highlight=False)
    drawn = TerminalView(picture_of(stream))

    def keep(picture: Picture) -> None:
        nonlocal drawn
        drawn = TerminalView(picture)

    if not console.is_terminal:
        follow(stream, keep)
        console.print(drawn)
        return
    try:
        with Live(
            console=console, auto_refresh=False, transient=True, vertical_overflow="visible"
        ) as live:

            def draw(picture: Picture) -> None:
                keep(picture)
                live.update(_LastLines(drawn), refresh=True)

            follow(stream, draw)
    finally:
        console.print(drawn)


@dataclass(frozen=True)
class _LastLines:
    """The end of a view, as much as fits into the terminal: new text appears there."""

    view: TerminalView

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.segment import Segment

        lines = console.render_lines(self.view, options, pad=False)
        for line in lines[-max(1, console.height - 1) :]:
            yield from line
            yield Segment.line()


def follow_in_notebook(stream: Stream) -> None:
    """Redraw one output of a notebook."""
    from IPython.display import HTML, display  # type: ignore[import-not-found, unused-ignore]

    handle: _DisplayHandle | None = None

    def draw(picture: Picture) -> None:
        nonlocal handle
        drawn = HTML(fragment_of(picture))
        if handle is None:
            handle = display(drawn, display_id=True)
        else:
            handle.update(drawn)

    follow(stream, draw)


class _DisplayHandle(Protocol):
    """IPython's handle of an output."""

    def update(self, shown: object, /) -> None: ...


def runs_in_notebook() -> bool:
    """Whether this is a Jupyter kernel. Imports nothing."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and hasattr(shell, "kernel")
