"""`POST /v1/sgl/match` on the real server: what it tells of the cache, and that it only reads."""

from __future__ import annotations

from typing import Any

import httpx


def run(http: httpx.Client, **body: Any) -> dict[str, Any]:
    path = "chat/completions" if "messages" in body else "completions"
    answer = http.post(path, json={"model": "demo", "max_tokens": 1, "temperature": 0, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()["usage"]


def match(http: httpx.Client, **body: Any) -> dict[str, list[int]]:
    answer = http.post("sgl/match", json={"model": "demo", **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def cache(http: httpx.Client) -> tuple[Any, ...]:
    """What would show that something was read or used."""
    (engine,) = http.get("sgl/tree").json()["engines"]
    uses = sorted((n["num_tokens"], n["hits"], n["num_locked_blocks"]) for n in engine["nodes"])
    return http.get("sgl/stats").json()["radix"], uses


def documents(salt: str) -> list[str]:
    names = ("hare", "fox", "tortoise", "owl")
    return [f"The {name} of {salt} lived near the river. It was old.\n" * 5 for name in names]


def test_with_a_salt_every_cached_token_is_told(http) -> None:
    first, second, third, _ = documents("one")
    num_prompt = run(http, prompt=first + second, cache_salt="one")["prompt_tokens"]
    told = match(http, prompt=first, candidates=[second, third, second + third], cache_salt="one")
    assert told["num_tokens"][0] == num_prompt
    assert told["cached_tokens"][0] == told["cached_tokens"][2] == num_prompt
    (head,) = match(http, candidates=[first], cache_salt="one")["num_tokens"]
    assert head <= told["cached_tokens"][1] < head + 10  # "The ", with which both go on


def test_a_chat_is_looked_up_as_its_template_renders_it(http) -> None:
    first, second, third, _ = documents("chat")
    turn = {"role": "user", "content": first + second}
    num_prompt = run(http, messages=[turn], cache_salt="chat")["prompt_tokens"]
    told = match(
        http,
        messages=[{"role": "user", "content": first}],
        candidates=[second, third],
        cache_salt="chat",
    )
    assert told["num_tokens"][0] < num_prompt  # without the end of the turn
    assert told["cached_tokens"][0] == told["num_tokens"][0]
    assert told["cached_tokens"][1] < told["num_tokens"][1] // 2 + 10


def test_a_match_changes_nothing_in_the_cache(http) -> None:
    text = documents("four")[0] * 3
    run(http, prompt=text, cache_salt="four")
    before = cache(http)
    for _ in range(3):
        assert match(http, candidates=[text, "none"], cache_salt="four")["cached_tokens"][0] > 0
    assert cache(http) == before
