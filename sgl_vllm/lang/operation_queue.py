"""The queue of a stream: operations from any thread, run one after the other.

Owns the futures of the operations, and how the error of one reaches those behind it. What waits for
what, so that no tool waits for itself, is asked of `Waits`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from itertools import islice
from typing import Any, NamedTuple  # Any: values of operations, of several types

from sgl_vllm.lang.errors import ProgramError
from sgl_vllm.lang.ir import RoleEnd, VarScopeEnd
from sgl_vllm.lang.operations import EarlyTool, Fork, Needed, Operation, Read, blockers_in
from sgl_vllm.lang.waiting import Blocker, RunningTool, tools_around


class Queued(NamedTuple):
    """An operation, its future, which gets the operation's variable or, for a Read, the transcript,
    and the variables that it reads."""

    operation: Operation
    future: Future[Any]
    needed: Needed

    def abandon(self, error: ProgramError) -> None:
        """Fail it, because it will not run, with the branches that it would have started, and the
        call of its tool."""
        if isinstance(self.operation, Fork):
            for child in self.operation.children:
                child.fail(error)
        elif isinstance(self.operation, EarlyTool):
            self.operation.result.cancel()
        self.future.set_exception(error)


class OperationQueue:
    """The operations of one prompt. The first is the one that is running.

    Invariant: every future is resolved by the time the queue is idle, so no reader waits forever.
    From the first failed operation on, futures get its `error`.

    `lock` is held to see the running operation together with what it has written.
    """

    def __init__(self, refusal: Callable[[Operation], ProgramError | None], *, busy: bool) -> None:
        """Args:
        refusal: gives the error of an operation that is added after the run was canceled.
        busy: whether the queue is started later, by a fork.
        """
        self.lock = threading.Lock()
        self.error: ProgramError | None = None
        self._refusal = refusal
        self._queued: deque[Queued] = deque()
        self._busy = busy

    def add(self, queued: Queued, added: Callable[[], object]) -> bool:
        """Queue an operation, and call `added` before it can run. Returns whether to start the
        queue."""
        with self.lock:
            self.error = self.error or self._refusal(queued.operation)
            if self.error is not None:
                if not isinstance(queued.operation, Read | RoleEnd | VarScopeEnd):
                    self.error.is_handled = False  # the program may not know that this is lost
                queued.abandon(self.error)
                return False
            added()
            self._queued.append(queued)
            was_idle, self._busy = not self._busy, True
        return was_idle

    def next(self) -> Queued | None:
        """The operation to run, which stays there; None if there is none, and the queue is idle."""
        with self.lock:
            self._busy = bool(self._queued)
            return self.running

    def finish(self) -> bool:
        """The running operation has run. False if the queue has ended meanwhile."""
        with self.lock:
            if self.error is None:
                self._queued.popleft()
            return self.error is None

    def end(self, error: ProgramError, stop: Callable[[], object]) -> None:
        """Fail everything queued or added later, and call `stop`. Only the first call counts."""
        with self.lock:
            if self.error is not None:
                return
            self.error = error
            stop()
            abandoned = list(self._queued)
            self._queued.clear()
        for queued in abandoned:
            queued.abandon(error)

    @property
    def running(self) -> Queued | None:
        """The operation that is running, or is about to."""
        return self._queued[0] if self._queued else None

    @property
    def is_busy(self) -> bool:
        """Whether something is running, or was when the queue ended."""
        return self._busy

    def all(self) -> list[Queued]:
        """The running operation and those behind it."""
        with self.lock:
            return list(self._queued)

    def upcoming(self) -> Iterator[Operation]:
        """Those behind the running one. To be read under `lock`."""
        return (queued.operation for queued in islice(self._queued, 1, None))

    def last(self) -> list[Future[Any]]:
        """The future of the last operation, if one is left."""
        with self.lock:
            return [self._queued[-1].future] if self._queued else []


class Waits:
    """What has to end before the operations of one stream can: how a circle of tools and prompts
    that wait for each other is found (`waiting.py`)."""

    def __init__(self, queue: OperationQueue, parent: Waits | None, outer: Waits | None) -> None:
        """Args:
        parent: of the prompt from which this branch is forked.
        outer: of the prompt that this one continues while it runs a block.
        """
        self._queue = queue
        self._parent = parent
        self._outer = outer
        self._fork: Future[Any] | None = None
        self.tools: list[RunningTool] = []  # that the running operation has called
        self.block: Waits | None = None  # of the stream that runs the block which runs now
        self.branches: list[Waits] = []

    def forked_by(self, fork: Future[Any]) -> None:
        """The branch starts when `fork` runs."""
        self._fork = fork

    def begun(self) -> None:
        """The branch has started."""
        self._parent = self._fork = None

    def blockers_of(self, future: Future[Any]) -> list[Blocker]:
        """What has to end before the operation of `future` can: what the running operation waits
        for, and what it and those before it will wait for. O(operations queued)."""
        queue = self._queue.all()
        blockers: list[Blocker] = list(self.tools)
        if self._fork is not None:
            blockers.append(self._fork)
        if self.block is not None:
            blockers += self.block.unfinished()
        for operation, queued, needed in queue:
            blockers += (*needed.values(), *blockers_in(operation))
            if queued is future:
                return blockers
        return []  # it has run

    def unfinished(self) -> list[Blocker]:
        """What has to end before the stream and its branches are idle."""
        blockers: list[Blocker] = []
        streams = [self]
        for stream in streams:
            blockers += (*stream._queue.last(), *stream.tools)
            streams += list(stream.branches)
        return blockers

    def refuse_to_wait_for_itself(self) -> None:
        """RuntimeError inside a tool of this stream, or of one that has yet to fork it: what is
        submitted here runs after the tool, so the tool would wait forever."""
        callers = []
        for tool in tools_around():
            caller = tool.caller
            while isinstance(caller, Waits):
                callers.append(caller)
                caller = caller._outer
        stream: Waits | None = self
        while callers and stream is not None:
            if stream in callers:
                raise RuntimeError(
                    "a tool cannot read the prompt that called it, because the prompt waits for "
                    "the tool: pass what it needs as arguments, such as sgl.var('x')"
                )
            stream = stream._parent
