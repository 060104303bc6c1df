"""One run of a program: what all its streams share.

Owns the run's backend, sampling defaults and usage, its streams, and how it is canceled. What a
stream does is in `stream.py`; calling the program's function is in `body.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import itertools
import os
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping
from concurrent.futures import Future, InvalidStateError
from dataclasses import KW_ONLY, dataclass, field
from typing import TypeVar

from sgl_vllm.lang.backends.base import Backend, program_id
from sgl_vllm.lang.errors import ProgramCancelled, ProgramError, canceled_by
from sgl_vllm.lang.loop import BackgroundLoop, result_of
from sgl_vllm.lang.operations import Branch
from sgl_vllm.lang.ordering import PlannedOrders
from sgl_vllm.lang.sampling import Sampling
from sgl_vllm.lang.usage import Usage

T = TypeVar("T")

_runs_inside: contextvars.ContextVar[frozenset[str]] = contextvars.ContextVar(
    "sgl_vllm_runs_inside", default=frozenset()
)
"""The runs, by ID, of whose function or tool the code is a part."""

_process = uuid.uuid4().hex[:8]
_run_numbers = itertools.count(1)


@dataclass(eq=False)
class Run:
    """One run of a program, from its first stream to the end of its last.

    `streams` has every stream of the run, forks included, except discarded branches. If
    `is_streamed`, backends report text as it is generated. `num_api_spec_tokens` turns on API
    speculative execution: a generation may run that many tokens past its end. Backends send `id`
    to the server. `program` names the program's function. `planned_orders` are orders for its
    `any_order`s, chosen ahead.

    Invariant: once `cancel_reason` (None before) is set, no operation of the run starts any more.
    """

    backend: Backend
    defaults: Sampling
    background: BackgroundLoop
    _: KW_ONLY
    program: str = ""
    is_streamed: bool = False
    num_api_spec_tokens: int | None = None
    planned_orders: PlannedOrders = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.id = f"sgl-{_process}-{os.getpid()}-{next(_run_numbers)}"
        self.usage = Usage()
        self.streams: list[Branch] = []
        self.missed_tokens: dict[str, Mapping[str, int]] = {}
        """By request, the prompt tokens that were not read from the server's cache by cause, as far
        as `view.why` has asked for them."""
        self.function_done: Future[None] | None = None
        """In a streamed run: done when the program's function has returned, or when the run was
        canceled, because nothing that the function then appends runs."""
        self.context = self.context_inside()
        self.context.run(program_id.set, self.id)
        self.cancel_reason: Exception | None = None
        self._interrupts: list[Callable[[], object]] = []

    def context_inside(self) -> contextvars.Context:
        """A copy of the current context, for code that the run may wait for."""
        context = contextvars.copy_context()
        context.run(_runs_inside.set, _runs_inside.get() | {self.id})
        return context

    @property
    def is_called_from_inside(self) -> bool:
        """Whether this is called by a tool of the run, or by the function of a streamed one."""
        return self.id in _runs_inside.get()

    def function_ended(self, error: BaseException | None) -> None:
        """In a streamed run: the function has returned, or raised `error`."""
        self._end_function(error)  # first: readers prefer it to the operations' errors
        if error is not None:
            self.cancel(canceled_by(error))
        self.background.soon(self.streams[0].all_changed)

    def _end_function(self, error: BaseException | None) -> None:
        assert self.function_done is not None
        with contextlib.suppress(InvalidStateError):  # a canceled run: its readers know
            if error is not None:
                self.function_done.set_exception(error)
            else:
                self.function_done.set_result(None)

    @property
    def has_returned(self) -> bool:
        """Whether, in a streamed run, the function has ended. Otherwise it counts as ended."""
        return self.function_done is None or self.function_done.done()

    @property
    def is_over(self) -> bool:
        """Whether nothing is running or queued and, in a streamed run, the function has ended."""
        return self.has_returned and all(stream.is_idle for stream in list(self.streams))

    async def all_ended(self) -> None:
        """Queue a Read on every stream, and wait until all operations submitted so far have run.
        Raises the first stream's error that the program has not handled. If the run was canceled,
        it raises handled ones too. The branches of a block are the block's own."""
        for read in [stream.read() for stream in list(self.streams) if not stream.is_of_block]:
            try:
                await result_of(read)
            except ProgramError as error:
                if not error.is_handled or self.cancel_reason is not None:
                    raise

    # --- canceling -----------------------------------------------------------------------------

    def cancel(self, reason: Exception | None = None) -> None:
        """Cancel the requests in flight, and fail every operation queued or submitted later."""
        if self.cancel_reason is None:
            self.cancel_reason = reason or ProgramCancelled(
                "the program was canceled before this operation finished"
            )
        for stream in list(self.streams):
            self.background.soon(stream.cancel)
        if self.function_done is not None:
            self.background.soon(self._give_up_function)
        for interrupt in tuple(self._interrupts):
            interrupt()

    def _give_up_function(self) -> None:
        """The streams have failed, so readers of the run need not wait for its function."""
        self._end_function(self._error_of_cancellation())
        self.streams[0].all_changed()

    def _error_of_cancellation(self) -> ProgramError:
        """Of the operation that was canceled, or else of the function itself."""
        assert self.cancel_reason is not None
        errors = (stream.error for stream in list(self.streams))
        return next(
            (error for error in errors if error is not None),
            ProgramError("the program's function", "", self.cancel_reason),
        )

    def cancel_after(self, timeout_s: float | None) -> Callable[[], object]:
        """Cancel the run after `timeout_s` seconds (None: never). Call the result to prevent it."""
        if timeout_s is None:
            return lambda: None

        async def cancel() -> None:
            await asyncio.sleep(timeout_s)
            self.cancel(TimeoutError(f"the program did not finish within timeout_s={timeout_s:g}"))

        return self.background.start(cancel()).cancel

    @contextlib.contextmanager
    def canceled_on_error(self, timeout_s: float | None) -> Iterator[None]:
        """Cancel the run if the ``with`` block raises, or takes longer than `timeout_s` seconds."""
        stop_timer = self.cancel_after(timeout_s)
        try:
            yield
        except BaseException:
            self.cancel()
            raise
        finally:
            stop_timer()

    # --- coroutine functions -------------------------------------------------------------------

    async def call_function(self, function: Callable[[], Awaitable[T]]) -> T:
        """Await the program's own function, on any event loop, until the run is canceled.

        Canceling the run interrupts the function. The error raised is then that of the operation
        that was canceled, or else a ProgramError for the function itself.
        """
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None
        num_cancelled = task.cancelling()
        limit = asyncio.timeout(None)

        def expire() -> None:
            with contextlib.suppress(RuntimeError):  # it has ended, or was interrupted before
                limit.reschedule(0)

        interrupt = functools.partial(loop.call_soon_threadsafe, expire)
        self._interrupts.append(interrupt)
        try:
            async with limit:
                return await function()
        except (TimeoutError, asyncio.CancelledError) as error:
            is_own = isinstance(error, TimeoutError) and not limit.expired()
            if is_own or task.cancelling() > num_cancelled:
                raise  # of the function, or canceled from outside: not by this run
            if self.cancel_reason is None:
                raise ProgramError("the program's function", "", error) from error
            await result_of(self.background.start(asyncio.sleep(0)))  # the streams have failed now
            raise self._error_of_cancellation() from self.cancel_reason
        finally:
            self._interrupts.remove(interrupt)
