"""`GET /v1/sgl/why` and `sgl-vllm why`, with fake engines behind them."""

from __future__ import annotations

from typing import Any

import pytest
from fastapi.testclient import TestClient

from sgl_vllm.commands import cli, client
from sgl_vllm.protocol.causes import MEANINGS
from sgl_vllm.radix.misses import CAUSES, NOT_CACHED
from sgl_vllm.routes.tenants import TenantSource
from tests.fake_engines import FakeEngine, fake_server, tokens_of

URL = "http://testserver"


def explanation(**fields: Any) -> dict[str, Any]:
    return {
        "request": "cmpl-a-0-01234567",
        "age_s": 3.0,
        "num_prompt_tokens": 2000,
        "num_cached_tokens": 1200,
        "num_loaded_tokens": 0,
        "num_missed_tokens": 800,
        "block_size": 16,
        "exact": True,
        "causes": [
            {"cause": "evicted", "start": 1200, "end": 1500, "before_s": 34.0},
            {"cause": "new", "start": 1500, "end": 2000},
        ],
        **fields,
    }


def test_each_engine_is_asked_with_the_salt_of_the_tenant() -> None:
    engines = [FakeEngine(why=[]), FakeEngine(why=[explanation()]), FakeEngine()]
    app = fake_server(*engines)
    tenants = app.state.sgl_vllm_tenants = TenantSource("header:X-Tenant")
    http = TestClient(app)
    answer = http.get("/v1/sgl/why?request=cmpl-a", headers={"X-Tenant": "a", "X-Cache-Salt": "s"})
    assert answer.json() == {"requests": [{"engine": 1, **explanation()}]}
    salts = {asked["cache_salt"] for engine in engines for _, asked in engine.asked if asked}
    assert len(salts) == 1 and salts.isdisjoint({None, "s", tenants.salt("s")})
    http.get("/v1/sgl/why?request=cmpl-a")
    assert engines[0].asked[-1][1] == {"request_id": "cmpl-a", "cache_salt": None}


def test_every_cause_has_a_meaning() -> None:
    assert MEANINGS.keys() == {*CAUSES, NOT_CACHED}


@pytest.fixture
def why(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """What the command prints of these explanations."""

    def run(*explanations: dict[str, Any]) -> list[str]:
        http = TestClient(fake_server(FakeEngine(why=list(explanations))))

        def request(method: str, url: str, timeout: float, **options: Any) -> Any:
            return http.request(method, url, **options)

        monkeypatch.setattr(client.httpx, "request", request)
        assert cli.main(["why", URL, "cmpl-a"]) == 0
        return capsys.readouterr().out.splitlines()

    return run


def test_the_command_prints_a_line_for_each_cause(why) -> None:
    assert why(explanation()) == [
        "cmpl-a-0-01234567: 1,200 of 2,000 prompt tokens cached, 800 computed",
        "    [1,200, 1,500)      300  evicted to make room, 34 s before",
        "    [1,500, 2,000)      500  never cached here",
    ]


def test_the_command_prints_texts_loads_and_blocks(why) -> None:
    texts = {"prompt": "on May\n3", "cached": "on \x1b2"}
    sides = {side: {"tokens": tokens_of(text)} for side, text in texts.items()}
    causes = [{"cause": "differs", "start": 9, "end": 12}]
    lines = why(explanation(causes=causes, **sides), explanation(exact=False, num_loaded_tokens=64))
    assert lines[1:4] == [
        "           [9, 12)        3  the prompt differs from what is cached",
        "  cached: on 2",
        "  prompt: on May 3",
    ]
    assert lines[4].endswith("cached, 64 loaded, 800 computed")
    assert lines[5].startswith(
        "  This request has no cache_salt, so only whole blocks of 16 tokens are counted"
    )
