"""A stream: the operations of one prompt, queued from any thread and run in order.

Owns its variables, its listeners, and the task that runs the operations on the background loop,
which it has only while it has something to do. The queue is in `operation_queue.py`, and what an
operation does to the prompt in `execution.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
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
    Select,
    Tool,
    Values,
    VarScopeEnd,
    parts_of,
)
from sgl_vllm.lang.loop import result_of
from sgl_vllm.lang.operation_queue import OperationQueue, Queued, Waits
from sgl_vllm.lang.operations import (
    EarlyTool,
    Fork,
    JoinRecord,
    Needed,
    Operation,
    Read,
    has_effect,
    needed_by,
    variable_named,
)
from sgl_vllm.lang.run import Run
from sgl_vllm.lang.settings import global_config
from sgl_vllm.lang.speculation import Ahead
from sgl_vllm.lang.transcript import Transcript, Variable
from sgl_vllm.lang.variables import one_of, reasoning_of
from sgl_vllm.lang.waiting import Awaited, RunningTool, current_tool
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


class Listeners:
    """What is called on the loop whenever a stream has more text, or ends."""

    def __init__(self) -> None:
        self._listeners: list[Callable[[], object]] = []

    def __len__(self) -> int:
        return len(self._listeners)

    def add(self, listener: Callable[[], object]) -> Callable[[], None]:
        """Call `listener` from now on. Call the result to stop that."""
        self._listeners.append(listener)
        return functools.partial(self._remove, listener)

    def notify(self) -> None:
        """Call the listeners."""
        for listener in tuple(self._listeners):
            try:
                listener()
            except Exception:  # such as a reader whose own event loop has ended
                logger.debug("removed the listener %r, which failed", listener, exc_info=True)
                self._remove(listener)

    def _remove(self, listener: Callable[[], object]) -> None:
        with contextlib.suppress(ValueError):
            self._listeners.remove(listener)


class Stream:
    """The operations of one prompt, run in order. Implements `Branch`, and `Host` for its
    execution."""

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
        self.forked_at = 0
        self.failed_s: float | None = None  # since the run began
        self.discarded: bool = parent is not None and parent.discarded
        self.is_of_block: bool = outer is not None or (parent is not None and parent.is_of_block)
        # How many spans come from the parent; None until the branch has started.
        self.num_inherited_spans: int | None = 0 if parent is None else None
        self.listeners = Listeners()
        self._queue = OperationQueue(self._refusal, busy=parent is not None)
        self.waits: Waits = Waits(
            self._queue,
            None if parent is None else parent.waits,
            None if outer is None else outer.waits,
        )
        self._execution = Execution(run, where, self, transcript)
        self._task: asyncio.Task[None] | None = None
        # Of the last operation that may change what a tool reads.
        self.last_effect: Future[Any] | None = None if parent is None else parent.last_effect
        # Of such operations in other streams, which a compiled program has seen end.
        self.effects_seen: tuple[Future[Any], ...] = ()
        self._context = run.context.copy()
        self._context.run(branch_name.set, where)
        if outer is not None:  # whose operations the run waits for
            self._execution.take_over(outer._execution)
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
        future: Future[Any] = Awaited(self.waits.blockers_of)

        def added() -> None:
            if not self.is_of_block:
                self.run.lookahead.submitted(operation, future)
            if has_effect:
                self.last_effect = future

        if self._queue.add(Queued(operation, future, needed or {}), added):
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
        running = RunningTool(self.waits, self._context.get(current_tool))
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
        self.waits.branches += [child.waits for child in children]
        started = self.submit(Fork(tuple(children)))
        for child in children:
            child.waits.forked_by(started)
        return children

    # --- observing: any thread -----------------------------------------------------------------

    @property
    def joins(self) -> list[JoinRecord]:
        """The joins that have run, in order."""
        return self._execution.joins

    @property
    def error(self) -> ProgramError | None:
        """What has ended the stream; does not wait."""
        return self._queue.error

    @property
    def is_idle(self) -> bool:
        """Whether nothing is running or queued."""
        return not self._queue.is_busy or self._queue.error is not None

    def snapshot(self) -> Snapshot:
        """The current state; does not wait."""
        with self._queue.lock:
            running = self._queue.running
            operation = None if running is None else running.operation
            written = self._execution.written
            return Snapshot(
                written.transcript,
                written.partial,
                getattr(operation, "name", None),
                None if operation is None else str(operation),
                self._queue.error,
            )

    def partial_of(self, future: Future[Variable]) -> Written:
        """What has been generated so far of the variable of `future`: nothing if it is not the one
        that is being generated."""
        with self._queue.lock:
            running = self._queue.running
            written = self._execution.written
            is_it = running is not None and running.future is future
            return written if is_it else Written(written.transcript)

    def last(self) -> list[Future[Any]]:
        """The future of the last operation, if one is left."""
        return self._queue.last()

    def changed(self) -> None:
        """Notify the listeners."""
        self.listeners.notify()

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
        self.waits.begun()
        self._start_task()

    def _start_task(self) -> None:
        self._task = self.run.background.loop.create_task(self._drain(), context=self._context)

    async def _drain(self) -> None:
        while (queued := self._queue.next()) is not None:
            operation = queued.operation
            try:
                result = await self._execution.execute(operation, queued.needed)
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
            if not self._queue.finish():
                return
            queued.future.set_result(result)
            self.changed()
        self.changed()

    def upcoming(self) -> list[Operation]:
        """What is queued behind the operation that is running."""
        with self._queue.lock:
            return list(self._queue.upcoming())

    def hints_of(self, expr: Gen, num_own: int | None, is_last: bool) -> Hints:
        """Those of `expr`, which is being sent: which step it is, and what is known to follow its
        last attempt (see `Lookahead.hints`)."""
        if not global_config.enable_hints_of_what_follows:
            return NO_HINTS
        hints, lookahead = NO_HINTS, self.run.lookahead
        with self._queue.lock:
            # Inside of a computed value, the queue does not show what follows.
            running = self._queue.running
            if is_last and running is not None and running.operation is expr:
                prompt = self._execution.written.transcript.text
                hints = lookahead.hints(self._queue.upcoming(), num_own, prompt)
        return lookahead.with_step(hints, expr.step)

    async def run_block(self, block: Block, variables: Needed) -> Values:
        """Let a block write this prompt on a stream of its own. Readers see what that writes."""
        inner = Stream(self.run, self.where, dict(variables), outer=self)

        def show() -> None:
            self._execution.take_over(inner._execution)
            self.changed()

        stop = inner.listeners.add(show)
        self.block, self.waits.block = inner, inner.waits
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
            self.block = self.waits.block = None
            inner.cancel()

    async def call(self, function: Callable[..., Any], *args: object) -> Any:
        """On the loop: call a function of the user's as a tool is called. Returns its result."""
        return await self._execution.call(Tool(None, function, args))

    def fail(self, error: ProgramError) -> None:
        """End the stream: everything queued or submitted later gets `error`."""

        def stop() -> None:
            self.failed_s = self.run.elapsed_s
            self._execution.stop()

        self._queue.end(error, stop)
        self.changed()

    def cancel(self) -> None:
        """Fail what is running and queued. Does nothing on an idle stream."""
        with self._queue.lock:
            running = self._queue.running
            if not self._queue.is_busy:
                return
        operation = "fork" if running is None else str(running.operation)
        reason = self._cancel_reason() or ProgramCancelled("the event loop was stopped")
        self.fail(ProgramError(operation, self.where, reason))
        if self._task is not None:
            self._task.cancel()

    def _refusal(self, operation: Operation) -> ProgramError | None:
        """The error of an operation that is submitted after the run was canceled."""
        reason = self._cancel_reason()
        return None if reason is None else ProgramError(str(operation), self.where, reason)

    def _cancel_reason(self) -> Exception | None:
        if self.discarded:
            return ProgramCancelled("another branch was chosen")
        return self.run.cancel_reason


def _is_being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
