"""A program's state at one moment, as immutable values for drawing.

Owns what a picture consists of. `capture.py` takes pictures; `html.py`, `terminal.py` and `svg.py`
draw them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from sgl_vllm.lang.ir import Role
from sgl_vllm.lang.media import Media
from sgl_vllm.lang.transcript import SpanKind
from sgl_vllm.lang.usage import Usage

MAX_DEPTH = 40
"""How many levels of nested forks are drawn. Branches below that are counted."""

Status: TypeAlias = Literal["waiting", "running", "done", "failed", "discarded"]


@dataclass(frozen=True)
class Slice:
    """Part of a piece's text, all of it forced by a constraint or not, and cached or not.

    `cached` is an estimate: the server reports the cached part of a prompt in tokens, and the same
    share of the prompt's characters is marked.
    """

    text: str
    forced: bool = False
    cached: bool = False


@dataclass(frozen=True)
class Piece:
    """What one operation appended. `facts` describe it, one line each. More text of an
    `unfinished` piece is still to come."""

    kind: SpanKind
    slices: tuple[Slice, ...]
    name: str | None = None
    facts: tuple[str, ...] = ()
    media: Media | None = None
    unfinished: bool = False

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.slices)


@dataclass(frozen=True)
class DrawnTurn:
    """Pieces of one turn; `role` is None for plain text. If `is_continued`, the turn began before
    the block above it."""

    role: Role | None
    pieces: tuple[Piece, ...]
    is_continued: bool = False


@dataclass(frozen=True)
class DrawnFork:
    """The branches that were forked here."""

    branches: tuple[DrawnBranch, ...]


@dataclass(frozen=True)
class DrawnJoin:
    """The branches `labels` were joined here: into lists, the variables `names`, or, if `as_text`,
    by appending their texts."""

    labels: tuple[str, ...]
    names: tuple[str, ...]
    as_text: bool


DrawnBlock: TypeAlias = DrawnTurn | DrawnFork | DrawnJoin


@dataclass(frozen=True)
class DrawnBranch:
    """A branch's own part of a prompt: all of it for the root, else what it wrote since the fork.

    `busy` names the running operation and `error` says what ended the branch. `num_deeper`
    branches below it are counted but not drawn.
    """

    label: str
    status: Status
    blocks: tuple[DrawnBlock, ...]
    num_chars: int
    busy: str | None = None
    error: str | None = None
    num_deeper: int = 0

    @property
    def pieces(self) -> Iterable[Piece]:
        """The pieces of the branch itself."""
        for block in self.blocks:
            if isinstance(block, DrawnTurn):
                yield from block.pieces

    @property
    def forks(self) -> list[DrawnFork]:
        return [block for block in self.blocks if isinstance(block, DrawnFork)]


@dataclass(frozen=True)
class Picture:
    """Everything there is to draw.

    `usage` is that of the whole run, and `failure` describes an exception of the program's function
    itself. `program` is the function's name.
    """

    root: DrawnBranch
    usage: Usage
    failure: str | None = None
    program: str = ""

    @property
    def status(self) -> Status:
        """Of the whole run: branches may still be running when the root is done."""
        if self.failure is not None or self.root.status == "failed":
            return "failed"
        is_running = any(branch.status == "running" for branch in self.all_branches)
        return "running" if is_running else self.root.status

    @property
    def all_branches(self) -> list[DrawnBranch]:
        """The root first, and every branch before its own branches."""
        found, waiting = [], [self.root]
        while waiting:
            branch = waiting.pop(0)
            found.append(branch)
            waiting = [b for fork in branch.forks for b in fork.branches] + waiting
        return found


# --- what every drawing shows --------------------------------------------------------------------


def join_line(join: DrawnJoin) -> str:
    """A join in words."""
    branches = f"{len(join.labels)} branches" if len(join.labels) != 1 else "one branch"
    what = "their texts" if join.as_text else ", ".join(join.names)
    return f"⤶ join of {branches}: {what}"
