"""`POST /v1/sgl/match` over HTTP, with fake engines behind it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fastapi.testclient import TestClient

from sgl_vllm.radix.tokens import unpack
from sgl_vllm.routes.match import MAX_CANDIDATES, MAX_CHARS, MAX_TOKENS
from sgl_vllm.routes.tenants import TenantSource
from tests.fake_engines import FakeEngine, fake_server, tokens_of


class CachingEngine(FakeEngine):
    """Has some prefixes, each of one salt. Tells how far each candidate is one of them."""

    def __init__(self, *cached: str, salt: str | None = None) -> None:
        self.cached, self.salt = [tokens_of(text) for text in cached], salt
        super().__init__(match=self.match)

    def match(self, candidates, prefix, cache_salt, lora_name, lora_path) -> list[int]:
        if cache_salt != self.salt:
            return [0] * len(candidates)
        return [self._length(unpack(prefix + one)) for one in candidates]

    def _length(self, wanted: list[int]) -> int:
        lengths = [0]
        for cached in self.cached:
            pairs = enumerate(zip(wanted, cached, strict=False))
            end = min(len(wanted), len(cached))
            lengths.append(next((i for i, (a, b) in pairs if a != b), end))
        return max(lengths)


JSON = {"Content-Type": "application/json"}


def connect(*engines: FakeEngine, tenant_from: str = "none") -> TestClient:
    app = fake_server(*engines)
    app.state.sgl_vllm_tenants = TenantSource(tenant_from)
    return TestClient(app)


def match(client: TestClient, body: dict[str, Any], **headers: str) -> dict[str, list[int]]:
    answer = client.post("/v1/sgl/match", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_each_candidate_is_told_its_tokens_and_how_many_are_cached() -> None:
    client = connect(CachingEngine("the hare ran", "the hat"))
    told = match(client, {"candidates": ["the hare sat", "the ha", "a hare"]})
    assert told == {"num_tokens": [12, 6, 6], "cached_tokens": [9, 6, 0]}


def test_candidates_continue_a_shared_beginning() -> None:
    client = connect(CachingEngine("the hare ran"))
    told = match(client, {"prompt": "the ", "candidates": ["hare", "fox", ""]})
    assert told == {"num_tokens": [8, 7, 4], "cached_tokens": [8, 4, 4]}
    ids = {"prompt": tokens_of("the "), "candidates": [tokens_of("hare"), tokens_of("fox"), []]}
    assert match(client, ids) == told


def test_of_several_engines_the_one_with_most_of_a_candidate_counts() -> None:
    client = connect(CachingEngine("abcd"), CachingEngine("abxyz"))
    told = match(client, {"candidates": ["abcd", "abxyz", "q"]})
    assert told["cached_tokens"] == [4, 5, 0]


def test_engines_without_a_tree_are_left_out_and_with_none_there_is_a_reason() -> None:
    told = match(connect(FakeEngine(), CachingEngine("ab")), {"candidates": ["abc"]})
    assert told["cached_tokens"] == [2]
    answer = connect(FakeEngine()).post("/v1/sgl/match", json={"candidates": ["abc"]})
    assert answer.status_code == 409
    assert "radix" in answer.json()["detail"]


def test_the_tenant_decides_the_salt() -> None:
    """The engine is asked with a salt that no client can send itself."""
    engine = FakeEngine(match=[0])
    client = connect(engine, tenant_from="header:X-Tenant")
    for tenant in ("a", "b"):
        match(client, {"candidates": ["abcd"], "cache_salt": "s"}, **{"X-Tenant": tenant})
    salts = [arguments["cache_salt"] for _, arguments in engine.asked if arguments]
    assert len({*salts, "s"}) == 3


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ({}, "candidates: Field required"),
        ({"candidates": []}, "candidates: List should have at least 1 item"),
        ({"candidates": [""]}, "no candidate can be empty"),
        ({"candidates": [[]]}, "no candidate can be empty"),
        ({"candidates": ["a", [1]]}, "must all be texts, or all token ids"),
        ({"candidates": [[1 << 31]]}, "candidates.0: must be a text or a list of token ids"),
        ({"candidates": ["\ud800"]}, "candidates.0: must be a text"),
        ({"prompt": [1], "candidates": ["a"]}, "must all be texts, or all token ids"),
        (
            {"messages": [{"role": "user", "content": []}], "candidates": ["a"]},
            "messages has to end with",
        ),
        (
            {"candidates": ["a"], "max_tokens": 1},
            "unknown key 'max_tokens'; the keys are cache_salt, candidates, messages",
        ),
        ({"candidates": ["a"] * (MAX_CANDIDATES + 1)}, "at most 256 items"),
        ({"prompt": "a" * (MAX_CHARS // 2), "candidates": ["a", "b"]}, "2,097,154 characters"),
        ({"prompt": [1] * (MAX_TOKENS // 2), "candidates": [[1], [2]]}, "1,048,578 tokens"),
    ],
)
def test_what_is_wrong_is_said_in_one_sentence(body: dict[str, Any], sentence: str) -> None:
    engine = FakeEngine(match=[0])
    answer = connect(engine).post("/v1/sgl/match", content=json.dumps(body), headers=JSON)
    text = answer.json()["detail"]
    assert answer.status_code == 400
    assert sentence in text and "\n" not in text
    assert engine.asked == []
