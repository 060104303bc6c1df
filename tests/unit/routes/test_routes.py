"""The routes under /v1/sgl/ and the page, over HTTP, with fake engines behind them."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from vllm.exceptions import VLLMValidationError

from sgl_vllm.routes.bodies import BoundedTokenizeChatRequest, BoundedTokenizeCompletionRequest
from sgl_vllm.scheduler.stats import EngineStats
from tests.fake_engines import FakeEngine, fake_server, node, tokens_of, tree_answer

API_KEY = "a-key"
JSON = {"Content-Type": "application/json"}
BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,image/avif,*/*;q=0.8"
ROUTES = [
    ("GET", "/v1/sgl/stats"),
    ("GET", "/v1/sgl/tree"),
    ("GET", "/v1/sgl/why"),
    ("POST", "/v1/sgl/match"),
    ("POST", "/v1/sgl/pin"),
    ("POST", "/v1/sgl/unpin"),
    ("GET", "/v1/sgl/pins"),
    ("POST", "/v1/sgl/flush_cache"),
    ("POST", "/v1/sgl/batch"),
    ("POST", "/v1/sgl/batch/abort"),
    ("POST", "/v1/sgl/score"),
]


def connect(*engines: FakeEngine, **options: Any) -> TestClient:
    return TestClient(fake_server(*engines, **options))


def computed(client: TestClient) -> list[dict[str, Any]]:
    assert isinstance(client.app, FastAPI)
    return client.app.state.engine_client.computed


def error(answer) -> tuple[int, str]:
    return answer.status_code, answer.json()["detail"]


# -- who may see what


def test_the_list_of_routes_is_complete() -> None:
    paths = connect(FakeEngine()).get("/openapi.json").json()["paths"]
    served = {(method.upper(), path) for path, methods in paths.items() for method in methods}
    assert served == set(ROUTES)


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_every_route_with_data_needs_the_api_key(method: str, path: str) -> None:
    engine = FakeEngine()
    client = connect(engine, api_key=API_KEY)
    assert client.request(method, path).status_code == 401
    assert client.request(method, path, headers={"Authorization": "Bearer x"}).status_code == 401
    assert engine.asked == []
    allowed = client.request(method, path, headers={"Authorization": f"Bearer {API_KEY}"})
    assert allowed.status_code != 401


def test_the_page_loads_nothing_from_elsewhere_and_makes_no_markup_of_text() -> None:
    page = connect(FakeEngine()).get("/sgl/tree").text
    assert "class StatsHistory" in page
    for word in ("http://", "https://", "innerHTML", "outerHTML", "insertAdjacent", "eval("):
        assert word not in page
    policy = connect(FakeEngine()).get("/sgl/tree").headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'sha256-" in policy
    assert "unsafe-inline" not in policy.partition("style-src")[0]


@pytest.mark.parametrize("path", [path for method, path in ROUTES if method == "POST"])
@pytest.mark.parametrize(
    "content_type",
    ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "", None],
)
def test_what_a_page_of_another_site_can_send_without_being_asked_reaches_no_engine(
    path: str, content_type: str | None
) -> None:
    engine = FakeEngine()
    client = connect(engine)
    headers = {"Origin": "https://elsewhere.example"}
    headers |= {} if content_type is None else {"Content-Type": content_type}
    answer = client.post(path, content=b'{"prompt": "a", "pin_id": "a"}', headers=headers)
    assert error(answer) == (400, "Unsupported Media Type: Only 'application/json' is allowed")
    assert engine.asked == []
    assert computed(client) == []


# -- the tree


def test_the_number_of_nodes_is_the_engines_matter() -> None:
    engine = FakeEngine(tree=lambda max_nodes=1000: tree_answer([], nodes_left_out=max_nodes))
    client = connect(engine)
    client.get("/v1/sgl/tree")
    client.get("/v1/sgl/tree?max_nodes=5")
    assert engine.asked == [("tree", None), ("tree", {"max_nodes": 5})]
    for number in ("0", "-1", "many", "100001"):
        status, text = error(client.get(f"/v1/sgl/tree?max_nodes={number}"))
        assert status == 400 and text.startswith("query.max_nodes: Input should be ")


def test_long_texts_are_cut_and_the_size_is_not() -> None:
    def tree() -> dict[str, Any]:
        return tree_answer([node(None, 400, tokens=tokens_of("ab" * 200))])

    client = connect(FakeEngine(tree=tree))
    for query, length in (("", 128), ("?max_text_tokens=5", 5), ("?max_text_tokens=0", 0)):
        (engine,) = client.get(f"/v1/sgl/tree{query}").json()["engines"]
        (only,) = engine["nodes"]
        assert only["text"] == ("ab" * 200)[:length]
        assert len(only["tokens"]) == length
        assert only["num_tokens"] == 400


def test_a_browser_is_sent_to_the_page_and_a_program_is_not() -> None:
    client = connect(FakeEngine())
    sent = client.get(
        "/v1/sgl/tree?max_nodes=5", headers={"Accept": BROWSER}, follow_redirects=False
    )
    assert sent.status_code == 307
    assert sent.headers["location"] == "../../sgl/tree?max_nodes=5"
    for accept in ("*/*", "application/json", "application/json, text/plain, */*"):
        assert client.get("/v1/sgl/tree", headers={"Accept": accept}).json() == {"engines": [{}]}


# -- bodies


@pytest.mark.parametrize("route", ["pin", "unpin", "batch", "batch/abort", "score", "match"])
def test_a_body_that_is_nested_too_deeply_is_refused(route: str) -> None:
    body = b'{"a":' * 100_000 + b"1" + b"}" * 100_000
    answer = connect(FakeEngine()).post(f"/v1/sgl/{route}", content=body, headers=JSON)
    status, text = error(answer)
    assert status == 400 and "nested too deeply" in text


def test_a_body_that_is_cut_off_is_one_line_in_no_log(caplog) -> None:
    statuses: list[int] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        statuses.append(message.get("status"))

    headers = [(b"content-type", b"application/json")]
    scope: dict[str, Any] = {"type": "http", "method": "POST", "path": "/v1/sgl/pin"}
    scope |= {"headers": headers, "query_string": b"", "root_path": ""}
    asyncio.run(fake_server(FakeEngine())(scope, receive, send))
    assert statuses[0] == 400
    assert caplog.records == []


def test_a_prompt_is_checked_for_its_length_before_it_is_tokenized() -> None:
    config = SimpleNamespace(max_model_len=8)
    tokenizer = SimpleNamespace(max_chars_per_token=4)
    messages = [{"role": "user", "content": "a"}]
    for wanted in (
        BoundedTokenizeCompletionRequest(prompt="a"),
        BoundedTokenizeChatRequest(messages=messages),
    ):
        params = wanted.build_tok_params(config)
        params.apply_pre_tokenization(tokenizer, {"prompt": "a" * 32})
        with pytest.raises(VLLMValidationError, match="33 characters"):
            params.apply_pre_tokenization(tokenizer, {"prompt": "a" * 33})


def test_a_flush_under_running_requests_is_refused() -> None:
    client = connect(FakeEngine())
    assert client.post("/v1/sgl/flush_cache", headers=JSON).json() == {"flushed": True}
    assert isinstance(client.app, FastAPI)
    client.app.state.engine_client.resets = False
    refused = client.post("/v1/sgl/flush_cache", headers=JSON)
    assert refused.status_code == 409 and "no request is running" in refused.text


# -- many clients at once


@pytest.mark.parametrize("path", ["stats", "tree", "pins"])
def test_clients_that_poll_at_the_same_time_cost_the_engine_one_answer(path: str) -> None:
    engine = FakeEngine(stats=EngineStats(), tree=tree_answer([]), pins=[])
    app = fake_server(engine)

    async def poll() -> list[int]:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as http:
            answers = await asyncio.gather(*(http.get(f"/v1/sgl/{path}") for _ in range(20)))
            return [answer.status_code for answer in answers]

    assert asyncio.run(poll()) == [200] * 20
    assert 1 <= len(engine.asked) < 5
