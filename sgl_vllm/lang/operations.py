"""What a stream can run beside expressions: reading its transcript, forking and joining, and
waiting for a tool that was called early.

Owns these operations as values. `execution.py` carries them out.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from sgl_vllm.lang.ir import Expr, Tool
from sgl_vllm.lang.transcript import Transcript, Variable

if TYPE_CHECKING:
    from sgl_vllm.lang.stream import Stream

Needed: TypeAlias = Mapping[str, "Future[Variable]"]
"""The variables that an operation reads when it runs."""


@dataclass(frozen=True)
class Read:
    """Return the transcript once everything before it has run."""

    def __str__(self) -> str:
        return "read"


@dataclass(frozen=True)
class Fork:
    """Start the branches `children`."""

    children: tuple[Stream, ...]

    def __str__(self) -> str:
        return f"fork({len(self.children)})"


@dataclass(frozen=True)
class Gather:
    """Wait for one variable of several branches and make a list of its values."""

    name: str
    futures: tuple[Future[Variable], ...]
    branches: tuple[Stream, ...] = ()

    def __str__(self) -> str:
        return f"join of {self.name!r}"


@dataclass(frozen=True)
class AppendTexts:
    """Wait for branches and append what each wrote after the fork."""

    branches: tuple[tuple[Stream, Future[Transcript]], ...]

    def __str__(self) -> str:
        return "join"


@dataclass(frozen=True)
class Continue:
    """Wait for a branch, and go on with the prompt as it has written it."""

    branch: Stream
    read: Future[Transcript]

    def __str__(self) -> str:
        return f"continuation of {self.branch.where}"


@dataclass(frozen=True, eq=False)
class EarlyTool:
    """Append the result of a read-only tool, which has been called already."""

    tool: Tool
    result: Future[object]

    @property
    def name(self) -> str | None:
        return self.tool.name

    def __str__(self) -> str:
        return str(self.tool)


Operation: TypeAlias = Expr | Read | Fork | Gather | AppendTexts | Continue | EarlyTool


@dataclass(frozen=True)
class JoinRecord:
    """Where a join took place, for views: after the first `num_spans` spans, `branches` were
    joined by the variable `name` or, if that is None, by their texts."""

    num_spans: int
    branches: tuple[Stream, ...]
    name: str | None
