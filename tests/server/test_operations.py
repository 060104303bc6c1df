"""What a real server tells a router: its KV events."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec
import openai
import pytest
import zmq

from tests.server.conftest import API_KEY, BLOCK, flush, serve

pytestmark = pytest.mark.slow  # a server of its own

TOPIC = "kv@127.0.0.1:8000@demo"
"""As llm-d wants it."""


@pytest.fixture(scope="module")
def server(events_endpoint) -> Iterator[Any]:
    env = {"OMP_NUM_THREADS": "1"}
    arguments = ["--api-key", API_KEY, "--max-num-seqs", "1", "--num-gpu-blocks-override", "24"]
    events = {"enable_kv_cache_events": True, "publisher": "zmq", "topic": TOPIC}
    arguments += ["--kv-events-config", json.dumps(events | {"endpoint": events_endpoint})]
    with serve(plugin=True, extra_args=arguments, env=env) as running:
        yield running


@pytest.fixture(scope="module")
def events_endpoint(tmp_path_factory) -> str:
    """One that vLLM binds; to an address without a `*` it would connect."""
    return f"ipc://{tmp_path_factory.mktemp('events') / 'socket'}"


def ask(client: openai.OpenAI, name: str, **request: Any):
    request = {"model": "demo", "temperature": 0, **request}
    return client.completions.create(**request, extra_headers={"X-Request-Id": name})


class Router:
    """Follows a server's KV events by their wire format alone, as a gateway does."""

    def __init__(self, endpoint: str) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.SUB)
        self._socket.connect(endpoint)
        self._socket.subscribe("kv@")
        self.blocks: dict[Any, list[int]] = {}
        """The tokens up to and with each block, by its hash."""
        self.num_removed = 0
        self._last_number: int | None = None

    def close(self) -> None:
        self._socket.close(linger=0)

    def follow(self, timeout_ms: int = 1000) -> bool:
        """Take in what there is until nothing comes for so long; whether there was anything."""
        has_heard = False
        while self._socket.poll(timeout_ms):
            topic, sequence, payload = self._socket.recv_multipart()
            assert topic.decode() == TOPIC
            number = int.from_bytes(sequence, "big")
            assert self._last_number in (None, number - 1), "events were lost"
            self._last_number = number
            _, events, *_ = msgspec.msgpack.decode(payload)
            for event in events:
                self._apply(event)
            has_heard = True
        return has_heard

    def _apply(self, event: dict[str, Any]) -> None:
        if event["type"] == "AllBlocksCleared":
            self.blocks.clear()
        elif event["type"] == "BlockRemoved":
            for block in event["block_hashes"]:
                del self.blocks[block]
                self.num_removed += 1
        else:
            assert event["type"] == "BlockStored" and event["block_size"] == BLOCK
            parent = event["parent_block_hash"]
            tokens = [] if parent is None else self.blocks[parent]
            for number, block in enumerate(event["block_hashes"]):
                tokens = tokens + event["token_ids"][number * BLOCK : (number + 1) * BLOCK]
                self.blocks[block] = tokens


@pytest.fixture
def router(http, client, events_endpoint) -> Iterator[Router]:
    flush(http)
    router = Router(events_endpoint)
    for number in range(50):  # until the subscription has arrived events are lost
        ask(client, "subscribing", prompt=[10 + number] * (BLOCK + 1), max_tokens=1)
        if router.follow(100):
            break
    flush(http)
    ask(client, "last", prompt=[9] * (BLOCK + 1), max_tokens=1)
    router.follow()
    yield router
    router.close()


def test_a_router_knows_the_whole_blocks_of_what_was_computed(client, router) -> None:
    prompt = [20 + number % 4000 for number in range(2 * BLOCK + 60)]
    ask(client, "events", prompt=prompt, max_tokens=1)
    router.follow()
    known = max(router.blocks.values(), key=len)
    assert known == prompt[: 2 * BLOCK]
    assert len(router.blocks) == 1 + 2  # with the one of the fixture


def test_a_router_is_told_of_evictions_and_knows_what_the_tree_holds(
    client, router, server
) -> None:
    for number in range(6):  # of 7 whole blocks each, in a cache of 23
        prompt = [(7919 * number + 31 * place) % 4000 + 20 for place in range(1000)]
        ask(client, f"evicting-{number}", prompt=prompt, max_tokens=1)
    router.follow()
    assert router.num_removed > 0
    metrics = server.metrics()
    assert metrics["sgl_vllm:evicted_blocks_total"] > 0
    # Each prompt leaves its whole blocks and one partial tail, of which no router is told.
    assert len(router.blocks) <= metrics["sgl_vllm:tree_blocks"]
    assert len(router.blocks) * BLOCK <= metrics["sgl_vllm:tree_tokens"]
    assert metrics["sgl_vllm:tree_tokens"] - len(router.blocks) * BLOCK < 6 * BLOCK
