"""An engine's KV events, as vLLM publishes them over ZMQ, in order and from the first.

Owns the sockets and the numbers of batches; what events mean is `PrefixRouter.apply_events`. Takes
nothing of the engine's time: it publishes whether anyone listens or not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import msgspec
from zmq import DEALER, SUB
from zmq.asyncio import Context

from sgl_vllm.routing.router import Worker

REPLAY_TIMEOUT_S = 5.0
"""An engine answers at once; one that does not has ended, or has no such socket."""

Apply = Callable[[list[Any], int], bool]
"""Takes a batch's events and its number; False if batches before it are missing."""


@dataclass(frozen=True, slots=True)
class KVEventSource:
    """Where an engine publishes, as seen from other machines.

    Attributes:
        endpoint: of its PUB socket, such as tcp://10.0.0.1:5557.
        replay_endpoint: of the ROUTER socket that tells what was published before.
    """

    endpoint: str
    replay_endpoint: str

    def as_stats(self) -> dict[str, str]:
        return asdict(self)


class Followers:
    """Whose events are followed, a task each. One that has failed is not tried again.

    Args:
        apply: takes a worker's batch, as `PrefixRouter.apply_events`.
        on_failure: told of a worker whose events cannot be followed, when they are not any more.
        loop: where the tasks run, if not in the loop that `follow` is called in.
    """

    def __init__(
        self,
        apply: Callable[[Worker, list[Any], int], bool],
        on_failure: Callable[[Worker, BaseException | None], None],
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self._apply = apply
        self._on_failure = on_failure
        self._loop = loop
        self._tasks: dict[Worker, asyncio.Task[None]] = {}

    def __contains__(self, worker: Worker) -> bool:
        task = self._tasks.get(worker)
        return task is not None and not task.done()

    def follow(self, worker: Worker, source: KVEventSource) -> None:
        """From now on, unless it is already, or has failed."""
        if worker not in self._tasks:
            loop = self._loop or asyncio.get_running_loop()
            task = loop.create_task(follow(source, partial(self._apply, worker)))
            self._tasks[worker] = task
            task.add_done_callback(partial(self._ended, worker))

    def keep(self, workers: Collection[Worker]) -> None:
        """The others are gone."""
        for worker in [worker for worker in self._tasks if worker not in workers]:
            self._tasks.pop(worker).cancel()

    def _ended(self, worker: Worker, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and self._tasks.get(worker) is task:
            self._on_failure(worker, task.exception())


async def follow(source: KVEventSource, apply: Apply) -> None:
    """Until it is cancelled: every batch, from the first that the engine remembers."""
    from vllm.distributed.kv_events import KVEventBatch

    decoder = msgspec.msgpack.Decoder(KVEventBatch)
    context = Context.instance()
    with context.socket(SUB) as live:
        live.set_hwm(0)  # what is not read yet waits here, instead of being dropped
        live.subscribe(b"")
        live.connect(source.endpoint)
        is_whole = False
        while True:
            if not is_whole:
                for number, payload in await _replayed(context, source.replay_endpoint):
                    apply(decoder.decode(payload).events, number)
            _, number_bytes, payload = await live.recv_multipart()
            is_whole = apply(decoder.decode(payload).events, int.from_bytes(number_bytes, "big"))


async def _replayed(context: Context, endpoint: str) -> list[tuple[int, bytes]]:
    """What was published so far, oldest first, with the numbers; nothing if nobody answers."""
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
