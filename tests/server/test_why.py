"""`GET /v1/sgl/why` of a real server, as the official client's user and a terminal's ask it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from sgl_vllm.commands import cli
from sgl_vllm.server_process import VllmServer
from tests.server.conftest import API_KEY, BLOCK, HEADERS, flush, serve

pytestmark = pytest.mark.slow  # a server of its own

PROMPT = [100 + place for place in range(200)]


@pytest.fixture(scope="module")
def server() -> Iterator[VllmServer]:
    arguments = ["--api-key", API_KEY, "--num-gpu-blocks-override", "24"]
    with serve(
        plugin=True, plugin_config={"tenant_from": "header:X-Tenant"}, extra_args=arguments
    ) as running:
        yield running


def ask(client: openai.OpenAI, prompt: list[int], tenant: str | None = None, **more: Any) -> str:
    """Returns the id of the answer."""
    headers = {"X-Tenant": tenant} if tenant else {}
    return client.completions.create(
        model="demo", prompt=prompt, max_tokens=1, temperature=0, extra_headers=headers, **more
    ).id


def why(server: VllmServer, request: str, **headers: str) -> httpx.Response:
    names = {"tenant": "X-Tenant", "salt": "X-Cache-Salt"}
    given = {names[name]: value for name, value in headers.items()}
    return httpx.get(
        f"{server.url}/v1/sgl/why",
        params={"request": request},
        headers={**HEADERS, **given},
        timeout=60,
    )


def causes(answer: httpx.Response) -> list[tuple[str, int, int]]:
    (request,) = answer.json()["requests"]
    return [(one["cause"], one["start"], one["end"]) for one in request["causes"]]


def test_a_tenant_is_told_to_the_token(server, http, client) -> None:
    flush(http)
    ids = [
        ask(client, prompt, "a")
        for prompt in (PROMPT, PROMPT, [*PROMPT[:150], *range(50)], [*PROMPT, 7])
    ]
    assert [causes(why(server, one, tenant="a")) for one in ids] == [
        [("new", 0, 200)],
        [("last_token", 199, 200)],
        [("differs", 150, 200)],
        [("new", 200, 201)],
    ]


def test_evictions_and_flushes_are_told(server, http, client) -> None:
    flush(http)
    ask(client, PROMPT, "b")
    for number in range(4):
        ask(client, [(7919 * number + 31 * place) % 4000 + 20 for place in range(1000)], "b")
    answer = why(server, ask(client, PROMPT, "b"), tenant="b")
    assert causes(answer) == [("evicted", 0, 200)]
    assert 0 < answer.json()["requests"][0]["causes"][0]["before_s"] < 600
    flush(http)
    assert causes(why(server, ask(client, PROMPT, "b"), tenant="b")) == [("flushed", 0, 200)]


def test_no_other_tenant_can_ask_for_a_request(server, http, client) -> None:
    request = ask(client, PROMPT, "a")
    with_salt = ask(client, PROMPT, "a", extra_body={"cache_salt": "s"})
    assert why(server, request, tenant="a").status_code == 200
    assert why(server, with_salt, tenant="a", salt="s").status_code == 200
    for answer in (
        why(server, request),
        why(server, request, tenant="b"),
        why(server, with_salt, tenant="a"),
        why(server, with_salt, tenant="b", salt="s"),
        why(server, "cmpl-0", tenant="a"),
    ):
        assert answer.status_code == 404
        assert "no request" in answer.json()["error"]["message"]
    assert httpx.get(f"{server.url}/v1/sgl/why?request={request}").status_code == 401


def test_no_tenant_learns_what_another_has_sent(server, http, client) -> None:
    """Neither while it is cached, nor once it is evicted, nor with a salt of its own."""
    secret = [3000 + place for place in range(300)]
    guess = [*secret[:250], 5]
    ask(client, secret, "a")
    with_own_salt = ask(client, guess, "c", extra_body={"cache_salt": "a"})
    assert causes(why(server, with_own_salt, tenant="c", salt="a")) == [("new", 0, 251)]
    assert causes(why(server, ask(client, guess, "d"), tenant="d")) == [("new", 0, 251)]
    assert causes(why(server, ask(client, guess))) == [("not_cached", 0, 251)]
    flush(http)
    assert causes(why(server, ask(client, guess, "e"), tenant="e")) == [("new", 0, 251)]
    assert causes(why(server, ask(client, secret))) == [("not_cached", 0, 300)]


def test_without_a_tenant_whole_blocks_are_told(server, http, client) -> None:
    flush(http)
    ask(client, PROMPT)
    for guess in (PROMPT[:190], [*PROMPT[:150], 9]):
        request = ask(client, [*guess, 8])
        assert causes(why(server, request)) == [("not_cached", BLOCK, len(guess) + 1)]


def test_the_causes_add_up_in_the_stats_and_in_the_metrics(server, http) -> None:
    misses = http.get("/sgl/stats").json()["misses"]
    total = misses.pop("missed_prompt_tokens")
    assert total == sum(misses.values()) > 0
    text = httpx.get(f"{server.url}/metrics").text
    lines = [line for line in text.splitlines() if line.startswith("sgl_vllm:missed_")]
    by_cause = [float(line.split()[-1]) for line in lines if "missed_tokens_total{" in line]
    (all_of_them,) = (
        float(line.split()[-1]) for line in lines if "missed_prompt_tokens_total" in line
    )
    assert sum(by_cause) == all_of_them == total and len(by_cause) == len(misses)


def test_the_command_prints_it(server, http, client, capsys, monkeypatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", API_KEY)
    flush(http)
    salt: dict[str, Any] = {"extra_body": {"cache_salt": "mine"}}
    ask(client, PROMPT, **salt)
    request = ask(client, [*PROMPT[:150], 1, 2, 3], **salt)
    assert cli.main(["why", server.url, request, "--cache-salt", "mine"]) == 0
    head, line = capsys.readouterr().out.splitlines()
    assert head.startswith(f"{request}-0-") and head.endswith(
        ": 150 of 153 prompt tokens cached, 3 computed"
    )
    assert line == "        [150, 153)        3  the prompt differs from what is cached"
    assert cli.main(["why", server.url, request, "--cache-salt", "mine", "--json"]) == 0
    (answer,) = json.loads(capsys.readouterr().out)["requests"]
    assert answer["num_missed_tokens"] == 3 and answer["engine"] == 0
    assert cli.main(["why", server.url, request]) == 1
    assert "no request" in capsys.readouterr().err
