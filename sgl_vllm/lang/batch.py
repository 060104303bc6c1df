"""Runs one program over many items, a bounded number of them at a time.

Owns the order in which runs start, the threads that call plain functions, and the shared prefix
that is sent ahead. What one run does is in `body.py` and below.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeAlias  # Any: tqdm has no types

from sgl_vllm.lang.backends.base import Backend
from sgl_vllm.lang.body import Body
from sgl_vllm.lang.loop import background_loop, error_of, new_future
from sgl_vllm.lang.ordering import NOTHING_PLANNED, PlannedOrders
from sgl_vllm.lang.run import Run
from sgl_vllm.lang.sampling import Sampling
from sgl_vllm.lang.settings import global_config
from sgl_vllm.lang.state import ProgramState
from sgl_vllm.lang.transcript import Transcript
from sgl_vllm.lang.usage import Usage

AUTO_CONCURRENCY = 256
"""How many programs run at a time with num_threads="auto": vLLM's default batch size."""

_GROW_AFTER_S = 0.01
"""The number of threads doubles when all of them have been busy for this long."""

Item: TypeAlias = Mapping[str, object]
"""The arguments of one run, by name."""

Results: TypeAlias = Generator[ProgramState | BaseException, None, None]


def as_item(given: Mapping[str, object] | Sequence[object], arg_names: Sequence[str]) -> Item:
    """An item of a batch, which may be given as positional arguments, as arguments by name."""
    if isinstance(given, Mapping):
        return dict(given)
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise TypeError(f"an item is a dict or a sequence of arguments, not {given!r}")
    kwargs = dict(zip(arg_names, given, strict=False))
    if len(kwargs) < len(given):
        raise TypeError(f"{len(given)} arguments for {len(arg_names)} parameters")
    return kwargs


