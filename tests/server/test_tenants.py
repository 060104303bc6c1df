"""What clients of one server learn of each other's cached prompts, why their own were not cached
(`GET /v1/sgl/why`), and segments that they mark and reuse from another order."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

import sgl_vllm as sgl
from sgl_vllm.server_process import VllmServer
from tests.server.conftest import API_KEY, BLOCK, HEADERS, flush, serve

pytestmark = pytest.mark.slow  # a server of its own

SECRET = [200 + 13 * place for place in range(10)]
KNOWN = SECRET[:5]
PROMPT = [100 + place for place in range(200)]


@pytest.fixture(scope="module")
def server() -> Iterator[VllmServer]:
    """With a small cache."""
    arguments = ["--api-key", API_KEY, "--enable-prompt-tokens-details"]
    arguments += ["--num-gpu-blocks-override", "24"]
    options = {"tenant_from": "header:X-Tenant", "approximate_reuse": True}
    with serve(plugin=True, plugin_config=options, extra_args=arguments) as running:
        yield running


def post(server: VllmServer, path: str, body: dict[str, Any], tenant: str | None = None) -> Any:
    headers = {**HEADERS, **({"X-Tenant": tenant} if tenant else {})}
    if "requests" not in body:  # of a batch
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
    """What every client could do if numbers were not rounded: 5 tokens of 26 guesses each."""
    assert num_requests_to_recover(server, tenant="one team") == 130


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
    answer = post(server, "sgl/batch", whole).json()
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


RULES = "Answer in one short sentence, and name the river that the heron lives at. " * 25
TURN = [{"role": "user", "content": RULES}]
MARKED = {"type": "text", "text": RULES, "cache_control": {"type": "ephemeral", "ttl": "1h"}}


@pytest.mark.parametrize(
    ("route", "body", "is_kept"),
    [
        ("completions", {"prompt": RULES}, False),
        ("completions", {"prompt": RULES, "prompt_cache_retention": "24h"}, True),
        ("chat/completions", {"messages": TURN, "nvext": {"cache_control": {"ttl": "5m"}}}, True),
        ("chat/completions", {"messages": [{"role": "user", "content": [MARKED]}]}, True),
        ("messages", {"messages": TURN, "system": [MARKED]}, True),
        ("responses", {"input": RULES, "prompt_cache_options": {"ttl": "30m"}}, True),
        ("responses", {"input": RULES, "prompt_cache_options": {"ttl": "999999999d"}}, False),
        ("completions", {"prompt": RULES, "prompt_cache_options": [RULES]}, False),
        ("messages", {"messages": TURN, "cache_control": {"ttl": {"s": 5}}}, False),
    ],
)
def test_a_prefix_that_a_client_asks_to_keep_outlives_others_of_its_tenant(
    server, route, body, is_kept
) -> None:
    limit = {"max_output_tokens" if route == "responses" else "max_tokens": 1}
    tenant, chat = str(hash(str(body))), [{"role": "user", "content": "Answer"}]
    assert post(server, route, {**body, **limit}, tenant).status_code == 200
    for number in range(12):  # whole blocks for all of the cache
        cached_tokens(server, [100 + number, *range(300, 600)], tenant=tenant)
    ask = {"candidates": [RULES[len("Answer") :]], "messages": chat}
    if "system" in body:
        ask["messages"] = [{"role": "system", "content": "Answer"}]
    if "prompt" in body:
        ask = {"candidates": [RULES]}
    num_tokens, num_cached = post(server, "sgl/match", ask, tenant).json().values()
    assert (num_cached[0] > num_tokens[0] - 2 * BLOCK) if is_kept else num_cached[0] == 0


def test_a_tenant_that_marks_everything_takes_nothing_from_another(server) -> None:
    def left(**how: Any) -> list[int]:
        """Of the other's prompts, when both have used more than the cache, by turns."""
        for number in range(16):
            tenant, marks = (f"hostile {how}", how) if number % 2 else (f"other {how}", {})
            cached_tokens(server, [50 + number, *range(300)], tenant=tenant, **marks)
        asked = {"candidates": [[50 + number, *range(300)] for number in range(0, 16, 2)]}
        return post(server, "sgl/match", asked, f"other {how}").json()["cached_tokens"]

    unmarked = left()
    assert unmarked == left(prompt_cache_retention="24h")
    assert 0 < sum(map(bool, unmarked)) < 8


