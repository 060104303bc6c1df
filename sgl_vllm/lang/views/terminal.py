"""Draws a program's state in a terminal, with rich.

Owns the drawing as lines. Brackets around a text say how it was made, so that a log without color
shows it, too::

    [gen story]a hare [forced]that[/forced] ran[/gen]

With color, the brackets are dim, and forced and cached text are colored instead of bracketed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.text import Text
from rich.tree import Tree

from sgl_vllm.lang.views.html import ELIDE_FROM_CHARS, KEPT_CHARS
from sgl_vllm.lang.views.picture import (
    DrawnBranch,
    DrawnFork,
    DrawnJoin,
    DrawnTurn,
    Picture,
    Piece,
    join_line,
)
from sgl_vllm.lang.views.svg import MAX_LANES
from sgl_vllm.pages import visible

STYLES = {
    "text": "",
    "gen": "green",
    "select": "magenta",
    "tool": "yellow",
    "variable": "blue",
    "media": "cyan",
}
_STATUS_STYLES = {"failed": "red", "running": "green", "discarded": "dim", "waiting": "dim"}


@dataclass(frozen=True)
class TerminalView:
    """A picture that rich can print."""

    picture: Picture

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        drawing = _Drawing(has_color=console.color_system is not None and not console.no_color)
        yield from drawing.content_of(self.picture.root)
        if self.picture.failure is not None:
            yield drawing.error(self.picture.failure)
        yield drawing.usage_line(self.picture)
        if drawing.shows_cached:
            yield drawing.legend()


class _Drawing:
    def __init__(self, *, has_color: bool) -> None:
        self._has_color = has_color
        self.shows_cached = False

    def content_of(self, branch: DrawnBranch) -> Iterable[RenderableType]:
        """A branch's blocks and status, one below the other."""
        for block in branch.blocks:
            match block:
                case DrawnTurn(role, pieces, is_continued):
                    if role is None:
                        yield self._text(pieces)
                        continue
                    yield Text(f"{role}{' (continued)' * is_continued}:", "bold")
                    yield Padding(self._text(pieces), (0, 0, 0, 2), expand=False)
                case DrawnFork():
                    yield self._fork(block)
                case DrawnJoin():
                    yield Text(visible(join_line(block)), "dim")
        if branch.num_deeper:
            yield Text(f"{branch.num_deeper:,} branches below", "dim")
        if branch.busy is not None:
            yield Text(f"running: {visible(branch.busy)} …", "dim")
        if branch.error is not None and branch.status != "discarded":
            yield self.error(branch.error)

    def error(self, message: str) -> Text:
        return Text(f"✗ {visible(message)}", "bold red")

    def _fork(self, fork: DrawnFork) -> Tree:
        tree = Tree(Text(f"fork of {len(fork.branches)}", "dim"), guide_style="dim")
        for branch in fork.branches[:MAX_LANES]:
            status = f"{branch.status}, {branch.num_chars:,} characters"
            if branch.status == "discarded" and branch.error:
                status = f"discarded: {visible(branch.error)}"
            head = Text.assemble(
                (visible(branch.label), "bold"),
                (f"  {status}", _STATUS_STYLES.get(branch.status, "dim")),
            )
            tree.add(Group(head, *self.content_of(branch)))
        rest = len(fork.branches) - MAX_LANES
        if rest > 0:
            tree.add(Text(f"and {rest:,} more branches", "dim"))
        return tree

    def _text(self, pieces: Iterable[Piece]) -> Text:
        line = Text()
        for piece in pieces:
            if piece.media is not None:
                name = f"{piece.name}: " if piece.name else ""
                line.append(visible(f"[{name}{piece.media!r}]{piece.text}"), STYLES["media"])
            elif piece.kind == "text" and len(piece.text) > ELIDE_FROM_CHARS:
                middle = len(piece.text) - 2 * KEPT_CHARS
                line.append(visible(piece.text[:KEPT_CHARS]))
                line.append(f" … {middle:,} characters … ", "dim")
                line.append(visible(piece.text[-KEPT_CHARS:]))
            else:
                self._append(line, piece)
        line.rstrip()
        return line

    def _append(self, line: Text, piece: Piece) -> None:
        is_named = piece.kind != "text"
        if is_named:
            name = f" {visible(piece.name)}" if piece.name else ""
            line.append(f"[{piece.kind}{name}{' …' * piece.unfinished}]", "dim")
        for part in piece.slices:
            style, marks = STYLES[piece.kind], []
            if part.forced:
                marks.append("forced")
                style += " italic underline"
            if part.cached:
                marks.append("cached")
                style += " on grey23" if self._has_color else ""
                self.shows_cached = True
            if self._has_color:
                marks = []
            line.append("".join(f"[{mark}]" for mark in marks), "dim")
            line.append(visible(part.text), style.strip())
            line.append("".join(f"[/{mark}]" for mark in reversed(marks)), "dim")
        if is_named:
            line.append(f"[/{piece.kind}]", "dim")

    def usage_line(self, picture: Picture) -> Text:
        running = "running · " if picture.root.status == "running" else ""
        return Text(f"{running}{picture.usage}", "dim")

    def legend(self) -> Text:
        mark = ("grey", "on grey23") if self._has_color else "[cached]"
        meaning = ": in the server's cache when first sent (estimated from tokens)"
        return Text.assemble(mark, meaning, style="dim")
