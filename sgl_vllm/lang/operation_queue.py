"""The queue of a stream: operations from any thread, run one after the other.

Owns the futures of the operations, how the error of one reaches those behind it, and what each of
them waits for, so that no tool waits for itself (`waiting.py`).
"""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import Future
from itertools import islice
from typing import Any, NamedTuple  # Any: values of operations, of several types

from sgl_vllm.lang.errors import ProgramError
from sgl_vllm.lang.ir import RoleEnd, VarScopeEnd
from sgl_vllm.lang.operations import EarlyTool, Fork, Needed, Operation, Read, blockers_in
from sgl_vllm.lang.waiting import Blocker, RunningTool


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

    `lock` is held to see the running operation together with what it has written. `is_busy` says
    whether something is running, or was when the queue ended. A branch is busy from the beginning,
    with nothing running until its fork starts it.
    """

    def __init__(self, *, is_branch: bool) -> None:
        self.lock = threading.Lock()
        self.error: ProgramError | None = None
        self.is_busy = is_branch
        self._queued: deque[Queued] = deque()
        self.started_by: Future[Any] | None = None  # the fork that starts the branch
        self.branches: list[OperationQueue] = []
        self.tools: list[RunningTool] = []  # that the running operation has called
        self.block: OperationQueue | None = None  # of the stream of the block that is running

    def add(self, queued: Queued) -> bool:
        """Queue an operation. Returns whether to start the queue."""
        with self.lock:
            if self.error is not None:
                if not isinstance(queued.operation, Read | RoleEnd | VarScopeEnd):
                    self.error.is_handled = False  # the program may not know that this is lost
                queued.abandon(self.error)
                return False
            self._queued.append(queued)
            was_idle, self.is_busy = not self.is_busy, True
        return was_idle

    def next(self) -> Queued | None:
        """The operation to run, which stays there; None if there is none, and the queue is idle."""
        with self.lock:
            self.is_busy = bool(self._queued)
            return self.running

    def finish(self) -> bool:
        """The running operation has run. False if the queue has ended meanwhile."""
        with self.lock:
            if self.error is None:
                self._queued.popleft()
            return self.error is None

    def end(self, error: ProgramError) -> None:
        """Fail everything queued or added later. Only the first call counts."""
        with self.lock:
            if self.error is not None:
                return
            self.error = error
            abandoned = list(self._queued)
            self._queued.clear()
        for queued in abandoned:
            queued.abandon(error)

    @property
    def running(self) -> Queued | None:
        """The operation that is running, or is about to."""
        return self._queued[0] if self._queued else None

    def upcoming(self) -> list[Operation]:
        """Those behind the running one."""
        with self.lock:
            return [queued.operation for queued in islice(self._queued, 1, None)]

    # --- what waits for what -------------------------------------------------------------------

    def last(self) -> list[Future[Any]]:
        """The future of the last operation, if one is left."""
        with self.lock:
            return [self._queued[-1].future] if self._queued else []

    def blockers_of(self, future: Future[Any]) -> list[Blocker]:
        """What has to end before the operation of `future` can: what the running operation waits
        for, and what it and those before it will wait for. O(operations queued)."""
        with self.lock:
            queue = list(self._queued)
        blockers: list[Blocker] = list(self.tools)
        if self.started_by is not None:
            blockers.append(self.started_by)
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
        queues = [self]
        for queue in queues:
            blockers += (*queue.last(), *queue.tools)
            queues += queue.branches
        return blockers
