"""Which tools wait for what, so that none waits for something that waits for the tool.

Owns the running tools, what the code inside of them waits for, and how a cycle is found. What an
operation waits for is known to its stream's queue, which its future asks.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar  # Any: results of several types

T = TypeVar("T")
R = TypeVar("R")


@dataclass(eq=False)
class RunningTool:
    """A call of a tool. `outer` is the tool that runs the program which called it, `waits_for` what
    the code inside of it waits for."""

    outer: RunningTool | None
    waits_for: list[Blocker] = field(default_factory=list)
    has_ended: bool = False


Blocker: TypeAlias = "Future[Any] | RunningTool"
"""Something that has to end before something else can."""


class Awaited(Future[T]):
    """A future that tells what it waits for. The code waiting for it cannot cancel it."""

    def __init__(self, blockers_of: Callable[[Future[Any]], Iterable[Blocker]]) -> None:
        super().__init__()
        self._blockers_of = blockers_of
        self.set_running_or_notify_cancel()

    def blockers(self) -> Iterable[Blocker]:
        """What has to end before this can, as far as that is known now."""
        return self._blockers_of(self)


def derived(future: Future[T], value_of: Callable[[T], R]) -> Future[R]:
    """A future of what `value_of` makes of the result of another."""
    made: Awaited[R] = Awaited(lambda _: [future])

    def resolve(done: Future[T]) -> None:
        error = done.exception()
        if error is not None:
            made.set_exception(error)
        else:
            made.set_result(value_of(done.result()))

    future.add_done_callback(resolve)
    return made


current_tool: contextvars.ContextVar[RunningTool | None] = contextvars.ContextVar(
    "sgl_vllm_current_tool", default=None
)
"""The innermost tool that the code is inside of, programs that the tool runs included."""

_lock = threading.Lock()  # of two tools that begin to wait for each other, one has to see it


@contextmanager
def waiting(*blockers: Blocker) -> Iterator[None]:
    """In the ``with`` block, the code waits for `blockers`.

    RuntimeError if that would never end: inside of a tool that one of them waits for. Costs a walk
    over what they wait for, inside of a tool alone.
    """
    tools, tool = [], current_tool.get()
    while tool is not None and not tool.has_ended:  # those that cannot end before this code does
        tools.append(tool)
        tool = tool.outer
    if not tools:
        yield
        return
    with _lock:
        if _reaches(blockers, tools):
            raise RuntimeError(
                "a tool cannot read the prompt that called it, nor wait for anything else that "
                "waits for the tool: pass what it needs as arguments, such as sgl.var('x')"
            )
        for tool in tools:
            tool.waits_for += blockers
    try:
        yield
    finally:
        with _lock:
            for tool in tools:
                for blocker in blockers:
                    tool.waits_for.remove(blocker)


def _reaches(start: Iterable[Blocker], goals: Collection[RunningTool]) -> bool:
    """Whether one of `start` is one of `goals`, or waits for one of them."""
    seen: set[Blocker] = set()
    left = list(start)
    while left:
        blocker = left.pop()
        if blocker in goals:
            return True
        if blocker in seen:
            continue
        seen.add(blocker)
        match blocker:
            case RunningTool():
                left += blocker.waits_for
            case Awaited() if not blocker.done():
                left += blocker.blockers()
    return False