def test_a_score_uses_the_cache_of_its_salt_only(server) -> None:
    """By the plugin's own count of hits, as a score's usage is in whole blocks."""

    def num_hits() -> int:
        stats = httpx.get(f"{server.url}/v1/sgl/stats", headers=HEADERS, timeout=60).json()
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


@pytest.mark.parametrize("salt", ["x" * 5_000_000, "a/b", ""], ids=["long", "slash", "empty"])
def test_a_salt_that_vllm_refuses_is_refused_everywhere(server, salt) -> None:
    bodies: dict[str, dict[str, Any]] = {
        "completions": {"prompt": "a"},
        "chat/completions": {"messages": [{"role": "user", "content": "a"}]},
        "sgl/pin": {"prompt": "a"},
        "sgl/match": {"candidates": ["a"]},
        "sgl/score": {"prompt": {"prompt": "a"}, "continuations": [{"prompt": "ab"}]},
    }
    for route, body in bodies.items():
        answer = post(server, route, {**body, "cache_salt": salt})
        assert answer.status_code == 400, route
        assert "cache_salt" in answer.text and len(answer.text) < 2000


# -- why ------------------------------------------------------------------------------------------


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


# -- segments that are marked ----------------------------------------------------------------------

DOCUMENTS = [f"{name} lives near the river and is old.\n" * 12 for name in ("Ann", "Bo", "Cy")]
SYSTEM, HEAD, QUESTION = "You read notes.", "Some notes.\n", "Who is old?"


def marks(documents: list[str], start: int) -> list[int]:
    found = []
    for text in documents:
        found += [start, start + len(text)]
        start += len(text)
    return found


def marked(documents: list[str], start: int, salt: str, reuse: bool) -> dict[str, Any]:
    """Arguments of a request of the official client."""
    extra: dict[str, Any] = {"sgl_segments": marks(documents, start)}
    if reuse:
        extra["sgl_reuse"] = "approximate"
    body = {"vllm_xargs": extra, "cache_salt": salt}
    return {"model": "demo", "max_tokens": 1, "temperature": 0, "extra_body": body}


def chat(client: openai.OpenAI, documents: list[str], salt: str, reuse: bool) -> Any:
    messages: Any = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": HEAD + "".join(documents) + QUESTION},
    ]
    request = marked(documents, len(SYSTEM) + len(HEAD), salt, reuse)
    return client.chat.completions.create(messages=messages, **request)


def complete(client: openai.OpenAI, documents: list[str], salt: str, reuse: bool) -> Any:
    """The chat as a text with special tokens, whose characters the marks count."""
    begin = f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n{HEAD}"
    prompt = begin + "".join(documents) + QUESTION
    request = marked(documents, len(begin), salt, reuse)
    return client.completions.create(prompt=prompt, **request)


def reuse_of(answer: Any) -> dict[str, int] | None:
    return (answer.model_extra["kv_transfer_params"] or {}).get("sgl_reuse")


@pytest.mark.parametrize("ask", [chat, complete])
def test_marked_segments_are_reused_from_another_order(client, ask) -> None:
    name = ask.__name__
    first = ask(client, DOCUMENTS, name, reuse=False)
    assert reuse_of(first) is None
    answer = ask(client, DOCUMENTS[::-1], name, reuse=True)
    reused = reuse_of(answer)
    assert reused is not None and reused["reused_segments"] == 3
    assert 0.5 * answer.usage.prompt_tokens < reused["reused_tokens"]
    other = ask(client, DOCUMENTS[::-1], f"{name} of another", reuse=True)
    assert reuse_of(other) == {"reused_tokens": 0, "reused_segments": 0}


@sgl.function
def in_short(s, documents, reuse):
    s += sgl.system(SYSTEM)
    s += sgl.user(HEAD + sgl.any_order(documents, key=documents.index, reuse=reuse) + QUESTION)
    s += sgl.assistant(sgl.gen("answer", max_tokens=8))


def test_a_program_with_roles_reuses_them(server) -> None:
    backend = sgl.VLLM(server.url, api_key=API_KEY)
    in_short.run(DOCUMENTS, "approximate", backend=backend)
    usage = in_short.run(DOCUMENTS[::-1], "approximate", backend=backend).usage
    assert 0.5 * usage.prompt_tokens < usage.reused_tokens < usage.prompt_tokens
