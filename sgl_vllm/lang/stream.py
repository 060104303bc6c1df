"""A stream: the operations of one prompt, queued from any thread and run in order.

Owns the queue, the futures of its operations and variables, and how errors propagate. What an
operation does to the prompt is in `execution.py`. All streams run on the background loop; a stream
has a task only while it has something to do.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any  # Any: values of operations, of several types

from sgl_vllm.lang.backends.base import branch_name, logger
from sgl_vllm.lang.errors import BackendError, ProgramCancelled, ProgramError
from sgl_vllm.lang.execution import Execution, Written, filled
from sgl_vllm.lang.ir import (
    Block,
    Computed,
    Expr,
    Gen,
    Making,
    RoleEnd,
    Select,
    Tool,
    Values,
    VarScopeEnd,
    parts_of,
)
from sgl_vllm.lang.loop import result_of
from sgl_vllm.lang.operations import (
    EarlyTool,
    Fork,
    JoinRecord,
    Needed,
    Operation,
    Read,
    blockers_in,
    has_effect,
    needed_by,
    variable_named,
)
from sgl_vllm.lang.run import Run
from sgl_vllm.lang.settings import global_config
from sgl_vllm.lang.speculation import Ahead
from sgl_vllm.lang.transcript import Transcript, Variable
from sgl_vllm.lang.variables import one_of, reasoning_of
from sgl_vllm.lang.waiting import Awaited, Blocker, RunningTool, current_tool, tools_around
from sgl_vllm.protocol.hints import NO_HINTS, Hints

NOTHING_WRITTEN = Transcript()


@dataclass(frozen=True)
class Snapshot:
    """A stream at one moment.

    `partial` is the text generated so far for the variable `partial_name`. `busy` describes the
    running operation, `error` what ended the stream.
    """

    transcript: Transcript
    partial: str
    partial_name: str | None
    busy: str | None
    error: ProgramError | None

    @property
    def text(self) -> str:
        return self.transcript.text + self.partial


class Stream:
    """The operations of one prompt, run in order.

    Invariant: every future that `submit` returns is resolved by the time the stream is idle, so no
    reader waits forever. From the first failed operation on, futures get its ProgramError. The
    head of the queue is the operation that is running.
    """

    def __init__(
        self,
        run: Run,
        where: str = "",
        variables: dict[str, Future[Variable]] | None = None,
        *,
        parent: Stream | None = None,
        outer: Stream | None = None,
        transcript: Transcript = NOTHING_WRITTEN,
    ) -> None:
        """Args:
        where: names the branch in errors, such as ``fork[1]``; empty for the root.
        variables: those the stream starts with.
        outer: continue this stream's prompt, while it runs a block.
        transcript: what the root begins with. A branch begins with what its parent has written.
        """
        self.run = run
        self.where = where
        self.variables: dict[str, Future[Variable]] = dict(variables or {})
        self.written: dict[str, None] = {}  # names this stream bound itself, in order
        self.parent = parent
        self.children: list[Stream] = [] if outer is None else outer.children
        self.block: Stream | None = None  # continues the prompt, while this stream runs a block
        self._fork: Future[Any] | None = None  # of the operation that starts this branch
        self.forked_at = 0  # where this branch's own text begins
        self.failed_s: float | None = None  # since the run began
        self.discarded: bool = parent is not None and parent.discarded
        self.is_of_block: bool = outer is not None or (parent is not None and parent.is_of_block)
        # How many spans come from the parent; None until the branch has started.
        self.num_inherited_spans: int | None = 0 if parent is None else None
        self._execution = Execution(
            run,
            where,
            self.changed,
            self._upcoming,
            self._hints_of,
            self._run_block,
            transcript,
        )
        self._lock = threading.Lock()
        # Each future is of the operation's variable, if it makes one; of a Read, a transcript.
        self._queue: deque[tuple[Operation, Future[Any], Needed]] = deque()
        self._busy = parent is not None  # a branch waits for its fork
        self._task: asyncio.Task[None] | None = None
        self._error: ProgramError | None = None
        # Of the last operation that may change what a tool reads.
        self.last_effect: Future[Any] | None = None if parent is None else parent.last_effect
        # Of such operations in other streams, which a compiled program has seen end.
        self.effects_seen: tuple[Future[Any], ...] = ()
        self._listeners: list[Callable[[], object]] = []
        self._context = run.context.copy()
        self._context.run(branch_name.set, where)
        if outer is not None:  # whose operations the run waits for
            self._execution.take_over(outer._execution)
            self._execution.outer = outer._execution
        elif not self.discarded:
            run.streams.append(self)

    # --- submitting: any thread ----------------------------------------------------------------

    def submit(
        self, operation: Operation, needed: Needed | None = None, *, has_effect: bool = False
    ) -> Future[Any]:
        """Queue an operation. Its future has the operation's variable (or None), for a Read the
        transcript, and is always resolved.

        Args:
            needed: the variables that it reads.
            has_effect: whether it may change what the tools after it read.
        """
        future: Future[Any] = Awaited(self._blockers_of)
        with self._lock:
            reason = self._cancel_reason()
            if self._error is None and reason is not None:
                self._error = ProgramError(str(operation), self.where, reason)
            if self._error is not None:
                if not isinstance(operation, Read | RoleEnd | VarScopeEnd):
                    self._error.is_handled = False  # the program may not know that this is lost
                _abandon(operation, future, self._error)
                return future
            if not self.is_of_block:
                self.run.lookahead.submitted(operation, future)
            self._queue.append((operation, future, needed or {}))
            if has_effect:
                self.last_effect = future
            was_idle, self._busy = not self._busy, True
        if was_idle:
            self.run.background.soon(self._start_task)
        return future

    def submit_read_only(
        self,
        tool: Tool,
        with_values: Callable[[], Coroutine[Any, Any, Tool]],
        waits_for: Iterable[Future[Any]],
    ) -> Future[Any]:
        """Queue a read-only tool, and call it once its arguments and the effects of the operations
        before it are there.

        Args:
            with_values: waits for the arguments, and fills them in.
            waits_for: the arguments.
        """
        effects = [*self.effects_seen, *filter(None, [self.last_effect])]
        running = RunningTool(self._execution, self._context.get(current_tool))
        running.waits_for += [*waits_for, *effects]

        async def call() -> object:
            ready = await with_values()
            for effect in effects:
                await result_of(effect)
            return await self._execution.call(ready, running)

        context = self._context.copy()  # an own one, because several calls run at the same time
        result = context.run(self.run.background.start, call())
        return self.submit(EarlyTool(tool, result, running))

    def read(self) -> Future[Transcript]:
        """The transcript once everything submitted so far has run."""
        return self.submit(Read())

    def append(self, value: Expr | str) -> None:
        """Submit what a program appends. KeyError for a variable not made earlier."""
        for expr in parts_of(value):
            needed = needed_by(expr, self.variables)
            if isinstance(expr, Tool) and expr.is_read_only:
                with_values = functools.partial(filled, expr, needed)
                future = self.submit_read_only(expr, with_values, needed.values())
            else:
                future = self.submit(expr, needed, has_effect=has_effect(expr))
            match expr:
                case Gen(name) if name is not None:
                    self.bind(name, future)
                    if expr.reasoning_name is not None:
                        self.bind(expr.reasoning_name, reasoning_of(future))
                case Select(name) | VarScopeEnd(name) | Tool(name) | Making(name) if (
                    name is not None
                ):
                    self.bind(name, future)
                case Block(_, names):
                    for name in names:
                        self.bind(name, one_of(future, name))
                case Computed() if expr.name is not None:
                    self.bind(expr.name, future)

    def variable(self, name: str) -> Future[Variable]:
        """The future of variable `name`. KeyError if the program does not make it."""
        return variable_named(name, self.variables)

    def bind(self, name: str, future: Future[Variable]) -> None:
        """From here on, `name` refers to the result of `future`."""
        self.variables[name] = future
        self.written[name] = None

    def fork(self, size: int, label: Callable[[int], str]) -> list[Stream]:
        """Submit a fork into `size` branches, which start when it runs."""
        children = [Stream(self.run, label(i), self.variables, parent=self) for i in range(size)]
        self.children += children
        started = self.submit(Fork(tuple(children)))
        for child in children:
            child._fork = started
        return children

    # --- observing: any thread -----------------------------------------------------------------

    @property
    def joins(self) -> list[JoinRecord]:
        """The joins that have run, in order."""
        return self._execution.joins

    def snapshot(self) -> Snapshot:
        """The current state; does not wait."""
        with self._lock:
            running = self._queue[0][0] if self._queue else None
            written = self._execution.written
            return Snapshot(
                written.transcript,
                written.partial,
                getattr(running, "name", None),
                None if running is None else str(running),
                self._error,
            )

    def partial_of(self, future: Future[Variable]) -> Written:
        """What has been generated so far of the variable of `future`: nothing if it is not the one
        that is being generated."""
        with self._lock:
            is_running = bool(self._queue) and self._queue[0][1] is future
            written = self._execution.written
            return written if is_running else Written(written.transcript)

    def refuse_to_wait_for_itself(self) -> None:
        """RuntimeError inside a tool of this stream, or of one that has yet to fork it: what is
        submitted here runs after the tool, so the tool would wait forever."""
        stream: Stream | None = self
        callers = []
        for tool in tools_around():
            caller = tool.caller
            while isinstance(caller, Execution):
                callers.append(caller)
                caller = caller.outer
        while callers and stream is not None:
            if stream._execution in callers:
                raise RuntimeError(
                    "a tool cannot read the prompt that called it, because the prompt waits for "
                    "the tool: pass what it needs as arguments, such as sgl.var('x')"
                )
            stream = stream.parent if stream.num_inherited_spans is None else None

    def _blockers_of(self, future: Future[Any]) -> list[Blocker]:
        """What has to end before the operation of `future` can: what the running operation waits
        for, and what it and those before it will wait for. O(operations queued)."""
        with self._lock:
            queue = list(self._queue)
        blockers = self._blockers_now()
        for operation, queued, needed in queue:
            blockers += (*needed.values(), *blockers_in(operation))
            if queued is future:
                return blockers
        return []  # it has run

    def _blockers_now(self) -> list[Blocker]:
        """What the running operation waits for."""
        blockers: list[Blocker] = list(self._execution.tools)
        if self.num_inherited_spans is None and self._fork is not None:
            blockers.append(self._fork)
        if self.block is not None:
            blockers += self.block.unfinished()
        return blockers

    def unfinished(self) -> list[Blocker]:
        """What has to end before this stream and its branches are idle."""
        blockers: list[Blocker] = []
        streams = [self]
        for stream in streams:
            blockers += stream.last()
            blockers += stream._execution.tools
            streams += [child for child in list(stream.children) if child.parent is stream]
        return blockers

    def last(self) -> list[Future[Any]]:
        """The future of the last operation, if one is left."""
        with self._lock:
            return [self._queue[-1][1]] if self._queue else []

    def _upcoming(self) -> list[Operation]:
        """What is queued behind the operation that is running."""
        with self._lock:
            return [operation for operation, _, _ in self._queue][1:]

    @property
    def is_idle(self) -> bool:
        """Whether nothing is running or queued."""
        with self._lock:
            return not self._busy or self._error is not None

    def on_change(self, listener: Callable[[], object]) -> Callable[[], None]:
        """Call `listener` on the loop whenever text is added or the stream ends. Call the result to
        stop that."""
        self._listeners.append(listener)
        return functools.partial(self._remove_listener, listener)

    def _remove_listener(self, listener: Callable[[], object]) -> None:
        with contextlib.suppress(ValueError):
            self._listeners.remove(listener)

    def changed(self) -> None:
        """Notify the listeners."""
        for listener in tuple(self._listeners):
            try:
                listener()
            except Exception:  # such as a reader whose own event loop has ended
                logger.debug("removed the listener %r, which failed", listener, exc_info=True)
                self._remove_listener(listener)

    def all_changed(self) -> None:
        """Notify the listeners of this stream and of all its branches, discarded ones included."""
        streams = [self]
        for stream in streams:
            stream.changed()
            streams += list(stream.children)

    # --- running: the background loop ----------------------------------------------------------

    def begin(self, transcript: Transcript, ahead: Ahead | None, *, is_cached: bool) -> None:
        """Start a branch with what its parent has written, which the server has if `is_cached`."""
        self._execution.begin(transcript, ahead, is_cached=is_cached)
        self.forked_at = len(transcript.text)
        self.num_inherited_spans = len(transcript.spans)
        self._start_task()

    def _start_task(self) -> None:
        self._task = self.run.background.loop.create_task(self._drain(), context=self._context)

    async def _drain(self) -> None:
        while True:
            with self._lock:
                if not self._queue:
                    self._busy = False
                    self._task = None
                    break
                operation, future, needed = self._queue[0]  # stays there, so that `fail` finds it
            try:
                result = await self._execution.execute(operation, needed)
            except ProgramError as error:  # a joined branch's error, which already says where
                self.fail(error)
                return
            except asyncio.CancelledError as cause:
                if _is_being_cancelled():
                    self.cancel()
                else:  # raised by a tool
                    self.fail(ProgramError(str(operation), self.where, cause))
                return
            except BackendError as cause:  # its message says it all
                self.fail(ProgramError(str(operation), self.where, cause.with_traceback(None)))
                return
            except BaseException as cause:  # even SystemExit, which would end the shared loop
                self.fail(ProgramError(str(operation), self.where, cause))
                return
            with self._lock:
                if self._error is not None:
                    return
                self._queue.popleft()
            future.set_result(result)
            if self._listeners:
                self.changed()
        if self._listeners:
            self.changed()

    def _hints_of(self, expr: Gen, num_own: int | None, is_last: bool) -> Hints:
        """Those of `expr`, which is being sent: which step it is, and what is known to follow its
        last attempt (see `Lookahead.hints`)."""
        if not global_config.enable_hints_of_what_follows:
            return NO_HINTS
        hints, lookahead = NO_HINTS, self.run.lookahead
        with self._lock:
            # Inside of a computed value, the queue does not show what follows.
            if is_last and self._queue and self._queue[0][0] is expr:
                queued = (operation for operation, _, _ in itertools.islice(self._queue, 1, None))
                prompt = self._execution.written.transcript.text
                hints = lookahead.hints(queued, num_own, prompt)
        return lookahead.with_step(hints, expr.step)

    async def _run_block(self, block: Block, variables: Needed) -> Values:
        """Let a block write this prompt on a stream of its own. Readers see what that writes."""
        inner = Stream(self.run, self.where, dict(variables), outer=self)

        def show() -> None:
            self._execution.take_over(inner._execution)
            self.changed()

        stop = inner.on_change(show)
        self.block = inner
        try:
            with self.run.lookahead.running_block():
                made = await block.function(inner)
                await result_of(inner.read())
            self._execution.take_over(inner._execution)
            return made
        except BaseException as error:
            self.run.cancel_branches(inner)
            if isinstance(error, ProgramError):
                raise ProgramError(str(block), self.where, error) from error
            raise
        finally:
            stop()
            self.block = None
            inner.cancel()

    async def call(self, function: Callable[..., Any], *args: object) -> Any:
        """On the loop: call a function of the user's as a tool is called. Returns its result."""
        return await self._execution.call(Tool(None, function, args))

    def fail(self, error: ProgramError) -> None:
        """End the stream: everything queued or submitted later gets `error`."""
        with self._lock:
            if self._error is not None:
                return
            self._error = error
            self.failed_s = self.run.elapsed_s
            self._execution.stop()
            abandoned = list(self._queue)
            self._queue.clear()
        for operation, future, _ in abandoned:
            _abandon(operation, future, error)
        self.changed()

    def cancel(self) -> None:
        """Fail what is running and queued. Does nothing on an idle stream."""
        with self._lock:
            if not self._busy:
                return
            operation = str(self._queue[0][0]) if self._queue else "fork"
        reason = self._cancel_reason() or ProgramCancelled("the event loop was stopped")
        self.fail(ProgramError(operation, self.where, reason))
        if self._task is not None:
            self._task.cancel()

    def _cancel_reason(self) -> Exception | None:
        if self.discarded:
            return ProgramCancelled("another branch was chosen")
        return self.run.cancel_reason


def _abandon(operation: Operation, future: Future[Any], error: ProgramError) -> None:
    """Fail an operation that will not run, the branches it would have started, and the call of its
    tool."""
    if isinstance(operation, Fork):
        for child in operation.children:
            child.fail(error)
    elif isinstance(operation, EarlyTool):
        operation.result.cancel()
    future.set_exception(error)


def _is_being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
