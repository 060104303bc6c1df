"""Two data-parallel engines behind two API servers, which know by KV events what each has.

Whichever API server is asked, it tells the same of the engines.
"""

from __future__ import annotations

import json
import time
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from sgl_vllm.routes.metrics import MAX_AGE_S
from sgl_vllm.server_process import read_counters
from tests.server.conftest import serve

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(600)]

CONVERSATIONS, TURNS = 8, 4
BLOCK_SIZE = 32
TURN = 3 * BLOCK_SIZE
SCRAPES = 16
"""Each over a connection of its own: the odds that one API server gets all are 1 in 2^15."""
LOAD_IS_TOLD_S = 0.1
"""So often vLLM's coordinator tells the API servers how many requests each engine has."""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("events")
    events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"ipc://{folder}/inproc-events",
        "replay_endpoint": f"ipc://{folder}/inproc-replay",
    }
    options = ["--data-parallel-size", "2", "--block-size", str(BLOCK_SIZE)]
    options += ["--enable-prompt-tokens-details", "--kv-events-config", json.dumps(events)]
    with serve(plugin=True, extra_args=options) as running:
        yield running


def test_conversations_find_their_cache_whichever_api_server_they_meet(server):
    prompts = [[17 * i + j % 251 + 5 for j in range(TURN * TURNS)] for i in range(CONVERSATIONS)]
    num_computed = 0
    for turn in range(1, TURNS + 1):
        for prompt in prompts:
            usage = complete(server.url, prompt[: TURN * turn])
            time.sleep(2 * LOAD_IS_TOLD_S)  # or the other API server takes it for running still
            num_computed += usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"]
    # By turns or by load, every other request would compute again what the other engine has.
    assert num_computed <= 1.1 * CONVERSATIONS * TURN * TURNS
    by_engine = prompt_tokens_by_engine(server.url)
    assert len(by_engine) == 2 and min(by_engine) >= 0.25 * sum(by_engine)


def test_whichever_api_server_is_asked_tells_of_all_engines_once(server):
    read_counters(server.url)  # waits until nothing runs
    before = radix_stats(server.url)
    for token in range(4):
        complete(server.url, [token + 300] * 40)
    time.sleep(MAX_AGE_S)  # each API server has its own last report of the engines
    page, *others = [ours_of(server.url) for _ in range(SCRAPES)]
    assert all(other == page for other in others)
    assert page["sgl_vllm:prefix_lookups_total"] == before["lookups"] + 4
    assert page["sgl_vllm:prefix_lookup_tokens_total"] == before["prompt_tokens"] + 4 * 40
    assert page["sgl_vllm:cache_tokens"] == before["cache_tokens"]
    after = radix_stats(server.url)
    assert page["sgl_vllm:tree_tokens"] == after["tree_tokens"] > before["tree_tokens"]
    assert page["sgl_vllm:prefix_hit_tokens_total"] == after["hit_tokens"]
    assert page['sgl_vllm:part_on{part="radix"}'] == 1


def complete(url: str, prompt: list[int]) -> dict[str, Any]:
    """The usage, of a request over a connection of its own."""
    body = {"model": "demo", "prompt": prompt, "max_tokens": 1}
    return (
        httpx.post(f"{url}/v1/completions", json=body, timeout=60)
        .raise_for_status()
        .json()["usage"]
    )


def prompt_tokens_by_engine(url: str) -> list[float]:
    families = text_string_to_metric_families(httpx.get(f"{url}/metrics").text)
    return [
        sample.value
        for family in families
        for sample in family.samples
        if sample.name == "vllm:prompt_tokens_total"
    ]


def radix_stats(url: str) -> dict[str, Any]:
    return httpx.get(f"{url}/v1/sgl/stats").raise_for_status().json()["radix"]


def ours_of(url: str) -> dict[str, float]:
    """The plugin's part of a scrape over a connection of its own, each sample of which is new."""
    page = httpx.get(f"{url}/metrics").raise_for_status().text
    samples = [line.rsplit(" ", 1) for line in page.splitlines() if line.startswith("sgl_vllm:")]
    told = {name: float(value) for name, value in samples}
    assert len(told) == len(samples)
    return told
