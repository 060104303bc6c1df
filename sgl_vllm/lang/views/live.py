"""A picture that follows a run: in a terminal, or in a notebook's output.

Owns when to draw. A listener on every stream of the run wakes the drawing thread, which is the
caller's; while nothing changes, nothing runs.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sgl_vllm.lang.interpreter import Stream
from sgl_vllm.lang.views.html import fragment_of
from sgl_vllm.lang.views.picture import Picture, picture_of, streams_below
from sgl_vllm.lang.views.terminal import TerminalView

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

    from sgl_vllm.lang.state import State

MOST_PER_SECOND = 8

Draw = Callable[[Picture], None]


def follow(state: State, draw: Draw) -> None:
    """Call `draw` with every new picture, at most `MOST_PER_SECOND` times a second, until the run
    has ended; the last one is of its end. Blocks; RuntimeError on the language's own event loop.
    """
    stream = state._stream
    background = stream.run.background
    background.wait_for(background.start(_nothing()))  # which refuses that loop's thread
    with _Changes(stream) as changes:
        while True:
            changes.forget()
            is_end = _has_ended(stream)
            began_s = time.monotonic()
            changes.watch_new_streams()
            draw(picture_of(state))
            took_s = time.monotonic() - began_s
            if is_end:
                return
            changes.wait()
            # A picture that takes long leaves as much time to the run.
            time.sleep(max(0.0, began_s + max(1 / MOST_PER_SECOND, 2 * took_s) - time.monotonic()))


async def _nothing() -> None:
    """Runs where waiting for it is possible."""


def _has_ended(stream: Stream) -> bool:
    body = stream.run.body
    is_written = body is None or body.done() or stream.run.body_thread == threading.get_ident()
    return is_written and all(below.is_idle for below in streams_below(stream))


class _Changes:
    """Whether anything has changed on a stream or below it since `forget`."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._event = threading.Event()
        self._watched: set[Stream] = set()
        self._stack = ExitStack()

    def __enter__(self) -> _Changes:
        return self

    def __exit__(self, *reason: object) -> None:
        self._stack.close()

    def forget(self) -> None:
        self._event.clear()

    def wait(self) -> None:
        self._event.wait()

    def watch_new_streams(self) -> None:
        """Listen to the branches that have come since; a change of theirs before that is a change
        now."""
        for stream in streams_below(self._stream):
            if stream not in self._watched:
                self._watched.add(stream)
                self._stack.callback(stream.on_change(self._event.set))
                self._event.set()


# --- where to draw ---------------------------------------------------------------------------


def follow_in_terminal(state: State, console: Console | None) -> None:
    """In place: the last lines, as many as the terminal has, and all of it at the end. Where there
    is no terminal, the end alone."""
    from rich.console import Console
    from rich.live import Live

    console = console or Console(highlight=False)
    if not console.is_terminal:
        last: list[Picture] = []
        follow(state, lambda picture: last.__setitem__(slice(None), [picture]))
        console.print(TerminalView(last[0]))
        return
    drawn = TerminalView(picture_of(state))
    try:
        with Live(
            console=console, auto_refresh=False, transient=True, vertical_overflow="visible"
        ) as live:

            def draw(picture: Picture) -> None:
                nonlocal drawn
                drawn = TerminalView(picture)
                live.update(_LastLines(drawn), refresh=True)

            follow(state, draw)
    finally:
        console.print(drawn)


@dataclass(frozen=True)
class _LastLines:
    """As much of the end of a view as fits into the terminal: that is where text comes."""

    view: TerminalView

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.segment import Segment

        lines = console.render_lines(self.view, options, pad=False)
        for line in lines[-max(1, console.height - 1) :]:
            yield from line
            yield Segment.line()


def follow_in_notebook(state: State) -> None:
    """In one output, drawn over again."""
    from IPython.display import HTML, display  # type: ignore[import-not-found, unused-ignore]

    handles: list[Any] = []

    def draw(picture: Picture) -> None:
        drawn = HTML(fragment_of(picture))
        if handles:
            handles[0].update(drawn)
        else:
            handles.append(display(drawn, display_id=True))

    follow(state, draw)


def runs_in_notebook() -> bool:
    """Whether a Jupyter kernel runs this; imports nothing."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and hasattr(shell, "kernel")
