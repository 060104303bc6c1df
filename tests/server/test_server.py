"""The real server with the plugin, over HTTP and the official client."""

from __future__ import annotations

import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from sgl_vllm.commands import cli
from sgl_vllm.vllm_api.probe import PARTS
from tests.server.conftest import API_KEY, flush

DEPLOY = Path(__file__).parents[2] / "deploy"
CARD = r'\{"city": "[A-Z][a-z]{2,9}", "continent": "(Europe|Asia|Africa)", "people": [0-9]{1,3}\}'
CARD_REQUEST = {
    "model": "demo",
    "prompt": "A card: ",
    "max_tokens": 60,
    "temperature": 0,
    "extra_body": {"structured_outputs": {"regex": CARD}},
}


def test_data_needs_the_api_key_and_the_page_holds_none(server):
    assert httpx.get(f"{server.url}/v1/sgl/stats").status_code == 401
    assert httpx.post(f"{server.url}/v1/sgl/batch").status_code == 401
    page = httpx.get(f"{server.url}/sgl/tree")
    assert page.status_code == 200
    assert page.headers["content-type"].startswith("text/html")


@pytest.mark.parametrize(
    ("prompt", "said"),
    [([10**9], "out of vocabulary"), ([5] * 3000, "longer than the maximum model length")],
)
def test_what_vllm_refuses_is_not_pinned(http, prompt, said):
    refused = http.post("/sgl/pin", json={"prompt": prompt})
    assert refused.status_code == 400
    assert said in refused.json()["error"]["message"]


def test_a_pinned_prefix_stays_until_it_is_unpinned(server, http):
    flush(http)
    prompt = list(range(200, 290))
    pinned = http.post("/sgl/pin", json={"prompt": prompt}).json()
    assert pinned["pins"][0]["num_tokens"] == pinned["num_prompt_tokens"] == 90
    (engine,) = http.get("/sgl/tree").json()["engines"]
    assert engine["num_pinned_blocks"] == engine["num_protected_blocks"] == 1
    assert http.get("/sgl/pins").json()["engines"][0]["pins"][0]["num_tokens"] == 90
    metrics = server.metrics()
    assert metrics["sgl_vllm:pinned_tokens"] == metrics["sgl_vllm:protected_tokens"] == 128
    assert http.post("/sgl/unpin", json={"pin_id": pinned["pin_id"]}).status_code == 200
    assert http.post("/sgl/unpin", json={"pin_id": pinned["pin_id"]}).status_code == 404
    assert http.get("/sgl/tree").json()["engines"][0]["num_pinned_blocks"] == 0
    assert server.metrics()["sgl_vllm:pinned_tokens"] == 0


def test_streams_beside_each_other_lose_nothing(client):
    def stream(number: int) -> tuple[str, str, int]:
        prompt = f"A card, the {number}th: "
        request = {**CARD_REQUEST, "prompt": prompt}
        options = {"include_usage": True}
        *deltas, last = client.completions.create(**request, stream=True, stream_options=options)
        text = "".join(chunk.choices[0].text for chunk in deltas)
        return prompt, text, last.usage.completion_tokens

    with ThreadPoolExecutor(8) as pool:
        streamed = list(pool.map(stream, range(16)))
    for prompt, text, num_tokens in streamed:
        whole = client.completions.create(**{**CARD_REQUEST, "prompt": prompt})
        assert (whole.choices[0].text, whole.usage.completion_tokens) == (text, num_tokens)


def test_the_tree_shows_sizes_and_no_text(http, client):
    flush(http)
    client.completions.create(model="demo", prompt="A secret: swordfish", max_tokens=1)
    tree = http.get("/sgl/tree")
    assert "swordfish" not in tree.text
    (engine,) = tree.json()["engines"]
    assert engine["num_tokens"] > 0
    (node,) = engine["nodes"]
    assert node["parent"] is None and node["num_tokens"] == engine["num_tokens"]


def test_the_metrics_are_those_of_the_moment_and_of_what_ran(server, http, client):
    flush(http)
    before = server.metrics()
    prompt = list(range(300, 490))  # a whole block of 128, and a part of one
    for _ in range(2):
        client.completions.create(model="demo", prompt=prompt, max_tokens=1)
    regex = {"structured_outputs": {"regex": "[xyz]{2,4}"}}
    client.completions.create(**{**CARD_REQUEST, "extra_body": regex})
    after = server.metrics()

    def counted(name: str) -> float:
        return after[f"sgl_vllm:{name}"] - before[f"sgl_vllm:{name}"]

    page = httpx.get(f"{server.url}/metrics").text
    tiers = dict(re.findall(r'^sgl_vllm:tier_hit_tokens_total{tier="(\w+)"} (\S+)', page, re.M))
    stats = http.get("/sgl/stats").json()
    radix = stats["radix"]
    assert after["sgl_vllm:forced_tokens_total"] == stats["jump_forward"]["forced_tokens"]
    assert after["sgl_vllm:prefix_hit_tokens_total"] == radix["hit_tokens"]
    assert after["sgl_vllm:tree_tokens"] == radix["tree_tokens"]
    assert after["vllm:prefix_cache_hits_total"] == radix["hit_tokens"]
    assert float(tiers["whole_blocks"]) + float(tiers["partial_block"]) == radix["hit_tokens"]
    assert float(tiers["partial_block"]) >= 189 - 128
    assert counted("tier_hit_tokens_total") == 189
    assert counted("compile_seconds_count") == 1
    assert 0 < counted("compile_seconds_sum") < 10
    assert counted("mask_seconds_count") >= 1
    assert 0 < counted("mask_seconds_sum") < 1
    assert after["sgl_vllm:part_on"] == len(PARTS)
    assert after["sgl_vllm:protected_tokens"] == 0
    assert after["sgl_vllm:tree_tokens"] <= after["sgl_vllm:cache_tokens"]


