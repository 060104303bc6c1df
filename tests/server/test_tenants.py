"""What clients of one server learn from each other's cached prompts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from sgl_vllm.server_process import VllmServer
from tests.server.conftest import BLOCK, serve

pytestmark = pytest.mark.slow  # a server of its own

SECRET = [200 + 13 * place for place in range(15)]
KNOWN = SECRET[:5]


@pytest.fixture(scope="module")
def server() -> Iterator[VllmServer]:
    arguments = ["--enable-prompt-tokens-details"]
    options = {"tenant_from": "header:X-Tenant"}
    with serve(plugin=True, plugin_config=options, extra_args=arguments) as running:
        yield running


def post(server: VllmServer, path: str, body: dict[str, Any], tenant: str | None = None) -> Any:
    headers = {"X-Tenant": tenant} if tenant else {}
    body = {"model": "demo", **body}
    return httpx.post(f"{server.url}/v1/{path}", json=body, headers=headers, timeout=60)


def cached_tokens(server: VllmServer, prompt: list[int], **how: Any) -> int:
    tenant = how.pop("tenant", None)
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, **how}
    usage = post(server, "completions", body, tenant).json()["usage"]
    return (usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0


def num_requests_to_recover(server: VllmServer, **how: Any) -> int:
    """How many guesses it takes to learn `SECRET` token by token from what is told to be cached.

    The attacker knows the first five tokens and 26 candidates for each next one. 0 if no guess is
    told apart from the others.
    """
    assert cached_tokens(server, SECRET + [9] * 3, **how) <= BLOCK
    known, num_requests = list(KNOWN), 0
    while len(known) < len(SECRET):
        right = SECRET[len(known)]
        told = []
        for token in [3000 + number for number in range(25)] + [right]:
            # The last token of a prompt is always computed.
            told.append(cached_tokens(server, [*known, token, 8], **how))
            num_requests += 1
        if told[-1] == told[0]:
            return 0
        known.append(right)
    return num_requests


def test_without_a_tenant_no_guess_of_a_token_is_told_apart(server) -> None:
    assert num_requests_to_recover(server) == 0


def test_inside_a_tenant_the_exact_number_tells_each_guess_apart(server) -> None:
    """What every client could do if numbers were not rounded: 10 tokens of 26 guesses each."""
    assert num_requests_to_recover(server, tenant="one team") == 260


def test_whole_blocks_are_told_as_by_stock(server) -> None:
    prompt = [1000 + number for number in range(2 * BLOCK + 50)]
    assert cached_tokens(server, prompt) == 0
    assert cached_tokens(server, prompt) == 2 * BLOCK
    assert cached_tokens(server, prompt[: BLOCK + 40]) == BLOCK


def test_a_stream_and_a_batch_tell_whole_blocks_too(server) -> None:
    prompt = [1500 + number for number in range(BLOCK + 70)]
    assert cached_tokens(server, prompt) == 0
    body = {"prompt": prompt, "max_tokens": 2, "temperature": 0}
    streamed = post(
        server, "completions", body | {"stream": True, "stream_options": {"include_usage": True}}
    )
    events = [line.removeprefix("data: ") for line in streamed.text.splitlines() if "usage" in line]
    usage = json.loads(events[-1])["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == BLOCK
    whole = {"requests": [{"path": "completions", "body": {"model": "demo", **body}}]}
    answer = httpx.post(f"{server.url}/v1/sgl/batch", json=whole, timeout=60).json()
    assert answer["body"]["usage"]["prompt_tokens_details"]["cached_tokens"] == BLOCK


def test_a_tenant_is_told_every_token_of_its_own_prompts_and_none_of_others(server) -> None:
    prompt = [2000 + number for number in range(90)]
    seen = [cached_tokens(server, prompt, tenant=name) for name in ("a", "a", "b", "b", None)]
    assert seen == [0, 89, 0, 89, 0]
    assert cached_tokens(server, prompt, cache_salt="own", tenant="a") == 0
    assert cached_tokens(server, prompt, cache_salt="own", tenant="a") == 89


def test_a_pin_serves_the_tenant_that_made_it(server) -> None:
    prompt = [2500 + number for number in range(90)]
    assert post(server, "sgl/pin", {"prompt": prompt}, "a").status_code == 200
    assert cached_tokens(server, [*prompt, 9], tenant="a") == 90
    assert cached_tokens(server, [*prompt, 9], tenant="b") == 0


def test_a_score_uses_the_cache_of_its_salt_only(server) -> None:
    """By the plugin's own count of hits, as a score's usage is in whole blocks."""

    def num_hits() -> int:
        stats = httpx.get(f"{server.url}/v1/sgl/stats", timeout=60).json()
        return stats["radix"]["hit_tokens"]

    text = "Choose one of the two for this one question: "

    def hits_of(salt: str) -> int:
        before = num_hits()
        body = {
            "prompt": {"prompt": text},
            "continuations": [{"prompt": text + "apples, which are red"}],  # more would share
            "cache_salt": salt,
        }
        assert post(server, "sgl/score", body).status_code == 200
        return num_hits() - before

    first, second, other = hits_of("one"), hits_of("one"), hits_of("two")
    assert second > first == other


@pytest.mark.parametrize(
    "broken",
    [
        {"request_id": "\ud800"},
        {"bad_words": ["\ud800"]},
        {"vllm_xargs": {"sgl_fork_group": 1 << 70}},
    ],
)
def test_half_a_surrogate_pair_or_a_huge_number_is_a_400(server, broken) -> None:
    body = json.dumps({"model": "demo", "prompt": "Hi", "max_tokens": 1, **broken})
    headers = {"Content-Type": "application/json"}
    for route, text in (
        ("completions", body),
        ("sgl/batch", f'{{"requests": [{{"path": "completions", "body": {body}}}]}}'),
    ):
        answer = httpx.post(f"{server.url}/v1/{route}", content=text, headers=headers, timeout=60)
        status = answer.status_code if route == "completions" else answer.json()["status"]
        assert status == 400, answer.text
    assert cached_tokens(server, [5, 6, 7]) == 0


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("completions", {"prompt": "a"}),
        ("chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("sgl/pin", {"prompt": "a"}),
        ("sgl/match", {"candidates": ["a"]}),
        ("sgl/score", {"prompt": {"prompt": "a"}, "continuations": [{"prompt": "ab"}]}),
    ],
)
@pytest.mark.parametrize("salt", ["x" * 5_000_000, "a/b", ""])
def test_a_salt_that_vllm_refuses_is_refused_everywhere(server, route, body, salt) -> None:
    answer = post(server, route, {**body, "cache_salt": salt})
    assert answer.status_code == 400
    assert "cache_salt" in answer.text and len(answer.text) < 2000


def test_a_request_id_of_megabytes_is_refused_and_not_kept(server) -> None:
    body: dict[str, Any] = {"model": "demo", "prompt": "a", "request_id": "x" * 5_000_000}
    for stream in (False, True):
        answer = post(server, "completions", {**body, "stream": stream})
        assert (
            "request_id, with what vLLM adds to it, is too long" in answer.text
            and len(answer.text) < 500
        )
    whole = {"requests": [{"path": "completions", "body": body}]}
    answer = httpx.post(f"{server.url}/v1/sgl/batch", json=whole, timeout=60).json()
    assert answer["status"] == 400
    assert post(server, "completions", {**body, "request_id": "x" * 400}).status_code == 200


def test_a_long_text_to_pin_is_refused_before_it_is_tokenized(server) -> None:
    answer = post(server, "sgl/pin", {"prompt": "word " * 600_000})
    assert answer.status_code == 400
    assert "maximum context length" in answer.json()["error"]["message"]
