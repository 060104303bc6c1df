"""One event loop in one background thread, on which all programs' operations run.

Owns the thread, how work is handed to it, and the futures that carry results between threads and
loops. Knows nothing of programs. The loop is created on first use, and again in a forked child
process, which does not have the parent's thread.
"""

from __future__ import annotations

import asyncio
import atexit
import contextvars
import functools
import inspect
import os
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Any, TypeVar  # Any: what a coroutine sends, what tools take and return

T = TypeVar("T")

MAX_THREADS = 512
"""How many plain tools, and how many plain functions under `run_async`, can run at a time; the
others wait. Those of programs that a function or a tool runs do not count."""

_holds_thread: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "sgl_vllm_holds_thread", default=False
)
"""Whether a thread may be taken until the code that runs here returns: inside of a function that
has one, and of a tool, for which the function that called it may wait."""


class BackgroundLoop:
    """An event loop running in a daemon thread of its own."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._tool_threads = ThreadPoolExecutor(MAX_THREADS, "sgl-vllm-tool")
        self._body_threads = ThreadPoolExecutor(MAX_THREADS, "sgl-vllm-function")
        self._callbacks: deque[Callable[[], object]] = deque()
        self._is_woken = False
        self._thread = threading.Thread(target=self._serve, name="sgl-vllm-loop", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    def start(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run `coroutine` on the loop; does not wait.

        SystemExit and KeyboardInterrupt become a RuntimeError. Otherwise they would end the loop
        and everything that runs on it.
        """
        return asyncio.run_coroutine_threadsafe(_contained(coroutine), self.loop)

    def soon(self, callback: Callable[[], object]) -> None:
        """Call `callback` on the loop; does not wait.

        Callbacks that arrive before the loop wakes share one wake-up, because each costs a system
        call and often a wait for the GIL.
        """
        self._callbacks.append(callback)
        if not self._is_woken:
            self._is_woken = True
            self.loop.call_soon_threadsafe(self._schedule_callbacks)

    def _schedule_callbacks(self) -> None:
        self._is_woken = False  # first, so that a callback added from now on wakes the loop again
        while self._callbacks:
            self.loop.call_soon(self._callbacks.popleft())

    async def call_tool(
        self, function: Callable[..., Any], /, *args: object, **kwargs: object
    ) -> Any:
        """On the loop: call a tool, a plain function in a thread, and await what it returns."""
        call = functools.partial(function, *args, **kwargs)
        pool = None if _holds_thread.get() else self._tool_threads
        token = _holds_thread.set(True)
        try:
            is_async = inspect.iscoroutinefunction(function)
            value = call() if is_async else await self._in_thread(pool, call)
            # Also of an object whose __call__ is a coroutine function.
            return await value if inspect.isawaitable(value) else value
        finally:
            _holds_thread.reset(token)

    async def in_body_thread(
        self, function: Callable[[], T], pool: ThreadPoolExecutor | None = None
    ) -> T:
        """On the loop: call a program's function in a thread, with the contextvars of the caller.
        The pool is separate from the tools', so that functions waiting for their tools cannot take
        all the threads tools need. A batch has a `pool` of its own."""
        if pool is None and not _holds_thread.get():
            pool = self._body_threads
        return await self._in_thread(pool, function)

    async def _in_thread(self, pool: ThreadPoolExecutor | None, function: Callable[[], T]) -> T:
        """Call a function in a thread, with the contextvars of the caller.

        Without a pool, it gets a thread of its own: its caller holds one of the pool and waits, so
        functions that waited for another one of these could wait for each other forever.
        """
        context = contextvars.copy_context()
        context.run(_holds_thread.set, True)

        def call() -> T:
            return context.run(_call_contained, function)

        if pool is not None:
            return await self.loop.run_in_executor(pool, call)
        result: Future[T] = new_future()

        def resolve() -> None:
            try:
                result.set_result(call())
            except BaseException as error:
                result.set_exception(error)

        threading.Thread(target=resolve, name="sgl-vllm-nested").start()
        return await result_of(result)

    def wait_for(self, future: Future[T]) -> T:
        """Block until `future` is done and return its result or raise its exception.

        RuntimeError on the loop's own thread, which would deadlock.
        """
        if not future.done():
            self.refuse_to_wait()
        return future.result()

    def run_blocking(self, function: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run the coroutine that `function` makes on the loop, and block until it is done.

        RuntimeError on the loop's own thread, before anything is started.
        """
        self.refuse_to_wait()
        return self.wait_for(self.start(function()))

    def refuse_to_wait(self) -> None:
        """RuntimeError on the loop's own thread."""
        if threading.current_thread() is self._thread:
            raise RuntimeError(
                "this would block the language's own event loop, on which async def programs and "
                "tools run: use its async variant, or await asyncio.to_thread(...)"
            )

    def stop(self, timeout_s: float = 1.0) -> None:
        """Cancel everything still running and end the thread."""
        self.start(self._cancel_all())
        self._thread.join(timeout_s)

    async def _cancel_all(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.loop.stop()


async def _contained(coroutine: Coroutine[Any, Any, T]) -> T:
    try:
        return await coroutine
    except (SystemExit, KeyboardInterrupt) as error:
        raise _ended_by(error) from error


def _call_contained(function: Callable[[], T]) -> T:
    """Call `function`. A future cannot hold a StopIteration, so that becomes a RuntimeError too."""
    try:
        return function()
    except (StopIteration, SystemExit, KeyboardInterrupt) as error:
        raise _ended_by(error) from error


def _ended_by(error: BaseException) -> RuntimeError:
    return RuntimeError(f"{type(error).__name__} was raised: {error or 'without a message'}")


# --- futures -------------------------------------------------------------------------------------


def new_future() -> Future[T]:
    """A future that the code waiting for it cannot cancel."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()
    return future


async def result_of(future: Future[T]) -> T:
    """Wait, on any event loop, for a future that another thread resolves."""
    return future.result() if future.done() else await asyncio.wrap_future(future)


def error_of(future: Future[Any]) -> BaseException | None:
    """Why a done future has no result, its cancellation included; None if it has one."""
    try:
        return future.exception()
    except CancelledError as error:
        return error


# --- the process's loop --------------------------------------------------------------------------

_lock = threading.Lock()
_background: BackgroundLoop | None = None


def background_loop() -> BackgroundLoop:
    """The process's background loop."""
    global _background
    with _lock:
        if _background is None:
            _background = BackgroundLoop()
        return _background


def _reset_after_fork() -> None:
    global _background, _lock
    _lock = threading.Lock()
    _background = None


def _stop_at_exit() -> None:
    if _background is not None:
        _background.stop()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_after_fork)
atexit.register(_stop_at_exit)