@pytest.mark.parametrize("name", ["a session", "\ud83d", "x" * 5000, 3, ["a"], {"a": "b"}])
def test_requests_that_name_one_session_on_any_route_are_one_program(http, name):
    def num_programs() -> int:
        return sum(http.get("/sgl/stats").json()["programs"].values())

    is_name, before = name == "a session", num_programs()
    key, header = {"prompt_cache_key": name}, {"X-Session-ID": name if is_name else "x" * 5000}
    for route, text_key, headers in (
        ("chat/completions", "messages", {} if is_name else header),
        ("completions", "prompt", header),
        ("responses", "input", header),
        ("messages", "messages", {"X-Claude-Code-Session-Id": header["X-Session-ID"]}),
    ):
        text: Any = f"What does {str(name)[:9]!a} say to {route}? " * 20
        if text_key == "messages":
            text = [{"role": "user", "content": text}]
        limit = "max_output_tokens" if route == "responses" else "max_tokens"
        sent = key if is_name or route != "responses" else {}  # there stock checks its type
        body = json.dumps({"model": "demo", text_key: text, limit: 1, **sent})
        headers = {"Content-Type": "application/json", **headers}
        assert http.post(f"/{route}", content=body, headers=headers).status_code == 200
    assert num_programs() - before == (1 if is_name else 4)


def test_a_conversation_is_seen_to_run_to_be_in_a_tool_and_to_end(server, client, http):
    before = http.get("/sgl/stats").json()["programs"]

    def changes() -> dict[str, int]:
        now = http.get("/sgl/stats").json()["programs"]
        return {state: now[state] - before[state] for state in now if now[state] != before[state]}

    def become(wanted: dict[str, int]) -> bool:
        """The answer may be there before the engine has been told that it calls a tool."""
        deadline = time.monotonic() + 10
        while changes() != wanted and time.monotonic() < deadline:
            time.sleep(0.05)
        return changes() == wanted

    messages: list[dict[str, Any]] = [{"role": "user", "content": "Where do herons live? " * 12}]
    ask = {"model": "demo", "messages": messages, "temperature": 0, "max_tokens": 60}
    bird = {"type": "string", "enum": ["heron"]}
    parameters = {"type": "object", "properties": {"bird": bird}, "required": ["bird"]}
    tool = {"type": "function", "function": {"name": "look_up", "parameters": parameters}}
    choice = {"type": "function", "function": {"name": "look_up"}}
    answer = client.chat.completions.create(**ask, tools=[tool], tool_choice=choice)
    (call,) = answer.choices[0].message.tool_calls
    assert become({"in_tool": 1})
    number = before["in_tool"] + 1
    deadline = time.monotonic() + 10
    while f'programs{{state="in_tool"}} {number}.0' not in httpx.get(f"{server.url}/metrics").text:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert "look_up" not in httpx.get(f"{server.url}/metrics").text + http.get("/sgl/tree").text

    messages.append({"role": "assistant", "content": "", "tool_calls": [call.model_dump()]})
    messages.append({"role": "tool", "tool_call_id": call.id, "content": "By the water."})
    ask["max_tokens"] = 600
    parts = client.chat.completions.create(**ask, stream=True, extra_body={"ignore_eos": True})
    next(iter(parts))
    assert changes() == {"running": 1}
    text = "".join(part.choices[0].delta.content or "" for part in parts)
    assert become({"waiting_for_person": 1})

    messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "Thanks."}]
    ask["max_tokens"] = 8
    client.chat.completions.create(**ask, extra_body={"vllm_xargs": {"sgl_ends": 1}})
    assert become({"ended": 1})


def test_the_server_tells_every_metric_that_the_dashboard_asks_for(server):
    dashboard = (DEPLOY / "grafana" / "dashboards" / "sgl-vllm.json").read_text()
    asked = set(re.findall(r"\b((?:sgl_)?vllm:\w+)", dashboard))
    assert asked and asked <= set(server.metrics())


def test_top_shows_the_server(server, capsys):
    arguments = ["top", server.url, "--once", "--json", "--interval", "0.1"]
    assert cli.main([*arguments, "--api-key", API_KEY]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["plugin"] and row["parts_off"] == {}
    assert (row["running"], row["waiting"], row["output_tokens_per_s"]) == (0, 0, 0)
    assert 0 < row["hit_rate_since_start"] < 1
    assert 0 < row["tree_tokens"] < row["cache_tokens"]
    assert cli.main(arguments) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert "requires an API key" in row["problem"] and row["running"] == 0
