"""Following KV events over real sockets, with vLLM's own publisher."""

from __future__ import annotations

import asyncio

import pytest

pytest.importorskip("vllm", reason="the publisher is vLLM's")

from vllm.distributed.kv_events import AllBlocksCleared, KVEventBatch, ZmqEventPublisher

from sgl_vllm.routing.kv_events import KvEventSource, follow


@pytest.fixture
def publisher(tmp_path):
    source = KvEventSource(f"ipc://{tmp_path}/live", f"ipc://{tmp_path}/replay")
    publisher = ZmqEventPublisher(
        0, endpoint=source.endpoint, replay_endpoint=source.replay_endpoint
    )
    publisher.source = source
    yield publisher
    publisher.shutdown()


def publish(publisher, count: int) -> None:
    for _ in range(count):
        publisher.publish(KVEventBatch(ts=0.0, events=[AllBlocksCleared()]))
    publisher._event_queue.join()  # a thread of its own sends them


async def numbers_until(source, last: int, apply=lambda number: True, then=lambda: None):
    """The numbers of batches in the order of their arrival, up to `last`."""
    seen, ended = [], asyncio.Event()

    def note(events, number):
        assert [type(event) for event in events] == [AllBlocksCleared]
        seen.append(number)
        if number == last:
            ended.set()
        return apply(number)

    task = asyncio.create_task(follow(source, note))
    await asyncio.sleep(0.5)
    then()
    async with asyncio.timeout(10):
        await ended.wait()
    task.cancel()
    return seen


def test_a_late_subscriber_gets_every_batch_from_the_first(publisher):
    publish(publisher, 5)
    then = lambda: publish(publisher, 3)  # noqa: E731
    assert asyncio.run(numbers_until(publisher.source, 7, then=then)) == list(range(8))


def test_after_a_gap_all_batches_are_replayed(publisher):
    publish(publisher, 2)
    first_time = iter([False])
    apply = lambda number: number != 2 or next(first_time, True)  # noqa: E731

    seen = asyncio.run(numbers_until(publisher.source, 3, apply, lambda: publish(publisher, 4)))
    assert seen[:3] == [0, 1, 2] and seen[3] == 0


def test_without_an_engine_it_waits(monkeypatch, tmp_path):
    monkeypatch.setattr("sgl_vllm.routing.kv_events.REPLAY_TIMEOUT_S", 0.1)
    unbound = f"ipc://{tmp_path}/unbound"

    async def run():
        task = asyncio.create_task(follow(KvEventSource(unbound, unbound), lambda *_: True))
        done, _ = await asyncio.wait([task], timeout=0.5)
        task.cancel()
        return done

    assert not asyncio.run(run())