class Batch:
    """The runs of one program over `items`, at most `concurrency` of them at a time.

    A feeder thread starts the runs in the items' order: plain functions on worker threads,
    coroutine functions on the background loop. Each item has its own copy of the contextvars that
    the batch was made with. A run whose function has returned holds no thread.
    `shared_prefix` computes what all prompts begin with, `plan_orders` the orders of their
    `any_order`s.
    """

    def __init__(
        self,
        body: Body,
        backend: Backend,
        defaults: Sampling,
        items: Sequence[Item],
        *,
        concurrency: int,
        timeout_s: float | None,
        shared_prefix: Callable[[Sequence[Item]], Transcript],
        plan_orders: Callable[[Sequence[Item]], PlannedOrders],
    ) -> None:
        self._body = body
        self._backend = backend
        self._defaults = defaults
        self._items = items
        self._timeout_s = timeout_s
        self._shared_prefix = shared_prefix
        self._plan_orders = plan_orders
        self._planned_orders = NOTHING_PLANNED
        self._slots = threading.Semaphore(concurrency)
        self._workers = _Workers(concurrency)
        self._context = contextvars.copy_context()
        self._results: dict[int, Future[ProgramState]] = {
            index: new_future() for index in range(len(items))
        }
        self._runs: dict[int, Run] = {}
        self._seen_chars = 0
        self._warming: Future[Usage] | None = None
        self._stopped = False

    def _start(self) -> list[Future[ProgramState]]:
        """Start the batch. Returns a future per item."""
        futures = [*self._results.values()]
        feed = self._context.copy().run
        threading.Thread(
            target=feed, args=(self._feed,), name="sgl-vllm-batch", daemon=True
        ).start()
        return futures

    def results(self, *, progress_bar: bool = False) -> Results:
        """States and errors in the items' order. Closing the generator cancels the rest."""
        with self.running(progress_bar=progress_bar) as futures:
            futures.reverse()
            while futures:
                future = futures.pop()  # not kept: all states of a batch may not fit into memory
                if not future.done():
                    background_loop().refuse_to_wait()
                error = future.exception()
                yield error if error is not None else future.result()

    @contextlib.contextmanager
    def running(self, *, progress_bar: bool) -> Iterator[list[Future[ProgramState]]]:
        """Start the batch; at the end of the ``with`` block, cancel what is not done."""
        bar = None
        try:
            futures = self._start()
            bar = _progress_bar(futures) if progress_bar else None
            yield futures
        finally:
            if bar is not None:
                bar.close()
            self._stop()

    def _stop(self) -> None:
        """Cancel the runs in progress and start no more."""
        self._stopped = True
        if self._warming is not None:
            self._warming.cancel()
        for run in list(self._runs.values()):
            run.cancel()
        self._slots.release()  # wakes the feeder, which then stops

    def _feed(self) -> None:
        start_one = self._run_async if self._body.is_async else self._run_in_thread
        try:
            self._warm()
            for index in range(len(self._items)):
                self._slots.acquire()
                if self._stopped:
                    return
                try:
                    self._context.copy().run(start_one, index)
                except BaseException as error:  # such as "can't start new thread"
                    self._end(index, error, lambda: None)
        finally:
            self._workers.close()

    def _warm(self) -> None:
        """Plan the orders of segments, and send what all prompts begin with.

        This only saves time, so errors are ignored: the runs themselves will report them.
        """
        if len(self._items) < 2 or not global_config.enable_precache_with_tracing:
            return
        with contextlib.suppress(Exception):
            self._planned_orders = self._plan_orders(self._items)
        with contextlib.suppress(Exception):
            prefix = self._shared_prefix(self._items)
            if prefix.is_worth_a_hint:
                self._warming = background_loop().start(self._backend.warm(prefix.prompt()))
                try:
                    self._warming.result(self._timeout_s)
                    self._seen_chars = len(prefix.text)
                finally:
                    self._warming.cancel()

    # --- one item ------------------------------------------------------------------------------

    def _new_state(self, index: int) -> ProgramState:
        state = self._body.new_state(
            self._backend,
            self._defaults,
            seen_chars=self._seen_chars,
            planned_orders=self._planned_orders,
        )
        run = self._runs[index] = state._stream.run
        if self._stopped:
            run.cancel()
        return state

    def _run_in_thread(self, index: int) -> None:
        def call() -> None:
            state = self._new_state(index)
            stop_timer = state._stream.run.cancel_after(self._timeout_s)
            try:
                self._body.call(state, **self._items[index])
            except BaseException as error:
                self._end(index, error, stop_timer)
            else:
                self._finish(index, state, stop_timer)

        context = contextvars.copy_context()
        self._workers.submit(lambda: context.run(call))

    def _run_async(self, index: int) -> None:
        state = self._new_state(index)
        stop_timer = state._stream.run.cancel_after(self._timeout_s)

        def called(done: Future[None]) -> None:
            error = error_of(done)
            if error is not None:
                self._end(index, error, stop_timer)
            else:
                self._finish(index, state, stop_timer)

        call = self._body.call_async(state, **self._items[index])
        background_loop().start(call).add_done_callback(called)

    def _finish(self, index: int, state: ProgramState, stop_timer: Callable[[], None]) -> None:
        """The function has returned: end when its operations have run."""
        checked = state._stream.run.check()
        checked.add_done_callback(
            lambda done: self._end(index, error_of(done) or state, stop_timer)
        )

    def _end(
        self, index: int, result: ProgramState | BaseException, stop_timer: Callable[[], None]
    ) -> None:
        stop_timer()
        run = self._runs.pop(index, None)
        future = self._results.pop(index)
        self._slots.release()
        if isinstance(result, BaseException):
            if run is not None:
                run.cancel()
            future.set_exception(result)
        else:
            future.set_result(result)


class _Workers:
    """Threads that call functions: one, and twice as many whenever all are busy for a moment."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._changed = threading.Condition()
        self._tasks: deque[Callable[[], None]] = deque()
        self._threads = 0
        self._closed = False

    def submit(self, task: Callable[[], None]) -> None:
        with self._changed:
            self._tasks.append(task)
            self._changed.notify()
            if self._threads and self._changed.wait_for(lambda: not self._tasks, _GROW_AFTER_S):
                return
            more = min(max(1, self._threads), self._limit - self._threads)
            self._threads += more
        for _ in range(more):
            threading.Thread(target=self._work, name="sgl-vllm-body", daemon=True).start()

    def close(self) -> None:
        """Accept no more tasks; the threads end after the last one."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._tasks or self._closed)
                if not self._tasks:
                    return
                task = self._tasks.popleft()
                self._changed.notify_all()
            task()


def _progress_bar(results: Sequence[Future[ProgramState]]) -> Any:  # tqdm has no types
    from tqdm.auto import tqdm  # type: ignore[import-untyped]

    bar = tqdm(total=len(results))
    for result in results:
        result.add_done_callback(lambda _: bar.update())
    return bar
