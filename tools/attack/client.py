"""Sends hostile requests, and says what became of each.

Owns how a request is sent and cut off, and which answers are failures of the server: none in
`MAX_ANSWER_S`, a status of 500 or more, or an error without a message. A 500 is a right answer only
to a format that others keep from being compiled.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import httpx

from tools.attack.figures import MAX_ANSWER_S, Answered
from tools.attack.hostile import Attack

LEFT, NO_ANSWER = 0, -1
FORMATS = "formats"


@dataclass(frozen=True)
class Sent:
    """A request, and when its client leaves; None if it stays for the answer."""

    attack: Attack
    leaves_after_s: float | None = None


class Attacker:
    """One attacking program. `answered` says what became of its requests, in order of their end."""

    def __init__(self, url: str) -> None:
        self.answered: list[Answered] = []
        self._url = url

    def run(
        self, phase: str, requests: Iterable[Sent], at_once: int, on_answer: Callable[[], None]
    ) -> None:
        """Send all of `requests`, `at_once` at a time, and wait for their answers. `on_answer` is
        called after each."""
        asyncio.run(self._run(phase, requests, at_once, on_answer))

    async def _run(
        self, phase: str, requests: Iterable[Sent], at_once: int, on_answer: Callable[[], None]
    ) -> None:
        waiting = iter(requests)

        async def worker(client: httpx.AsyncClient) -> None:
            for sent in waiting:  # shared by all workers
                self.answered.append(await _send(client, phase, sent))
                on_answer()

        # Shorter than the server's, which would close a connection while it is being used again.
        limits = httpx.Limits(max_connections=None, keepalive_expiry=2)
        async with (
            httpx.AsyncClient(base_url=self._url, timeout=MAX_ANSWER_S, limits=limits) as client,
            asyncio.TaskGroup() as group,
        ):
            for _ in range(at_once):
                group.create_task(worker(client))


async def _send(client: httpx.AsyncClient, phase: str, sent: Sent) -> Answered:
    attack, begun = sent.attack, time.monotonic()
    headers = {"Content-Type": "application/json", **attack.headers}
    status, error = LEFT, ""
    try:
        async with asyncio.timeout(sent.leaves_after_s or MAX_ANSWER_S):
            ask = partial(
                client.request, attack.method, attack.path, content=attack.body, headers=headers
            )
            try:
                answer = await ask()
            except httpx.ReadError:
                # vLLM answers some bodies with 500 and closes the connection, which the client has
                # already used again. So does any server for a connection that was idle.
                answer = await ask()
        status = answer.status_code
        error = problem(phase, answer)
    except TimeoutError:
        if sent.leaves_after_s is None:
            status, error = NO_ANSWER, "no answer in time"
    except httpx.HTTPError as failure:
        status, error = NO_ANSWER, f"{type(failure).__name__}: {failure}"
    return Answered(phase, attack.kind, status, time.monotonic() - begun, error)


def problem(phase: str, answer: httpx.Response) -> str:
    """Why `answer` is a failure of the server; "" if it is not."""
    if answer.status_code < 400:
        return ""
    try:
        body = answer.json()
        message = body["error"]["message"] if "error" in body else body["detail"]
    except (ValueError, KeyError, TypeError):
        return f"{answer.status_code} without a message: {answer.text[:200]}"
    if answer.status_code >= 500 and phase != FORMATS:
        return f"{answer.status_code}: {message[:200]}"
    return ""


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
