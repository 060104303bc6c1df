"""Posts made at the same moment are one request, against a scripted server over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import openai
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_vllm.lang.backends.batching import MAX_POSTS, Batcher, UnansweredError, lines_of
from tests.unit.lang.http_server import HttpServer

TIMEOUT_S = 20
Body = dict[str, Any]


class Script:
    """What the server answers, and its records.

    A body says how it is answered: after `wait_s`, with `status` and `text`. The connection of a
    batch breaks after `break_after` lines. `garbage` is sent as the first line. `refuse` is the
    status of the route itself. The answer of a batch begins once `opens` is set.
    """

    def __init__(self) -> None:
        self.batches: list[list[Body]] = []
        self.alone: list[Body] = []
        self.aborted: list[str] = []
        self.closed_early = 0
        self.ports: list[int] = []
        self.break_after: int | None = None
        self.garbage: bytes = b""
        self.refuse: int | None = None
        self.opens = asyncio.Event()
        self.opens.set()
        self.hears_aborts = True
        self._running: dict[str, asyncio.Task[Any]] = {}

    async def answer(self, body: Body) -> tuple[int, Body]:
        await asyncio.sleep(body.get("wait_s", 0))
        return body.get("status", 200), {"text": body.get("text", ""), "of": body.get("name")}

    async def lines(self, requests: list[Body]) -> AsyncIterator[bytes]:
        tasks = {asyncio.create_task(self.answer(one["body"])): i for i, one in enumerate(requests)}
        self._running |= {one["id"]: task for one, task in zip(requests, tasks, strict=True)}
        num_sent = 0
        finished = False
        try:
            if self.garbage:
                yield self.garbage
            waiting = set(tasks)
            while waiting:
                if num_sent == self.break_after:
                    finished = True
                    raise ConnectionError("as scripted")
                done, waiting = await asyncio.wait(waiting, return_when="FIRST_COMPLETED")
                for task in done:
                    status, body = (499, {}) if task.cancelled() else task.result()
                    line = {"index": tasks[task], "status": status, "body": body}
                    yield json.dumps(line, ensure_ascii=False).encode() + b"\n"
                    num_sent += 1
            finished = True
        finally:
            self.closed_early += not finished
            for task in tasks:
                task.cancel()

    def app(self) -> FastAPI:
        app = FastAPI()

        @app.post("/v1/sgl/batch")
        async def batch(body: Body, request: Request) -> Any:
            assert request.client is not None
            self.ports.append(request.client.port)
            self.batches.append(body["requests"])
            if self.refuse is not None:
                return JSONResponse({"error": {"message": "no"}}, self.refuse)
            await self.opens.wait()
            return StreamingResponse(self.lines(body["requests"]))

        @app.post("/v1/sgl/batch/abort")
        async def abort(body: Body) -> Any:
            self.aborted += body["ids"]
            if self.hears_aborts:
                for request_id in body["ids"]:
                    self._running[request_id].cancel()
            return {"aborted": len(body["ids"])}

        @app.post("/v1/{path:path}")
        async def one(path: str, request: Request) -> Any:
            body = await request.json()
            self.alone.append(body)
            status, answer = await self.answer({**body, "status": body.get("alone", 200)})
            return JSONResponse(answer, status)

        return app


class Bench:
    """A scripted server and a batcher that uses it, on the loop of the test."""

    def __init__(self, script: Script, client: openai.AsyncOpenAI, retry: bool) -> None:
        self.script = script
        self.client = client
        self.batcher = Batcher(client, self.post_one, timeout_s=TIMEOUT_S, retry=retry)

    async def post_one(self, body: Body) -> Body:
        return await self.client.post("/completions", cast_to=Body, body=body)

    async def post(self, name: Any, **body: Any) -> tuple[int, Body]:
        return await self.batcher.post({"name": name, **body})

    def start(self, name: Any, **body: Any) -> asyncio.Task[tuple[int, Body]]:
        return asyncio.create_task(self.post(name, **body))

    @property
    def sizes(self) -> list[int]:
        return [len(batch) for batch in self.script.batches]


def on_bench(
    *, retry: bool = True
) -> Callable[[Callable[..., Awaitable[None]]], Callable[..., None]]:
    """Runs a test on a bench of its own. No task of the batcher may be left afterwards."""

    async def main(test: Callable[..., Awaitable[None]], given: dict[str, Any]) -> None:
        script = Script()
        with socket.create_server(("127.0.0.1", 0)) as listening:
            server = HttpServer(script.app())
            serving = asyncio.create_task(server.serve(sockets=[listening]))
            url = f"http://127.0.0.1:{listening.getsockname()[1]}/v1"
            async with openai.AsyncOpenAI(
                base_url=url, api_key="none", max_retries=0, timeout=TIMEOUT_S
            ) as client:
                bench = Bench(script, client, retry)
                async with asyncio.timeout(TIMEOUT_S):
                    await test(bench, **given)
                    await until(lambda: not bench.batcher._tasks)
            server.end()
            await serving

    def decorated(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
        def run(**given: Any) -> None:
            asyncio.run(main(test, given))

        _, *others = inspect.signature(test).parameters.values()
        vars(run)["__signature__"] = inspect.Signature(others)
        return run

    return decorated


async def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5
    while not holds():
        assert time.monotonic() < deadline, "the condition was never met"
        await asyncio.sleep(0.005)


# -- which posts share a request


@on_bench()
async def test_posts_of_the_same_moment_are_one_request(bench: Bench):
    async def late(i: int) -> tuple[int, Body]:
        await asyncio.sleep(0)  # one turn of the loop
        return await bench.post(i, text=f"t{i}")

    answers = await asyncio.gather(*(bench.post(i, text=f"t{i}") for i in range(19)), late(19))
    assert answers == [(200, {"text": f"t{i}", "of": i}) for i in range(20)]
    assert bench.sizes == [20]
    assert bench.script.alone == []
    (batch,) = bench.script.batches
    assert {request["path"] for request in batch} == {"completions"}
    assert len({request["id"] for request in batch}) == 20


@on_bench()
async def test_a_post_without_company_goes_the_ordinary_way(bench: Bench):
    assert await bench.post("one", text="a") == (200, {"text": "a", "of": "one"})
    assert await bench.post("two", text="b") == (200, {"text": "b", "of": "two"})
    assert bench.sizes == []
    assert len(bench.script.alone) == 2
    with pytest.raises(openai.BadRequestError):
        await bench.post("three", alone=400)


@on_bench()
async def test_more_posts_than_a_batch_takes_make_several(bench: Bench):
    num_posts = 2 * MAX_POSTS + 3
    answers = await asyncio.gather(*(bench.post(i) for i in range(num_posts)))
    assert [body["of"] for _, body in answers] == list(range(num_posts))
    assert bench.sizes == [MAX_POSTS, MAX_POSTS, 3]
    await until(lambda: not bench.batcher._tasks)
    await asyncio.gather(bench.post(1), bench.post(2))
    assert bench.script.ports[-1] in bench.script.ports[:-1]  # the connection is used again


# -- which line belongs to which post


@given(st.lists(st.binary(max_size=8).map(lambda line: line.replace(b"\n", b"")), max_size=8))
def test_lines_are_whole_however_they_are_cut(lines):
    sent = b"".join(line + b"\n" for line in lines)

    class Cut:
        def __init__(self, size: int) -> None:
            self.size = size

        async def aiter_bytes(self) -> AsyncIterator[bytes]:
            for start in range(0, len(sent), self.size):
                yield sent[start : start + self.size]

    async def read(*sizes: int) -> list[list[bytes]]:
        return [[line async for line in lines_of(Cut(size))] for size in sizes]

    assert asyncio.run(read(1, 2, 3, 5, len(sent) + 1)) == [lines] * 5


# -- what is tried again


@pytest.mark.parametrize("status", [408, 409, 429, 500, 503])
@on_bench()
async def test_what_the_client_would_try_again_is_posted_again_alone(bench: Bench, status):
    failing = bench.post(2, status=status, text="at last")
    answers = await asyncio.gather(bench.post(1), failing, bench.post(3, status=400))
    assert answers[1] == (200, {"text": "at last", "of": 2})
    assert [status for status, _ in answers] == [200, 200, 400]
    assert [body["name"] for body in bench.script.alone] == [2]


GARBAGE = [b"<html>\n", b"{}\n", b"[]\n", b"\n", b'{"index": 0, "status": 200, "body": 1}\n']


@pytest.mark.parametrize("garbage", [None, *GARBAGE])
@on_bench()
async def test_after_garbage_or_a_broken_connection_posts_without_an_answer_go_alone(
    bench: Bench, garbage
):
    bench.script.break_after = 1
    bench.script.garbage = garbage or b""
    answers = await asyncio.gather(bench.post(1), bench.post(2, wait_s=0.2))
    assert [body["of"] for _, body in answers] == [1, 2]
    assert [body["name"] for body in bench.script.alone] == ([1, 2] if garbage else [2])


@on_bench(retry=False)
async def test_without_retries_a_broken_connection_is_an_error(bench: Bench):
    bench.script.break_after = 1
    posts = (bench.post(1, status=429), bench.post(2, wait_s=0.2), bench.post(3, wait_s=0.2))
    answered, *lost = await asyncio.gather(*posts, return_exceptions=True)
    assert answered == (429, {"text": "", "of": 1})
    for error in lost:
        assert isinstance(error, UnansweredError)
        assert error.__cause__ is not None
    assert bench.script.alone == []


@pytest.mark.parametrize("status", [403, 404, 405, 400, 413, 422])
@on_bench()
async def test_a_refused_batch_goes_piece_by_piece_and_a_missing_route_is_asked_once(
    bench: Bench, status
):
    bench.script.refuse = 401
    errors = await asyncio.gather(bench.post(1), bench.post(2), return_exceptions=True)
    assert [type(error) for error in errors] == [openai.AuthenticationError] * 2
    bench.script.refuse = status
    answers = await asyncio.gather(bench.post(1), bench.post(2))
    assert [body["of"] for _, body in answers] == [1, 2]
    bench.script.refuse = None
    await asyncio.gather(bench.post(1), bench.post(2))
    has_route = status in (400, 413, 422)
    assert bench.sizes == [2] * (3 if has_route else 2)
    assert len(bench.script.alone) == (2 if has_route else 4)


# -- what is cancelled


@on_bench()
async def test_a_cancelled_post_is_stopped_and_its_neighbours_go_on(bench: Bench):
    posts = [bench.start(i, wait_s=0.3 if i < 2 else TIMEOUT_S) for i in range(5)]
    unsent = bench.start(5)
    await asyncio.sleep(0)
    unsent.cancel()
    await until(lambda: bench.sizes == [5])
    await asyncio.sleep(0.1)
    for post in posts[2:]:
        post.cancel()
    answers = await asyncio.gather(*posts[:2])
    assert [body["of"] for _, body in answers] == [0, 1]
    assert all(post.cancelled() for post in posts[2:])
    stopped = {request["id"] for request in bench.script.batches[0][2:]}
    assert set(bench.script.aborted) == stopped
    await until(lambda: not bench.batcher._tasks)
    assert bench.script.closed_early == 0


@on_bench()
async def test_when_all_are_cancelled_the_connection_is_closed(bench: Bench):
    posts = [bench.start(i, wait_s=TIMEOUT_S) for i in range(4)]
    await until(lambda: bench.sizes == [4])
    await asyncio.sleep(0.05)
    for post in posts:
        post.cancel()
    await until(lambda: bench.script.closed_early == 1)
    assert bench.script.aborted == []


@on_bench()
async def test_an_abort_that_is_not_delivered_ends_with_the_last_answer(bench: Bench):
    bench.script.hears_aborts = False
    short, long = bench.start("short", wait_s=0.2), bench.start("long", wait_s=TIMEOUT_S)
    await until(lambda: bench.sizes == [2])
    await asyncio.sleep(0.05)
    long.cancel()
    assert (await short)[1]["of"] == "short"
    await until(lambda: bench.script.closed_early == 1)
    assert len(bench.script.aborted) == 1


@on_bench()
async def test_a_post_cancelled_before_the_answer_begins_is_stopped_then(bench: Bench):
    bench.script.opens.clear()
    short, long = bench.start("short"), bench.start("long", wait_s=TIMEOUT_S)
    third = bench.start("third", wait_s=0.2)
    await until(lambda: bench.sizes == [3])
    long.cancel()
    await asyncio.sleep(0.05)
    assert bench.script.aborted == []
    bench.script.opens.set()
    await asyncio.gather(short, third)
    assert len(bench.script.aborted) == 1


# -- whatever happens


class Chaos:
    """A batch in memory whose lines arrive, break off or are garbage, as drawn."""

    def __init__(self, requests: list[Body], lines: list[tuple[int, int]], end: str) -> None:
        self.lines = [(i % len(requests), status) for i, status in lines]
        self.end = end
        self.closed = False

    async def aiter_bytes(self) -> AsyncIterator[bytes]:
        for index, status in self.lines:
            await asyncio.sleep(0)
            line = {"index": index, "status": status, "body": {}}
            yield json.dumps(line).encode() + b"\n"
        if self.end == "broken":
            raise OSError("as drawn")
        if self.end == "garbage":
            yield b"?\n"
        if self.end == "stalls":
            await asyncio.sleep(TIMEOUT_S)

    async def aclose(self) -> None:
        self.closed = True


STATUSES = st.sampled_from([200, 400, 404, 429, 499, 500])
BATCHES = st.tuples(
    st.sampled_from(["ends", "broken", "garbage", "stalls", "refused", "no route", "fails"]),
    st.lists(st.tuples(st.integers(0, 7), STATUSES), max_size=8),
)


@settings(max_examples=60, deadline=None)
@given(
    batches=st.lists(BATCHES, min_size=1, max_size=3),
    posts=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 12)), min_size=1, max_size=8),
    retry=st.booleans(),
)
def test_every_post_ends_and_nothing_is_left(batches, posts, retry):
    """Posts are made and cancelled at drawn turns of the loop, and batches behave as drawn."""
    opened: list[Chaos] = []
    script = iter(batches)

    class Drawn(Batcher):
        async def open(self, body: Body) -> Any:
            await asyncio.sleep(0)
            end, lines = next(script, ("ends", []))
            if end in ("refused", "no route"):
                self._has_route &= end == "refused"
                return None
            if end == "fails":
                raise LookupError("as drawn")
            opened.append(Chaos(body["requests"], lines, end))
            return opened[-1]

        async def abort(self, ids: list[str]) -> None:
            """Aborts are best effort."""

    async def post_one(body: Body) -> Body:
        await asyncio.sleep(0)
        return {"alone": True}

    async def one(batcher: Batcher, start: int, patience: int) -> Any:
        for _ in range(start):
            await asyncio.sleep(0)
        posting = asyncio.create_task(batcher.post({}))
        for _ in range(patience):
            await asyncio.sleep(0)
        if patience < 10:
            posting.cancel()
        else:  # a post that does not stall has had its time
            asyncio.get_running_loop().call_later(0.02, posting.cancel)
        with contextlib.suppress(asyncio.CancelledError):
            return await posting
        return "cancelled"

    async def main() -> None:
        client: Any = None
        batcher = Drawn(client, post_one, timeout_s=TIMEOUT_S, retry=retry)
        async with asyncio.timeout(5):
            ends = await asyncio.gather(
                *(one(batcher, *post) for post in posts), return_exceptions=True
            )
            await until(lambda: not batcher._tasks)
        for end in ends:
            if isinstance(end, BaseException):
                assert isinstance(end, LookupError | UnansweredError)
                assert not (retry and isinstance(end, UnansweredError))
            elif end != "cancelled":
                status, _ = end
                assert not retry or status in (200, 400, 404, 499)
        assert all(batch.closed for batch in opened)
        assert not batcher._gathered

    asyncio.run(main())
