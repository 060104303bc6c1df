"""What a real server tells others of itself: spans to a collector, KV events to a router."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec
import openai
import pytest
import zmq
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.server.conftest import API_KEY, BLOCK, flush, serve
from tests.server.test_server import CARD_REQUEST

pytestmark = pytest.mark.slow  # a server of its own

TOPIC = "kv@127.0.0.1:8000@demo"
"""As llm-d wants it."""


class Collector(ThreadingHTTPServer):
    """Takes OTLP over HTTP, as a collector does."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.spans: list[Any] = []

    def attributes_of(self, request_id: str, timeout_s: float = 20) -> dict[str, Any]:
        """Those of the span of a request, and its trace, once it has arrived."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            for span in list(self.spans):
                attributes = {a.key: _value(a.value) for a in span.attributes}
                if request_id in str(attributes.get("gen_ai.request.id")):
                    return attributes | {"trace_id": span.trace_id.hex()}
            time.sleep(0.05)
        raise TimeoutError(f"no span of {request_id} among {len(self.spans)}")


class Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        message = ExportTraceServiceRequest()
        message.ParseFromString(self.rfile.read(int(self.headers["Content-Length"])))
        for resource in message.resource_spans:
            for scope in resource.scope_spans:
                self.server.spans += scope.spans
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


def _value(value: Any) -> Any:
    return getattr(value, value.WhichOneof("value"))


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with Collector() as collector:
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        yield collector
        collector.shutdown()


@pytest.fixture(scope="module")
def server(collector, events_endpoint) -> Iterator[Any]:
    endpoint = f"http://127.0.0.1:{collector.server_port}/v1/traces"
    env = {
        "OMP_NUM_THREADS": "1",
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
        "OTEL_BSP_SCHEDULE_DELAY": "100",
    }
    arguments = ["--api-key", API_KEY, "--otlp-traces-endpoint", endpoint]
    arguments += ["--max-num-seqs", "1", "--num-gpu-blocks-override", "24"]
    events = {"enable_kv_cache_events": True, "publisher": "zmq", "topic": TOPIC}
    arguments += ["--kv-events-config", json.dumps(events | {"endpoint": events_endpoint})]
    with serve(plugin=True, extra_args=arguments, env=env) as running:
        yield running


@pytest.fixture(scope="module")
def events_endpoint(tmp_path_factory) -> str:
    """One that vLLM binds; to an address without a `*` it would connect."""
    return f"ipc://{tmp_path_factory.mktemp('events') / 'socket'}"


def ask(client: openai.OpenAI, name: str, headers: dict[str, str] | None = None, **request: Any):
    request = {"model": "demo", "temperature": 0, **request}
    headers = {"X-Request-Id": name, **(headers or {})}
    return client.completions.create(**request, extra_headers=headers)


def test_a_span_tells_what_was_cached(client, collector) -> None:
    prompt = list(range(100, 290))
    answers = [ask(client, name, prompt=prompt, max_tokens=2) for name in ("cold", "warm")]
    assert [a.usage.completion_tokens for a in answers] == [2, 2]
    cold, warm = collector.attributes_of("cold"), collector.attributes_of("warm")
    assert cold["sgl_vllm.cached_tokens"] == 0
    assert warm["sgl_vllm.cached_tokens"] == 189
    assert warm["sgl_vllm.partial_block_cached_tokens"] == 189 - 128
    assert warm["sgl_vllm.connector_cached_tokens"] == 0
    assert warm["gen_ai.usage.prompt_tokens"] == 190  # vLLM's own are there too


@pytest.mark.parametrize("stop", [None, ["continent"]])
def test_a_span_tells_what_was_forced_also_where_a_stop_string_ends_it(
    client, collector, http, stop
) -> None:
    name = f"forced-{bool(stop)}"

    def forced() -> dict[str, int]:
        return http.get("/sgl/stats").json()["jump_forward"]

    before = forced()
    ask(client, name, **{**CARD_REQUEST, "stop": stop})
    after, span = forced(), collector.attributes_of(name)
    counted = {name: after[name] - before[name] for name in ("jumps", "forced_tokens")}
    told = {name: span[f"sgl_vllm.{name}"] for name in counted}
    # Until the engine learns of the stop string it goes on, and counts tokens that no client gets.
    assert told == counted or (stop and told["forced_tokens"] < counted["forced_tokens"])
    assert told["jumps"] > 0


def test_a_span_keeps_its_place_in_the_callers_trace(client, collector) -> None:
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    headers = {"traceparent": f"00-{trace_id}-b7ad6b7169203331-01"}
    ask(client, "traced", prompt="Once", max_tokens=1, headers=headers)
    span = collector.attributes_of("traced")
    assert span["trace_id"] == trace_id
    assert "sgl_vllm.cached_tokens" in span


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
