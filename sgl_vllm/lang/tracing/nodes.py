"""The operations of a graph, as frozen values.

Owns what one operation is, what it reads and writes, and how it reads in words.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from sgl_vllm.lang.ir import (
    Block,
    Expr,
    RoleBegin,
    RoleEnd,
    Show,
    Tool,
    Value,
    VarScopeBegin,
    VarScopeEnd,
)
from sgl_vllm.lang.primitives import PRIMITIVES
from sgl_vllm.lang.tracing.standin import Definition, StandIn, source_of

PREFIX_EXPRESSIONS = (RoleBegin, RoleEnd, Show)
"""Expressions that belong to a prompt's known beginning."""


@dataclass(frozen=True)
class Write:
    """Append text that consists of known pieces and stand-ins, in order."""

    pieces: tuple[str | StandIn, ...]

    @property
    def is_constant(self) -> bool:
        """Whether all of the text is known."""
        return all(isinstance(piece, str) for piece in self.pieces)

    @property
    def text(self) -> str:
        """The text, with what only a run knows in braces."""
        return "".join(p if isinstance(p, str) else f"{{{source_of(p)}}}" for p in self.pieces)


@dataclass(frozen=True)
class Evaluate:
    """Run an expression: a gen, a select, a role change. It is a stand-in if it has options that
    only a run knows."""

    expr: Expr


@dataclass(frozen=True)
class SetVariable:
    """Give the variable `name` a value, which may be a stand-in."""

    name: str
    value: Value


@dataclass(frozen=True)
class ReadPrompt:
    """Read the prompt as it is at this point."""


@dataclass(frozen=True)
class TracedFork:
    """Start the streams `children` as copies of this one."""

    children: tuple[int, ...]


@dataclass(frozen=True)
class TracedJoin:
    """Bring back what the streams `branches` wrote since the fork: the variable `name` as a list,
    or if that is None, their texts."""

    branches: tuple[int, ...]
    name: str | None


TracedOperation: TypeAlias = Write | Evaluate | SetVariable | ReadPrompt | TracedFork | TracedJoin


@dataclass(frozen=True, eq=False)
class Node:
    """One operation of a graph.

    `index` counts in the program's order, over all streams; `line` is its line in the source. The
    function has done the first `num_actions` actions of its own before it (see `Graph`).
    """

    index: int
    stream: int
    operation: TracedOperation
    reads: tuple[Definition, ...]
    writes: tuple[Definition, ...]
    line: int
    num_actions: int

    @property
    def calls(self) -> Literal["nothing", "readers", "anything"]:
        """Which functions of the user's it may call, as far as is known before a run: none, those
        that only read, or those that may change something."""
        match self.operation:
            case Write(pieces):  # an argument or a variable may be an expression
                is_text = all(isinstance(piece, str) or piece._is_text for piece in pieces)
                return "nothing" if is_text else "anything"
            case Evaluate(StandIn() as expr) if expr._operation in ("tool", *PRIMITIVES):
                return "anything"
            case Evaluate(StandIn() as expr) if expr._operation == "read_only_tool":
                return "readers"
            case Evaluate(Tool() as tool):
                return "readers" if tool.is_read_only else "anything"
            case Evaluate(Block()):
                return "anything"
        return "nothing"

    def __str__(self) -> str:
        """The operation in a few words."""
        match self.operation:
            case Write() as write:
                return f"text {write.text!r}"
            case Evaluate(StandIn() as expr):
                name = f" {expr._name!r}" if expr._name is not None else ""
                return f"{expr._operation}{name} {source_of(expr)}"
            case Evaluate(expr):
                return str(expr)
            case SetVariable(name, value):
                return f"set {name!r} = {source_of(value)}"
            case ReadPrompt():
                return "read the prompt"
            case TracedFork(children):
                return f"fork({len(children)})"
            case TracedJoin(_, name):
                return "join of texts" if name is None else f"join {name!r}"


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


def ends_prefix(operation: TracedOperation) -> bool:
    """Whether the known beginning of a prompt ends at, or within, this operation."""
    match operation:
        case Write():
            return not operation.is_constant
        case Evaluate(expr):
            return not isinstance(expr, (*PREFIX_EXPRESSIONS, VarScopeBegin, VarScopeEnd))
    return isinstance(operation, TracedFork | TracedJoin)
