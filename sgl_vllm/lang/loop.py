"""One event loop in one background thread, on which all programs' operations run.

Owns the thread and hand-over of work to it. Knows nothing of programs. The loop is made on first
use and again in a forked child process, where the parent's thread does not exist.
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import os
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")

MAX_TOOL_THREADS = 512
"""So many tools can run at a time. A tool may run programs that call tools and wait for them, so
that a small number could come to a standstill."""

MAX_BODY_THREADS = 512
"""So many plain functions under `run_async` can be in their bodies at a time; others wait."""


class BackgroundLoop:
    """An event loop running in a daemon thread of its own."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._threads = ThreadPoolExecutor(MAX_TOOL_THREADS, "sgl-vllm-tool")
        self._handed_over: deque[Callable[[], object]] = deque()
        self._is_woken = False
        self._body_threads = ThreadPoolExecutor(MAX_BODY_THREADS, "sgl-vllm-function")
        self._thread = threading.Thread(target=self._serve, name="sgl-vllm-loop", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    def start(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run `coroutine` on the loop; does not wait.

        SystemExit and KeyboardInterrupt come out as a RuntimeError: left alone they would end the
        loop, and all that runs on it.
        """
        return asyncio.run_coroutine_threadsafe(_contained(coroutine), self.loop)

    def soon(self, callback: Callable[[], object]) -> None:
        """Call `callback` on the loop; does not wait.

        The loop is woken once for all callbacks that come before it wakes: waking it costs a
        system call, and often a wait for the interpreter's lock.
        """
        self._handed_over.append(callback)
        if not self._is_woken:
            self._is_woken = True
            self.loop.call_soon_threadsafe(self._take_over)

    def _take_over(self) -> None:
        self._is_woken = False  # before looking, so that whoever comes after wakes it again
        while self._handed_over:
            self.loop.call_soon(self._handed_over.popleft())

    async def in_thread(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Call a tool that may block in a thread; on the loop."""
        call = functools.partial(_call_contained, function, *args, **kwargs)
        return await self.loop.run_in_executor(self._threads, call)

    async def in_body_thread(self, function: Callable[[], T]) -> T:
        """Call a program's function in a thread, on the loop. Those threads are not the tools',
        or functions that wait for their tools could leave none to run them."""
        call = functools.partial(_call_contained, function)
        return await self.loop.run_in_executor(self._body_threads, call)

    def wait_for(self, future: Future[T]) -> T:
        """Block until `future` is done and return its result or raise its exception.

        RuntimeError on the loop's own thread, which would wait for itself for ever.
        """
        if not future.done():
            self.refuse_to_wait()
        return future.result()

    def refuse_to_wait(self) -> None:
        """RuntimeError on the loop's own thread."""
        if threading.current_thread() is self._thread:
            raise RuntimeError("a program cannot be waited for on the language's own event loop")

    def stop(self, timeout_s: float = 1.0) -> None:
        """Cancel what still runs and end the thread."""
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


def _call_contained(function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Call `function`, whose StopIteration no future can hold."""
    try:
        return function(*args, **kwargs)
    except (StopIteration, SystemExit, KeyboardInterrupt) as error:
        raise _ended_by(error) from error


def _ended_by(error: BaseException) -> RuntimeError:
    return RuntimeError(f"{type(error).__name__} was raised: {error or 'without a message'}")


def error_of(future: Future[Any]) -> BaseException | None:
    """Why a future that is done has no result; its cancellation too."""
    try:
        return future.exception()
    except CancelledError as error:
        return error


_lock = threading.Lock()
_background: BackgroundLoop | None = None


def background_loop() -> BackgroundLoop:
    """The process's background loop."""
    global _background
    with _lock:
        if _background is None:
            _background = BackgroundLoop()
        return _background


def _forget_after_fork() -> None:
    global _background, _lock
    _lock = threading.Lock()
    _background = None


def _stop_at_exit() -> None:
    if _background is not None:
        _background.stop()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_after_fork)
atexit.register(_stop_at_exit)
