"""Limits on compilation: how long one may take, how many run at once, and how little they disturb.

Owns these limits for compilers inside this process: our own, which limit their work, and vLLM's,
which cannot be interrupted. Compilation in a process that can be killed is in `sandbox.py`.
"""

from __future__ import annotations

import ctypes
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TypeVar

from sgl_vllm.fsm.time_limit import PATIENCE, TimeLimit

COMPILE_TIMEOUT_S = 10.0
"""A format that takes longer to compile (`TimeLimit`) is refused. Its compilation goes on in its
thread, because vLLM's compilers cannot be interrupted: a grammar of 1 MB keeps xgrammar busy for
minutes."""

MAX_COMPILING = 4
"""Compilations at a time, including those that go on after their timeout."""

SWITCH_INTERVAL_S = 0.0005
"""How long a compilation keeps the interpreter from the engine's loop, which asks for it after each
of its calls into torch. Python's default is 5 ms."""

LARGE_S = 0.05
"""A compilation that took longer may have freed much memory, which the C library keeps."""

_compiling = threading.BoundedSemaphore(MAX_COMPILING)

Result = TypeVar("Result")


class NotCompiledError(Exception):
    """The format is not compiled, and no other backend is asked."""


class CompilationLimitError(NotCompiledError, ValueError):
    """The format needs too much time or memory, so it is refused."""


class CompilersBusyError(NotCompiledError):
    """Other formats keep the compilers busy. Says nothing about this one."""


@contextmanager
def one_of_few(title: str) -> Iterator[None]:
    """Around a compilation in this thread that limits its own work, as those of automata do. A
    thread of its own would take 0.3 ms, most of it for cold caches: as long as most formats.

    Raises:
        CompilersBusyError: as `within_limits`.
    """
    _wait_for_turn(title)
    with _turn():
        yield


@contextmanager
def _turn() -> Iterator[None]:
    """Around a compilation in this thread, after `_wait_for_turn` in any thread."""
    started_at = time.monotonic()
    try:
        with _frequent_switches():
            yield
    finally:
        _compiling.release()
        release_freed_memory(time.monotonic() - started_at)


def _wait_for_turn(title: str) -> None:
    if not _compiling.acquire(timeout=PATIENCE * COMPILE_TIMEOUT_S):
        raise CompilersBusyError(
            f"the {title} is not compiled: {MAX_COMPILING} others take too long"
        )


def within_limits(make: Callable[[], Result], title: str) -> Result:
    """What `make` returns, in a thread that is left behind if it takes too long.

    Args:
        title: what is compiled, for messages.

    Raises:
        CompilationLimitError: it takes more than `COMPILE_TIMEOUT_S`.
        CompilersBusyError: `MAX_COMPILING` others do.
    """
    _wait_for_turn(title)
    made: Future[Result] = Future()
    cpu = _Cpu()

    def work() -> None:
        cpu.begin()
        try:
            with _turn():
                result = make()
            made.set_result(result)
        except BaseException as error:
            made.set_exception(error)

    threading.Thread(target=work, name="sgl-vllm-compile", daemon=True).start()
    time_limit = TimeLimit(COMPILE_TIMEOUT_S, cpu.time_s)
    while left_s := time_limit.left_s():
        try:
            made.exception(left_s)
        except TimeoutError:
            continue
        return made.result()
    if made.done():  # just in time
        return made.result()
    raise CompilationLimitError(f"the {title} takes more than {COMPILE_TIMEOUT_S:g} s to compile")


class _Cpu:
    """The processor time of a thread, from its beginning on."""

    def __init__(self) -> None:
        self._clock: int | None = None

    def begin(self) -> None:
        """Called by the thread."""
        self._clock = time.pthread_getcpuclockid(threading.get_ident())

    def time_s(self) -> float:
        """Seconds so far. Any thread may ask; infinite once the thread has ended."""
        if self._clock is None:
            return 0.0
        try:
            return time.clock_gettime(self._clock)
        except OSError:
            return math.inf


def release_freed_memory(took_s: float) -> None:
    """After work in a thread that took so long: give what it has freed back to the system. Some
    milliseconds, outside the interpreter's lock; nothing for work that was short, or where the C
    library cannot."""
    if took_s > LARGE_S and _malloc_trim is not None:
        _malloc_trim(0)


_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None


_switch_lock = threading.Lock()
_num_switching = 0
_usual_interval_s = 0.0


@contextmanager
def _frequent_switches() -> Iterator[None]:
    """While this lasts in any thread, threads pass the interpreter on after `SWITCH_INTERVAL_S`."""
    global _num_switching, _usual_interval_s
    with _switch_lock:
        if not _num_switching:
            _usual_interval_s = sys.getswitchinterval()
            sys.setswitchinterval(min(SWITCH_INTERVAL_S, _usual_interval_s))
        _num_switching += 1
    try:
        yield
    finally:
        with _switch_lock:
            _num_switching -= 1
            if not _num_switching:
                sys.setswitchinterval(_usual_interval_s)
