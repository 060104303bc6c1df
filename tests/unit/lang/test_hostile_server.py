"""Servers that die, stall, answer nonsense or are busy: every program ends, and leaks nothing."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fastapi.responses import JSONResponse, StreamingResponse

import sgl_vllm as sgl
from sgl_vllm.lang.loop import background_loop
from tests.unit.lang.conftest import LONG
from tests.unit.lang.scripted import appending

pytestmark = pytest.mark.timeout(30)


# --- programs of every kind ---------------------------------------------------------------------


plain = appending("x" + sgl.gen("a") + "bad" + sgl.gen("b", max_tokens=9))


one_gen = appending("x" + sgl.gen("a"))


@sgl.function
def fork(s):
    s += LONG
    forks = s.fork(3)
    forks += lambda i: f"{i}bad" + sgl.gen("b", max_tokens=9)
    forks.join()
    s += str(s["b"])


chat = appending(sgl.user("bad") + sgl.assistant(sgl.gen("b")))


select = appending("x" + sgl.gen("a") + "bad" + sgl.select("b", ["yes", "no"]))


@sgl.function
async def native(s):
    s += "x" + sgl.gen("a") + "bad" + sgl.gen("b")
    return await s["b"]


ahead = sgl.function(plain.func, num_api_spec_tokens=4)


def streamed(backend):
    state = plain.run(backend=backend, stream=True)
    list(state.text_iter())
    return state


def batch(backend):
    errors = native.run_batch([{}] * 5, backend=backend, return_errors=True)
    failed = [error for error in errors if isinstance(error, BaseException)]
    if failed:
        assert len(failed) == 5
        raise failed[0]
    return errors[0]


PROGRAMS: dict[str, Callable] = {
    "plain": lambda backend: plain.run(backend=backend),
    "fork": lambda backend: fork.run(backend=backend),
    "chat": lambda backend: chat.run(backend=backend),
    "select": lambda backend: select.run(backend=backend),
    "async": lambda backend: asyncio.run(native.run_async(backend=backend)),
    "batch": batch,
    "streamed": streamed,
    "speculated": lambda backend: ahead.run(backend=backend),
}

every_program = pytest.mark.parametrize("run", PROGRAMS.values(), ids=PROGRAMS)


# --- nothing may be left ------------------------------------------------------------------------


def sockets() -> int:
    links = []
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            links.append(str(path.readlink()))
    return sum(link.startswith("socket:") for link in links)


def tasks() -> int:
    async def count():
        return len(asyncio.all_tasks()) - 1

    return background_loop().start(count()).result(timeout=5)


def body_threads() -> int:
    return sum(t.name.startswith("sgl-vllm-body") for t in threading.enumerate())


@contextlib.contextmanager
def nothing_left(*counters: Callable[[], int]) -> Iterator[None]:
    """No task on the loop, socket or thread is left afterwards, and the block did not take long."""
    counters = counters or (tasks, sockets, body_threads)

    def left() -> list[str]:
        return [count.__name__ for count in counters if count() > before[count]]

    before = {count: count() for count in counters}
    started = time.monotonic()
    yield
    assert time.monotonic() - started < 8
    ends = time.monotonic() + 4
    while left() and time.monotonic() < ends:
        gc.collect()
        time.sleep(0.02)
    assert not left(), before


@contextlib.contextmanager
def a_backend(url: str, **options) -> Iterator[sgl.VLLM]:
    backend = sgl.VLLM(url, **{"timeout_s": 1.5, "max_retries": 0, **options})
    try:
        yield backend
    finally:
        background_loop().start(backend.aclose()).result(timeout=5)


def is_bad(body) -> bool:
    """Whether a request belongs to the part of the program that should fail."""
    return "bad" in json.dumps(body) or (
        isinstance(body.get("prompt"), list) and isinstance(body["prompt"][0], list)
    )


def fails(run, url, message, **options) -> sgl.ProgramError:
    with (
        a_backend(url, **options) as backend,
        pytest.raises(sgl.ProgramError, match=message) as caught,
    ):
        run(backend)
    assert isinstance(caught.value.__cause__, sgl.BackendError)
    return caught.value


# --- the server of the other tests, misbehaving -------------------------------------------------


def body(data: bytes, media_type="application/json"):
    async def chunks():
        yield data

    return StreamingResponse(chunks(), media_type=media_type)


WRONG_TYPES = {
    "choices": [{"text": 7, "message": {"content": []}, "finish_reason": {}}],
    "usage": 3,
}
GARBAGE: dict[str, Callable] = {
    "html": lambda: body(b"<html>502 Bad Gateway</html>", "text/html"),
    "truncated": lambda: body(b'{"choices": [{"text": "ab'),
    "a number": lambda: body(b"7"),
    "no choices": lambda: JSONResponse({"choices": [], "usage": {}}),
    "wrong types": lambda: JSONResponse(WRONG_TYPES),
    "null": lambda: body(b"null"),
    "not utf-8": lambda: body(b"\xff\xfe{}"),
}

UNREADABLE = [
    *((name, "wrong types") for name in PROGRAMS if name != "plain"),
    *(("select", kind) for kind in ("no choices", "null")),
    *(("plain", kind) for kind in GARBAGE),
]


@pytest.mark.parametrize(("program", "kind"), UNREADABLE)
def test_an_unreadable_answer_is_reported_as_such(server, program, kind):
    run, answer = PROGRAMS[program], GARBAGE[kind]
    server.fault = lambda path, body: answer() if is_bad(body) else None
    with nothing_left():
        fails(run, server.url, "cannot be read|stopped in the middle|no answer")


@every_program
def test_a_server_that_stalls_is_left_in_time(server, run):
    async def stall(path, body):
        if is_bad(body):
            await asyncio.sleep(60)

    server.fault = stall
    with nothing_left():
        fails(run, server.url, r"did not answer within 0\.4 s: raise timeout_s", timeout_s=0.4)
    assert server.gone


@pytest.mark.parametrize(
    ("run", "status", "retry_after"),
    [
        *((run, 500, {"retry-after-ms": "1"}) for run in PROGRAMS.values()),
        (PROGRAMS["batch"], 429, {"retry-after-ms": "5"}),
        (PROGRAMS["plain"], 429, {"Retry-After": "50"}),  # longer than the time limit
    ],
)
def test_an_error_in_mid_run_is_passed_on_after_its_retries(server, run, status, retry_after):
    server.fault = lambda path, body: (
        JSONResponse({"error": {"message": "it died"}}, status, retry_after)
        if is_bad(body)
        else None
    )
    with nothing_left():
        says = f"answered {status}: it died|did not answer within"
        timeout_s = 1.5 if "Retry-After" in retry_after else 7
        error = fails(run, server.url, says, max_retries=1, timeout_s=timeout_s)
    assert isinstance(error.__cause__, sgl.BackendError)
    assert error.__cause__.status in (status, None if "Retry-After" in retry_after else status)


@every_program
def test_a_server_that_is_busy_for_a_moment_does_not_matter(server, run):
    refused = set()

    def busy(path, body):
        key = json.dumps(body, sort_keys=True)
        if path.endswith("completions") and key not in refused:
            refused.add(key)
            return JSONResponse({"error": {"message": "busy"}}, 429, {"Retry-After": "0.05"})
        return None

    server.fault = busy
    with nothing_left(), a_backend(server.url, timeout_s=10, max_retries=1) as backend:
        assert run(backend)["b"]
    assert refused


@every_program
def test_a_server_that_dies_in_mid_run_is_missed(running, server, run):
    def die(path, body):
        if is_bad(body):
            running.die()

    server.fault = die
    with (
        nothing_left(tasks, body_threads),  # the server's sockets end
        a_backend(server.url, timeout_s=6) as backend,
        pytest.raises(sgl.ProgramError, match=r"no answer from .*is the server running"),
    ):
        run(backend)


# --- servers that do not even speak HTTP --------------------------------------------------------


class RawServer:
    """Accepts connections and calls `behave(connection)` for each, in a thread of its own."""

    def __init__(self, behave: Callable[[socket.socket], object]) -> None:
        self._behave = behave
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._threads = [threading.Thread(target=self._serve, daemon=True)]
        self._threads[0].start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._socket.accept()
                thread = threading.Thread(target=self._one, args=(connection,), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _one(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection:
            connection.settimeout(5)
            connection.recv(65536)
            self._behave(connection)

    def stop(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        for thread in self._threads:
            thread.join(5)


def reset(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def never(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while connection.recv(65536):  # until the client disconnects
            pass


def says(*lines: str, then: Callable[[socket.socket], object] = lambda connection: None):
    def behave(connection: socket.socket) -> None:
        connection.sendall("\r\n".join(lines).encode())
        then(connection)

    return behave


@pytest.mark.parametrize(
    ("behave", "message"),
    [
        (reset, "no answer from"),
        (lambda connection: None, "no answer from"),
        (says("SSH-2.0-OpenSSH_9.6", ""), "no answer from"),
        (says("HTTP/1.1 200 OK", "Content-Length: 100", "", '{"data": '), "no answer|broke off"),
        (says("HTTP/1.1 200 OK", "Content-Length: 0", "", ""), "cannot be read"),
        (says("HTTP/1.1 200 OK", "Content-Type: application/json", "", "{" * 5000), "cannot be"),
        (says("HTTP/1.1 302 Found", "Location: /", "Content-Length: 0", "", ""), "gave|answer"),
        (never, "did not answer within 1 s"),
        (says("HTTP/1.1 200 OK", "Content-Length: 9", "", "", then=never), "did not answer within"),
    ],
)
def test_what_is_no_server_of_ours_is_named(behave, message):
    raw = RawServer(behave)
    try:
        with nothing_left():
            error = fails(PROGRAMS["plain"], raw.url, message, timeout_s=1, max_retries=0)
        assert raw.url in str(error)
    finally:
        raw.stop()


def test_a_stream_that_is_reset_in_the_middle_is_an_error_that_says_so(server):
    """After the headers, the official client raises its transport's own errors."""
    head = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
    data = 'data: {"choices": [{"text": "a", "finish_reason": null}]}\n\n'

    def half(connection):
        connection.sendall(f"{head}Content-Length: 9999\r\n\r\n{data}".encode())
        time.sleep(0.1)
        reset(connection)

    raw = RawServer(half)
    try:
        with nothing_left(), a_backend(raw.url, model="m") as backend:
            state = one_gen.run(stream=True, backend=backend)
            got: list[str] = []
            with pytest.raises(
                sgl.ProgramError, match=r"gen 'a' failed: .*(stopped in the middle|Error\))"
            ) as caught:
                got.extend(state.text_iter())
            assert isinstance(caught.value.__cause__, sgl.BackendError)
    finally:
        raw.stop()
