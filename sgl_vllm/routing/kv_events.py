"""Subscribes to engines' KV events, which vLLM publishes over ZMQ.

Owns the sockets, and that batches arrive in order and from the first one the engine remembers. What
events mean is `PrefixRouter.apply_events`. Costs the engine nothing: it publishes in any case.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import partial

import msgspec
from zmq import DEALER, SUB
from zmq.asyncio import Context

from sgl_vllm.routing.costs import Worker

REPLAY_TIMEOUT_S = 5.0
"""An engine answers at once. One that does not has ended, or has no replay socket."""

Apply = Callable[[Iterable[object], int], bool]
"""Takes a batch's events and its number. False if batches before it are missing."""


@dataclass(frozen=True, slots=True)
class KvEventSource:
    """Where an engine publishes its KV events.

    Attributes:
        endpoint: its PUB socket, such as tcp://10.0.0.1:5557.
        replay_endpoint: its ROUTER socket, which sends earlier batches again.
    """

    endpoint: str
    replay_endpoint: str


class KvEventFollowers:
    """Follows the KV events of several workers, with one task each.

    A worker whose task has failed is not followed again.

    Args:
        apply: takes a worker's batch, as `PrefixRouter.apply_events` does.
        on_failure: called with a worker whose events can no longer be followed, and why.
    """

    def __init__(
        self,
        apply: Callable[[Worker, Iterable[object], int], bool],
        on_failure: Callable[[Worker, BaseException | None], None],
    ) -> None:
        self._apply = apply
        self._on_failure = on_failure
        self._tasks: dict[Worker, asyncio.Task[None]] = {}

    def __contains__(self, worker: Worker) -> bool:
        task = self._tasks.get(worker)
        return task is not None and not task.done()

    def follow(self, worker: Worker, source: KvEventSource) -> None:
        """Starts to follow a worker, unless that was done before."""
        if worker not in self._tasks:
            task = asyncio.create_task(follow(source, partial(self._apply, worker)))
            self._tasks[worker] = task
            task.add_done_callback(partial(self._ended, worker))

    def keep(self, workers: Collection[Worker]) -> None:
        """Stops following all other workers."""
        for worker in [worker for worker in self._tasks if worker not in workers]:
            self._tasks.pop(worker).cancel()

    def _ended(self, worker: Worker, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and self._tasks.get(worker) is task:
            self._on_failure(worker, task.exception())


async def follow(source: KvEventSource, apply: Apply) -> None:
    """Applies every batch, from the first that the engine remembers, until it is canceled."""
    from vllm.distributed.kv_events import KVEventBatch

    decoder = msgspec.msgpack.Decoder(KVEventBatch)
    context = Context.instance()
    with context.socket(SUB) as live:
        live.set_hwm(0)  # unread batches wait here instead of being dropped
        live.subscribe(b"")
        live.connect(source.endpoint)
        is_complete = False
        while True:
            if not is_complete:
                for number, payload in await _replayed(context, source.replay_endpoint):
                    apply(decoder.decode(payload).events, number)
            _, number_bytes, payload = await live.recv_multipart()
            is_complete = apply(decoder.decode(payload).events, int.from_bytes(number_bytes, "big"))


async def _replayed(context: Context, endpoint: str) -> list[tuple[int, bytes]]:
    """The earlier batches with their numbers, oldest first. Empty if there is no answer in time."""
    batches: list[tuple[int, bytes]] = []
    with context.socket(DEALER) as socket:
        socket.linger = 0
        socket.connect(endpoint)
        await socket.send_multipart((b"", (0).to_bytes(8, "big")))
        try:
            async with asyncio.timeout(REPLAY_TIMEOUT_S):
                while True:
                    _, _, number, payload = await socket.recv_multipart()
                    if not payload:
                        break
                    batches.append((int.from_bytes(number, "big"), payload))
        except TimeoutError:
            batches = []
    return batches
