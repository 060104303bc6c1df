"""Formats that are meant to harm: each is answered in time, and other clients notice nothing."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import httpx
import psutil
import pytest

from tests.hostile_formats import FORMATS
from tests.server.conftest import HEADERS

TIMEOUT_S = 20
"""`COMPILE_TIMEOUT_S`, and what a busy machine adds."""


@pytest.fixture(scope="module")
def http(server) -> httpx.Client:
    headers = {**HEADERS, "Content-Type": "application/json"}
    return httpx.Client(base_url=f"{server.url}/v1", headers=headers, timeout=60)


def complete(http: httpx.Client, structured: dict[str, Any]) -> httpx.Response:
    body = {"model": "demo", "prompt": "Hi", "max_tokens": 16, "structured_outputs": structured}
    return http.post("/completions", content=json.dumps(body))


@pytest.mark.parametrize("name", FORMATS)
def test_it_is_answered_in_time_and_others_are_served(http, name):
    structured, expected = FORMATS[name]
    others: list[int] = []

    def be_served() -> None:
        for choice in ("yes", "no"):
            others.append(
                complete(http, {"choice": [f"{choice}, while there is {name}"]}).status_code
            )

    other = threading.Thread(target=be_served)
    begun = time.monotonic()
    other.start()
    answer = complete(http, structured)
    assert time.monotonic() - begun < TIMEOUT_S
    assert answer.status_code == expected, answer.text[:500]
    if answer.status_code != 200:
        assert answer.json()["error"]["message"]
    other.join()
    assert others == [200, 200]
    assert http.get("/sgl/stats").json()["parts"]["fsm"] == "on"


NOTHING = {"regex": r"[^\s\S]"}
MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/completions", {"prompt": "Hi", "n": 3}),
        ("/completions", {"prompt": "Hi", "stream": True, "n": 2}),
        ("/chat/completions", {"messages": MESSAGES}),
        ("/chat/completions", {"messages": MESSAGES, "stream": True}),
    ],
)
def test_what_the_engine_refuses_is_a_400_with_the_reason(http, path, fields):
    body = {"model": "demo", "max_tokens": 8, "structured_outputs": NOTHING, **fields}
    answer = http.post(path, content=json.dumps(body))
    if "stream" in fields:
        assert answer.status_code == 200
        *events, last = [line for line in answer.text.splitlines() if line]
        assert last == "data: [DONE]"
        error = json.loads(events[-1].removeprefix("data: "))["error"]
    else:
        assert answer.status_code == 400
        error = answer.json()["error"]
    assert (error["code"], error["message"]) == (400, "no text satisfies the regex")


def test_a_refused_prompt_ends_the_others_of_its_batch_and_is_logged_in_a_line(http, server):
    body = {"model": "demo", "prompt": ["Hi", "Ho"], "structured_outputs": NOTHING}
    assert http.post("/completions", content=json.dumps(body)).status_code == 400
    *_, line = [line for line in server.log_path.read_text().splitlines() if "Failed to" in line]
    assert line.endswith(": 'no text satisfies the regex'")


LONG = "x" * 10_000_000


@pytest.mark.parametrize(
    ("kind", "structured"),
    [
        ("JSON schema", {"json": {"enum": [LONG]}}),
        ("JSON schema", {"json": json.dumps({"enum": [LONG]})}),
        ("regex", {"regex": LONG}),
        ("grammar", {"grammar": f'root ::= "{LONG}"'}),
        ("choice", {"choice": [LONG]}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_format_of_10_mb_is_refused_by_its_length(http, kind, structured):
    answer = complete(http, structured)
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert f"a {kind} of 10,000,0" in message and "at most 4,194,304" in message


def test_a_body_beyond_the_limit_is_a_413_before_it_is_parsed(http):
    answer = http.post("/completions", content=b"no JSON" * 10_000_000)
    assert answer.status_code == 413
    assert "max_body_mb" in answer.json()["error"]["message"]


def test_what_is_no_utf_8_is_a_400(http):
    body = b'{"model": "demo", "prompt": "Hi", "structured_outputs": {"regex": "\xff\xfe"}}'
    assert http.post("/completions", content=body).status_code == 400


@pytest.mark.parametrize(
    "structured",
    [{"regex": "(a?)" * 25_001}, {"json": {"type": "array", "minItems": 60_000_001}}],
    ids=["options", "items"],
)
def test_nothing_goes_on_taking_memory_after_its_answer(http, server, structured):
    def resident_bytes() -> int:
        guard = psutil.Process(server.pid)
        return sum(process.memory_info().rss for process in guard.children(recursive=True))

    assert complete(http, {"choice": ["yes"]}).status_code == 200
    before = resident_bytes()
    assert complete(http, structured).status_code == 400
    time.sleep(3)
    assert resident_bytes() < before + (256 << 20)
