"""Sends requests, many at a time, and says what became of each."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable, Iterable

import httpx

from tools.attack.hostile import Attack

LEFT, NO_ANSWER = 0, -1
"""In place of a status: the client left, or there was no answer."""

MAX_ANSWER_S = 60.0
"""Of hostile formats, four are under way, and a server compiles them one after another."""

OnAnswer = Callable[[Attack, int, str, float], None]
"""Gets a request, its status, the text of the answer or why there is none, and the seconds."""


def send_all(url: str, requests: Iterable[Attack], at_once: int, on_answer: OnAnswer) -> None:
    """Send all of `requests`, `at_once` at a time, and wait for their answers."""
    waiting = iter(requests)

    async def worker(client: httpx.AsyncClient) -> None:
        for one in waiting:  # shared by all workers
            begun = time.monotonic()
            status, text = await _send(client, one)
            on_answer(one, status, text, time.monotonic() - begun)

    async def run() -> None:
        # Shorter than the server's, which would close a connection while it is being used again.
        limits = httpx.Limits(max_connections=None, keepalive_expiry=2)
        async with (
            httpx.AsyncClient(base_url=url, timeout=MAX_ANSWER_S, limits=limits) as client,
            asyncio.TaskGroup() as group,
        ):
            for _ in range(at_once):
                group.create_task(worker(client))

    asyncio.run(run())


async def _send(client: httpx.AsyncClient, one: Attack) -> tuple[int, str]:
    headers = {"Content-Type": "application/json", **one.headers}

    async def ask() -> httpx.Response:
        return await client.request(one.method, one.path, content=one.body, headers=headers)

    try:
        async with asyncio.timeout(one.leaves_after_s or MAX_ANSWER_S):
            try:
                answer = await ask()
            except (httpx.ReadError, httpx.RemoteProtocolError):
                # vLLM answers some bodies with 500 and closes the connection, which the client has
                # already used again. So does any server for a connection that was idle.
                answer = await ask()
        return answer.status_code, answer.text
    except TimeoutError:
        return (NO_ANSWER, "no answer in time") if one.leaves_after_s is None else (LEFT, "")
    except httpx.HTTPError as failure:
        return NO_ANSWER, f"{type(failure).__name__}: {failure}"


def problem(status: int, text: str, *, may_fail: bool) -> str:
    """Why an answer is a failure of the server: none, a status of 500 or more unless it may fail,
    or an error without a message. "" if it is not."""
    if status == NO_ANSWER:
        return text
    if status < 400:
        return ""
    try:
        body = json.loads(text)
        message = body["error"]["message"] if "error" in body else body["detail"]
    except (ValueError, KeyError, TypeError):
        return f"{status} without a message: {text[:200]}"
    return f"{status}: {message[:200]}" if status >= 500 and not may_fail else ""


def cut_bodies(url: str, count: int, seed: int) -> None:
    """`count` requests whose client closes the connection in the middle of the body."""
    host, port = url.removeprefix("http://").split(":")
    rng = random.Random(seed)
    paths = ["sgl/pin", "sgl/unpin", "sgl/batch", "sgl/score", "completions"]

    async def cut(path: str) -> None:
        _, writer = await asyncio.open_connection(host, int(port))
        body = json.dumps({"model": "demo", "prompt": "x" * 1000}).encode()
        head = f"POST /v1/{path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode())
        writer.write(body[: rng.randrange(len(body))])
        await writer.drain()
        await asyncio.sleep(0.02)  # the route waits for the rest
        writer.close()

    async def cut_all() -> None:
        for number in range(count):
            await cut(paths[number % len(paths)])

    asyncio.run(cut_all())
