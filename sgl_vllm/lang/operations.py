"""What a stream can run beside expressions: reading its transcript, forking and joining, and
waiting for a tool that was called early.

Owns these operations as values, and what an operation waits for. `stream.py` and `execution.py`
carry them out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias  # Any: what a future has is not used

from sgl_vllm.lang.errors import ProgramError
from sgl_vllm.lang.ir import Block, Computed, Expr, Tool, names_read
from sgl_vllm.lang.transcript import Transcript, Variable
from sgl_vllm.lang.waiting import Blocker, RunningTool

Needed: TypeAlias = Mapping[str, "Future[Variable]"]
"""The variables that an operation reads when it runs."""


class Branch(Protocol):
    """A stream, as the operations and the run know it: a stream imports both."""

    where: str
    forked_at: int
    is_of_block: bool

    @property
    def is_idle(self) -> bool: ...
    @property
    def error(self) -> ProgramError | None: ...
    @property
    def variables(self) -> Needed: ...
    def begin(self, parent_execution: Any) -> None: ...  # Any: an `Execution`
    def read(self) -> Future[Transcript]: ...
    def fail(self, error: ProgramError) -> None: ...
    def cancel(self) -> None: ...
    def all_changed(self) -> None: ...


def needed_by(expr: Expr, variables: Needed) -> Needed:
    """Those of `variables` that an expression reads when it runs. KeyError for a missing one."""
    if isinstance(expr, Block | Computed):
        return dict(variables)
    return {name: variable_named(name, variables) for name in names_read(expr)}


def variable_named(name: str, variables: Needed) -> Future[Variable]:
    """The future of variable `name`. KeyError if it is not one of `variables`."""
    future = variables.get(name)
    if future is None:
        known = ", ".join(map(repr, variables)) or "none"
        raise KeyError(f"the program has no variable {name!r} (it has: {known})")
    return future


def has_effect(expr: Expr) -> bool:
    """Whether it may change what a tool reads, because it calls functions of the user's."""
    return isinstance(expr, Block) or (isinstance(expr, Tool) and not expr.is_read_only)


@dataclass(frozen=True, eq=False)
class Await(Expr):
    """Go on once `future` is done. Fails as it does. Only `graph_run.py` makes it."""

    future: Future[Any]

    def __str__(self) -> str:
        return "the program's function"


@dataclass(frozen=True)
class Read:
    """Return the transcript once everything before it has run."""

    def __str__(self) -> str:
        return "read"


@dataclass(frozen=True)
class Fork:
    """Start the branches `children`."""

    children: tuple[Branch, ...]

    def __str__(self) -> str:
        return f"fork({len(self.children)})"


@dataclass(frozen=True)
class Gather:
    """Wait for one variable of several branches and make a list of its values."""

    name: str
    futures: tuple[Future[Variable], ...]
    branches: tuple[Branch, ...] = ()

    def __str__(self) -> str:
        return f"join of {self.name!r}"


@dataclass(frozen=True)
class AppendTexts:
    """Wait for branches and append what each wrote after the fork."""

    branches: tuple[tuple[Branch, Future[Transcript]], ...]

    def __str__(self) -> str:
        return "join"


@dataclass(frozen=True)
class Continue:
    """Wait for a branch, and go on with the prompt as it has written it."""

    branch: Branch
    read: Future[Transcript]

    def __str__(self) -> str:
        return f"continuation of {self.branch.where}"


@dataclass(frozen=True, eq=False)
class EarlyTool:
    """Append the result of a read-only tool, which has been called already."""

    tool: Tool
    result: Future[object]
    running: RunningTool

    @property
    def name(self) -> str | None:
        return self.tool.name

    def __str__(self) -> str:
        return str(self.tool)


Operation: TypeAlias = Expr | Read | Fork | Gather | AppendTexts | Continue | EarlyTool


def blockers_in(operation: Operation) -> Sequence[Blocker]:
    """What an operation waits for in other prompts and in tools that were called early."""
    match operation:
        case Gather(_, futures):
            return futures
        case AppendTexts(branches):
            return [read for _, read in branches]
        case Continue(_, read):
            return [read]
        case EarlyTool():
            return [operation.running]
        case Await(future):
            return [future]
    return []


@dataclass(frozen=True)
class JoinRecord:
    """Where a join took place, for views: after the first `num_spans` spans, `branches` were
    joined by the variable `name` or, if that is None, by their texts."""

    num_spans: int
    branches: tuple[Branch, ...]
    name: str | None
