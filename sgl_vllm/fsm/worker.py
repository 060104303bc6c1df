"""A process that answers one question at a time, with limits on time and memory.

Owns both ends: the asker (`Worker`) and the process (`serve`). It exists for compilers in C++ or
Rust, which cannot be interrupted and allocate whatever they want: a hostile format then costs a
process that can be replaced, and not the engine. Knows nothing of the questions.

    question  length (u32), bytes
    answer    status (u8), length (u32), bytes     status 0 if all is well, else the module's own
"""

from __future__ import annotations

import atexit
import contextlib
import os
import resource
import select
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from weakref import WeakSet

from sgl_vllm.fsm.time_limit import PATIENCE, TimeLimit

START_TIMEOUT_S = 60.0
MARGIN_S = 10
"""The process ends itself this much later than its caller would, which may be gone by then."""


class WorkerFailedError(Exception):
    """The answer would have taken more time or memory than is allowed."""


class WorkerUnavailableError(Exception):
    """The process did not start, or others use it: the question may be harmless."""


class Worker:
    """A process that runs a module which calls `serve`.

    It starts with the first question, and again after each kill. It ends when this object or this
    process does.

    Args:
        module: the module's name.
        timeout_s: time for an answer, in seconds of the processor (`TimeLimit`).
        memory_bytes: address space, above what the process has when it is ready.
        opening: makes the first question to a new process, which prepares it for all others.
    """

    def __init__(
        self,
        module: str,
        *,
        timeout_s: float,
        memory_bytes: int,
        opening: Callable[[], bytes] | None = None,
    ) -> None:
        self.timeout_s = timeout_s
        self._memory_bytes = memory_bytes
        limits = [str(memory_bytes), str(int(PATIENCE * timeout_s) + MARGIN_S)]
        self._command = [sys.executable, "-m", module, *limits]
        self._opening = opening
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._has_been_ready = False
        _workers.add(self)

    def __del__(self) -> None:
        self.stop()

    def ask(self, question: bytes) -> tuple[int, bytes]:
        """The status and the answer.

        Raises:
            WorkerFailedError: the answer took too long or too much memory, so the process was
                killed. The next question starts a new one.
            WorkerUnavailableError: there was no process to ask.
        """
        patience_s = 2 * self.timeout_s if self._has_been_ready else START_TIMEOUT_S
        if not self._lock.acquire(timeout=patience_s):
            raise WorkerUnavailableError("has to wait for others, which take too long")
        try:
            if self._process is None or self._process.poll() is not None:
                self._start()
            try:
                return self._exchange(question)
            except (TimeoutError, OSError, EOFError):
                self.stop()
                raise WorkerFailedError(
                    f"takes more than {self.timeout_s:g} s or {self._memory_bytes >> 20} MiB"
                ) from None
        finally:
            self._lock.release()

    def stop(self) -> None:
        """Kill the process. The next question starts another."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            _close(process)

    def _start(self) -> None:
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )
        try:
            self._read(1, self._time_limit(START_TIMEOUT_S))
            self._has_been_ready = True
            if self._opening is not None:
                self._exchange(self._opening())
        except (TimeoutError, OSError, EOFError):
            self.stop()
            raise WorkerUnavailableError("has no process to run in: it does not start") from None

    def _exchange(self, question: bytes) -> tuple[int, bytes]:
        assert self._process is not None and self._process.stdin is not None
        time_limit = self._time_limit(self.timeout_s)
        self._process.stdin.write(struct.pack("<I", len(question)) + question)
        status, length = struct.unpack("<BI", self._read(5, time_limit))
        return status, self._read(length, time_limit)

    def _time_limit(self, limit_s: float) -> TimeLimit:
        assert self._process is not None
        return TimeLimit(limit_s, partial(_cpu_s, self._process.pid))

    def _read(self, length: int, time_limit: TimeLimit) -> bytes:
        assert self._process is not None and self._process.stdout is not None
        data = bytearray()
        while len(data) < length:
            left_s = time_limit.left_s()
            if not left_s:
                raise TimeoutError
            ready, _, _ = select.select([self._process.stdout], [], [], left_s)
            if not ready:
                continue
            piece = self._process.stdout.read(length - len(data))
            if not piece:
                raise EOFError
            data += piece
        return bytes(data)

    def _leave_to_parent(self) -> None:
        """In a forked child: the process belongs to the parent; a new one starts when needed."""
        process, self._process = self._process, None
        self._lock = threading.Lock()
        if process is not None:
            process.returncode = 0  # not ours to wait for
            _close(process)


def _cpu_s(pid: int) -> float:
    """Processor time of a process, in seconds; that of the clock where the system does not say."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return time.monotonic()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


_workers: WeakSet[Worker] = WeakSet()


@atexit.register
def _stop_all() -> None:
    for worker in list(_workers):
        worker.stop()


def _leave_all_to_parent() -> None:
    for worker in list(_workers):
        worker._leave_to_parent()


os.register_at_fork(after_in_child=_leave_all_to_parent)


def _close(process: subprocess.Popen[bytes]) -> None:
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()


def serve(answer: Callable[[bytes], tuple[int, bytes]]) -> None:
    """The process's side: answers questions until its input ends. Call it once everything that
    `answer` needs is imported; the memory limit counts from there."""
    memory_bytes, alarm_s = int(sys.argv[1]), int(sys.argv[2])
    limit = _address_space_bytes() + memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    sink.write(b"\n")
    sink.flush()
    while header := source.read(4):
        question = source.read(struct.unpack("<I", header)[0])
        signal.alarm(alarm_s)
        status, text = answer(question)
        signal.alarm(0)
        sink.write(struct.pack("<BI", status, len(text)) + text)
        sink.flush()


def _address_space_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()
