"""A real server under load: what streams is what is answered at once, and clients that leave in the
middle leave nothing behind."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from sgl_vllm.server_process import VllmServer
from tests.engine.programs import CARD, LETTER
from tests.gpu.configuration import on_cpu, unverified
from tests.gpu.conftest import CONFIGURATION, needs_exact

pytestmark = needs_exact

NUM_STREAMS = 24 if on_cpu() else 96
IDLE_TIMEOUT_S = 30


@pytest.fixture(scope="module")
def server(model: str) -> Iterator[VllmServer]:
    environment = {} if on_cpu() else {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    served = VllmServer(
        model,
        plugin=True,
        plugin_config=unverified(),
        served_model_name="m",
        max_model_len=1024,
        extra_args=CONFIGURATION.server_args,
        env=environment,
    )
    with served:
        yield served


def request_of(number: int) -> dict[str, Any]:
    pattern = (None, CARD, LETTER)[number % 3]
    grammar = {"structured_outputs": {"regex": pattern}} if pattern else {}
    beginning = [10 + (7 * token) % 1900 for token in range(40 + 5 * (number % 8))]
    return {
        "model": "m",
        "prompt": [*beginning, 20 + number],
        "max_tokens": 24 if pattern is None else 60,
        "temperature": 0,
        "extra_body": grammar,
    }


def test_streams_and_clients_that_leave(server: VllmServer) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)

    def whole(number: int) -> str:
        return client.completions.create(**request_of(number)).choices[0].text

    def streamed(number: int) -> tuple[str, bool]:
        """The text, and whether it is all of it: every fourth client leaves after three pieces."""
        pieces: list[str] = []
        with client.completions.create(**request_of(number), stream=True) as stream:
            for chunk in stream:
                pieces.append(chunk.choices[0].text)
                if number % 4 == 3 and len(pieces) == 3:
                    return "".join(pieces), False
        return "".join(pieces), True

    numbers = range(NUM_STREAMS)
    with ThreadPoolExecutor(NUM_STREAMS) as together:
        texts = list(together.map(streamed, numbers))
    until = time.monotonic() + IDLE_TIMEOUT_S
    while server.metrics().get("vllm:num_requests_running", 0.0) and time.monotonic() < until:
        time.sleep(0.2)
    metrics = server.metrics()
    assert metrics["vllm:num_requests_running"] == metrics["vllm:num_requests_waiting"] == 0
    assert sum(not complete for _, complete in texts) > NUM_STREAMS // 8
    for number in numbers:
        text, complete = texts[number]
        wanted = whole(number)
        assert text == wanted if complete else wanted.startswith(text), number
