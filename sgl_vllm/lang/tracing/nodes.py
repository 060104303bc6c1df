"""The operations of a graph, as frozen values.

Owns what one operation is, what it reads and writes, and how it reads in words.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

from sgl_vllm.lang.ir import Block, Expr, Tool, Value
from sgl_vllm.lang.primitives import PRIMITIVES
from sgl_vllm.lang.tracing.deferred import Deferred, Definition, source_of

WITH_EFFECTS = frozenset(("sgl.tool", *PRIMITIVES))
"""Expressions that call functions of the user's, which may change something."""

_CALLING = WITH_EFFECTS | {"sgl.read_only_tool"}


@dataclass(frozen=True)
class Write:
    """Append text that consists of known and deferred pieces, in order."""

    pieces: tuple[str | Deferred, ...]

    @property
    def is_constant(self) -> bool:
        """Whether all of the text is known."""
        return all(isinstance(piece, str) for piece in self.pieces)


@dataclass(frozen=True)
class Evaluate:
    """Run an expression: a gen, a select, a role change. It is deferred if it has options that
    only a run knows."""

    expr: Expr | Deferred


@dataclass(frozen=True)
class SetVariable:
    """Give the variable `name` a value, which may be deferred."""

    name: str
    value: Value


@dataclass(frozen=True)
class ReadPrompt:
    """Read the prompt as it is at this point."""


@dataclass(frozen=True)
class Fork:
    """Start the streams `children` as copies of this one."""

    children: tuple[int, ...]


@dataclass(frozen=True)
class Join:
    """Bring back what the streams `branches` wrote since the fork."""

    branches: tuple[int, ...]
    mode: str


Operation: TypeAlias = Write | Evaluate | SetVariable | ReadPrompt | Fork | Join


@dataclass(frozen=True, eq=False)
class Node:
    """One operation of a graph.

    `index` counts in the program's order, over all streams; `line` is its line in the source. The
    function has done the first `num_steps` steps of its own before it (see `Graph`).
    """

    index: int
    stream: int
    operation: Operation
    reads: tuple[Definition, ...]
    writes: tuple[Definition, ...]
    line: int
    num_steps: int

    @cached_property
    def may_call(self) -> bool:
        """Whether it may call functions of the user's, as far as is known before a run."""
        match self.operation:
            case Write(pieces):
                return any(isinstance(piece, Deferred) and not piece.is_text for piece in pieces)
            case Evaluate(Deferred() as value):
                return value.operation in _CALLING
            case Evaluate(Tool() | Block()):
                return True
        return False

    def __str__(self) -> str:
        """The operation in a few words."""
        match self.operation:
            case Write(pieces):
                return f"text {text_of(pieces)!r}"
            case Evaluate(Deferred() as value):
                name = f" {value.name!r}" if value.name is not None else ""
                return f"{value.operation.removeprefix('sgl.')}{name} {value.source}"
            case Evaluate(expr):
                return str(expr)
            case SetVariable(name, value):
                return f"set {name!r} = {source_of(value)}"
            case ReadPrompt():
                return "read the prompt"
            case Fork(children):
                return f"fork({len(children)})"
            case Join(_, mode):
                return "join" if mode == "gather_variable" else "join of texts"


def text_of(pieces: Sequence[str | Deferred]) -> str:
    """Text with its deferred pieces in braces."""
    return "".join(
        piece if isinstance(piece, str) else "{" + piece.source + "}" for piece in pieces
    )


@dataclass(frozen=True)
class StreamTrace:
    """One prompt: the root (index 0, no parent), or branch `branch` of a fork of `parent`."""

    index: int
    parent: int | None
    branch: int

    def __str__(self) -> str:
        if self.parent is None:
            return "stream 0 (s)"
        return f"stream {self.index} (fork[{self.branch}] of stream {self.parent})"
