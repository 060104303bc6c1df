"""A stream: the operations of one prompt, queued from any thread and run in order.

How a program runs::

    s += "Tips:" + gen("tips")      state.py      Stream.append: an operation for each expression,
                                                  with a future for its variable, in the queue
    forks = s.fork(2)               state.py      Stream.fork: two streams, which have the futures
                                                  of all variables so far, and a Fork in the queue
    forks += gen("detail")          group.py      queued in each branch, which has yet to start
    forks.join()                    group.py      a Gather in the parent's queue, with the futures
                                                  of the branches' variables
    s["detail"]                     state.py      waits for the future of the Gather
    the function returns            run.py        Run.all_ended: a Read in each queue, and a wait
                                                  for all of them

None of these calls runs an operation itself, and those that submit one return at once. A stream
that has something to do has one task on the language's event loop (`loop.py`). Its `_drain` takes
operation after operation from the queue (`operation_queue.py`), has it executed, and resolves its
future:

    Text, turns       a new transcript (`execution.py`; values in `transcript.py`)
    Gen, Select       a request to the backend (`generation.py`), whose answer joins the transcript
    Fork              sends the shared prompt to the server, unless the server has it, gives the
                      transcript to the branches, and starts their tasks: they run in parallel
    Gather            awaits futures of other streams, whose tasks go on meanwhile
    Block             a primitive: its coroutine writes this prompt through a stream of its own,
                      which runs on the same `Execution`

The first operation that fails ends its stream: its error becomes that of every future queued or
added later and, through joins, of futures in other streams. Canceling (`run.py`) is the same, from
outside.

Owns a prompt's variables and the task. What a tool must not wait for is in `waiting.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import operator
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any  # Any: values of operations, of several types

from sgl_vllm.lang.backends.base import branch_name
from sgl_vllm.lang.errors import BackendError, ProgramCancelled, ProgramError
from sgl_vllm.lang.execution import Execution, Written, with_values_awaited
from sgl_vllm.lang.ir import Block, Computed, Expr, Gen, Tool, Value, Values, names_made, parts_of
from sgl_vllm.lang.loop import result_of
from sgl_vllm.lang.operation_queue import OperationQueue, Queued
from sgl_vllm.lang.operations import (
    AppendTexts,
    EarlyTool,
    Fork,
    Gather,
    JoinRecord,
    Needed,
    Operation,
    Read,
    has_effect,
    needed_by,
    variable_named,
)
from sgl_vllm.lang.run import Run
from sgl_vllm.lang.transcript import Transcript, Variable
from sgl_vllm.lang.waiting import Awaited, RunningTool, current_tool, derived

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
    """The operations of one prompt, run in order."""

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
        self.bound_names: dict[str, None] = {}  # by this stream itself, in order
        self.parent = parent
        self.children: list[Stream] = [] if outer is None else outer.children
        self.block: Stream | None = None  # continues the prompt, while this stream runs a block
        self.forked_at = 0
        self.discarded: bool = parent is not None and parent.discarded
        self.is_of_block: bool = outer is not None or (parent is not None and parent.is_of_block)
        # How many spans come from the parent; None until the branch has started.
        self.num_inherited_spans: int | None = 0 if parent is None else None
        self.queue = OperationQueue(is_branch=parent is not None)
        self._execution: Execution = (
            Execution(run, where, self.queue, transcript) if outer is None else outer._execution
        )
        self._task: asyncio.Task[None] | None = None
        # The future of the last operation that may change what a tool reads.
        self.last_effect: Future[Any] | None = None if parent is None else parent.last_effect
        # Futures of what changes that in other streams, for which a compiled program has to wait.
        self.waits_for_effects: tuple[Future[Any], ...] = ()
        self._context = run.context.copy()
        self._context.run(branch_name.set, where)
        if outer is None and not self.discarded:  # the run waits for the operations of `outer`
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
        future: Future[Any] = Awaited(self.queue.blockers_of)
        if has_effect:
            self.last_effect = future
        if self.queue.add(Queued(operation, future, needed or {})):
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
        effects = [*self.waits_for_effects, *filter(None, [self.last_effect])]
        running = RunningTool(self._context.get(current_tool), [*waits_for, *effects])

        queued: Future[None] = Future()
        queued.set_running_or_notify_cancel()  # from now on, a canceled run leaves it alone

        async def call() -> object:
            await result_of(queued)  # the tool may wait for the operations up to this one
            ready = await with_values()
            for effect in effects:
                await result_of(effect)
            return await self._execution.call_tool(ready, running)

        context = self._context.copy()  # an own one, because several calls run at the same time
        result = context.run(self.run.background.start, call())
        try:
            return self.submit(EarlyTool(tool, result, running))
        finally:
            queued.set_result(None)

    def read(self) -> Future[Transcript]:
        """The transcript once everything submitted so far has run."""
        return self.submit(Read())

    def append(self, value: Expr | str) -> None:
        """Submit what a program appends. KeyError for a variable not made earlier."""
        for expr in parts_of(value):
            needed = needed_by(expr, self.variables)
            if isinstance(expr, Tool) and expr.is_read_only:
                with_values = functools.partial(with_values_awaited, expr, needed)
                future = self.submit_read_only(expr, with_values, needed.values())
            else:
                future = self.submit(expr, needed, has_effect=has_effect(expr))
            for name in names_made(expr):
                if isinstance(expr, Block):
                    self.bind(name, derived(future, operator.itemgetter(name)))
                elif isinstance(expr, Gen) and name == expr.reasoning_name:
                    self.bind(name, derived(future, lambda made: Variable.of(made.reasoning)))
                else:
                    self.bind(name, future)

    def variable(self, name: str) -> Future[Variable]:
        """The future of variable `name`. KeyError if the program does not make it."""
        return variable_named(name, self.variables)

    def bind(self, name: str, future: Future[Variable]) -> None:
        """From here on, `name` refers to the result of `future`."""
        self.variables[name] = future
        self.bound_names[name] = None

    def fork(self, size: int) -> list[Stream]:
        """Submit a fork into `size` branches, which start when it runs."""
        prefix = f"{self.where}." if self.where else ""
        labels = [f"{prefix}fork[{i}]" for i in range(size)]
        children = [Stream(self.run, label, self.variables, parent=self) for label in labels]
        self.children += children
        self.queue.branches += [child.queue for child in children]
        started = self.submit(Fork(tuple(children)))
        for child in children:
            child.queue.started_by = started
        return children

    def gather(self, name: str, branches: Sequence[Stream]) -> None:
        """Submit a join: `name` becomes a list of its values in `branches`."""
        futures = tuple(branch.variables[name] for branch in branches)
        self.bind(name, self.submit(Gather(name, futures, tuple(branches)), has_effect=True))

    def append_texts(self, branches: Sequence[Stream]) -> None:
        """Submit a join: append the text that each of `branches` writes after the fork."""
        reads = tuple((branch, branch.read()) for branch in branches)
        self.submit(AppendTexts(reads), has_effect=True)

    # --- observing: any thread -----------------------------------------------------------------

    @property
    def listeners(self) -> set[Callable[[], object]]:
        """What is called on the loop whenever the prompt has more text, or ends."""
        return self._execution.listeners

    @property
    def joins(self) -> list[JoinRecord]:
        """The joins that have run, in order."""
        return self._execution.joins

    @property
    def error(self) -> ProgramError | None:
        """What has ended the stream; does not wait."""
        return self.queue.error

    @property
    def is_idle(self) -> bool:
        """Whether nothing is running or queued."""
        return not self.queue.is_busy or self.queue.error is not None

    def snapshot(self) -> Snapshot:
        """The current state; does not wait."""
        with self.queue.lock:
            running = self.queue.running
            operation = None if running is None else running.operation
            written = self._execution.written
            return Snapshot(
                written.transcript,
                written.partial,
                getattr(operation, "name", None),
                None if operation is None else str(operation),
                self.queue.error,
            )

    def partial_of(self, future: Future[Variable]) -> Written:
        """What has been generated so far of the variable of `future`: nothing if it is not the one
        that is being generated."""
        with self.queue.lock:
            running = self.queue.running
            written = self._execution.written
            is_it = running is not None and running.future is future
            return written if is_it else Written(written.transcript)

    def all_changed(self) -> None:
        """Notify the listeners of this stream and of all its branches, discarded ones included."""
        streams = [self]
        for stream in streams:
            stream._execution.notify()
            streams += list(stream.children)

    # --- running: the background loop ----------------------------------------------------------

    def _start_task(self) -> None:
        self._task = self.run.background.loop.create_task(self._drain(), context=self._context)

    async def _drain(self) -> None:
        while (queued := self.queue.next()) is not None:
            operation = queued.operation
            try:
                if (reason := self._cancel_reason()) is not None:
                    raise ProgramError(str(operation), self.where, reason)
                result = await self._execute(operation, queued.needed)
            except ProgramError as error:  # a joined branch's error, which already says where
                self.fail(error)
                return
            except BaseException as cause:  # even SystemExit, which would end the shared loop
                task = asyncio.current_task()
                if isinstance(cause, BackendError):  # its message says it all
                    cause = cause.with_traceback(None)
                elif isinstance(cause, asyncio.CancelledError) and task and task.cancelling():
                    self.cancel()  # not one that a tool has raised
                    return
                self.fail(ProgramError(str(operation), self.where, cause))
                return
            if not self.queue.finish():
                return
            queued.future.set_result(result)
            self._execution.notify()
        self._execution.notify()

    async def _execute(
        self, operation: Operation, needed: Needed
    ) -> Variable | Transcript | Values | None:
        """Run `operation`. Returns what `Execution.execute` does; for a Block, its variables."""
        match operation:
            case Fork(children):
                await self._execution.warm_for_branches(len(children))
                for child in children:
                    child.begin(self._execution)
                return None
            case Block():
                return await self._run_block(operation, needed)
            case Computed():
                result: Value = Variable.of("")
                for part in parts_of(await operation.function()):
                    made = await self._execute(part, needed_by(part, needed))
                    if isinstance(made, Mapping) and operation.name is not None:
                        made = made[operation.name]
                    result = made if isinstance(made, Variable) else result
                return result
        return await self._execution.execute(operation, needed)

    def begin(self, parent_execution: Execution) -> None:
        """Start a branch with what its parent has written."""
        self._execution.begin(parent_execution)
        transcript = parent_execution.written.transcript
        self.forked_at = len(transcript.text)
        self.num_inherited_spans = len(transcript.spans)
        self.queue.started_by = None
        self._start_task()

    async def _run_block(self, block: Block, variables: Needed) -> Values:
        """Let a block write this prompt on a stream of its own. Readers see what that writes."""
        inner = Stream(self.run, self.where, dict(variables), outer=self)
        num_before = len(self.children)
        try:
            with self._written_by(inner):
                made = await block.function(inner)
                await result_of(inner.read())
            return made
        except BaseException as error:
            for child in self.children[num_before:]:
                child.cancel_with_branches(ProgramCancelled("its block failed"))
            if isinstance(error, ProgramError):
                raise ProgramError(str(block), self.where, error) from error
            raise
        finally:
            inner.cancel()

    @contextlib.contextmanager
    def _written_by(self, inner: Stream) -> Iterator[None]:
        """While a block runs, hints and tools look at the queue of the stream that it writes."""
        self.block, self.queue.block, self._execution.queue = inner, inner.queue, inner.queue
        try:
            yield
        finally:
            self.block, self.queue.block, self._execution.queue = None, None, self.queue

    async def call_as_tool(self, function: Callable[..., Any], *args: object) -> Any:
        """On the loop: call a function of the user's as a tool is called. Returns its result."""
        return await self._execution.call_tool(Tool(None, function, args))

    def fail(self, error: ProgramError) -> None:
        """End the stream: everything queued or submitted later gets `error`."""
        if self.queue.error is None:
            self._execution.stop()
            self.queue.end(error)
        self._execution.notify()

    def cancel(self, reason: Exception | None = None) -> None:
        """Fail what is running and queued. Does nothing on an idle stream."""
        if not self.queue.is_busy:
            return
        running = self.queue.running
        # If nothing is running, this branch waits for its fork.
        operation = "fork" if running is None else str(running.operation)
        reason = self._cancel_reason() or reason or ProgramCancelled("the event loop was stopped")
        self.fail(ProgramError(operation, self.where, reason))
        if self._task is not None:
            self._task.cancel()

    def cancel_with_branches(self, reason: Exception) -> None:
        """Cancel this branch and everything forked from it."""
        for child in self.children:
            child.cancel_with_branches(reason)
        self.run.background.soon(functools.partial(self.cancel, reason))

    def discard(self) -> None:
        """Cancel this branch and everything forked from it. Their errors are not reported."""
        for below in (*self.children, *filter(None, [self.block])):
            below.discard()
        if self in self.run.streams:
            self.run.streams.remove(self)
        self.discarded = True
        self.run.background.soon(self.cancel)

    def _cancel_reason(self) -> Exception | None:
        if self.discarded:
            return ProgramCancelled("another branch was chosen")
        return self.run.cancel_reason
