"""`POST /v1/sgl/batch` on the real server: the same answers, as soon as they are there."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import httpx

from sgl_vllm.protocol.request_keys import REPORT

PERSON = r'\{"name": "[A-Z][a-z]{2,8}", "age": [1-9][0-9]\}'
FORMAT: dict[str, Any] = {"structured_outputs": {"regex": PERSON}}
LONG: dict[str, Any] = {"prompt": "Once", "max_tokens": 1000, "ignore_eos": True, "temperature": 0}


def complete(prompt: str | list[str] | list[int], **more: Any) -> dict[str, Any]:
    body = {"model": "demo", "prompt": prompt, "max_tokens": 8, "temperature": 0, **more}
    return {"path": "completions", "body": body}


def chat(text: str, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    body = {"model": "demo", "messages": messages, "max_tokens": 8, "temperature": 0, **more}
    return {"path": "chat/completions", "body": body}


def lines_of(answer: httpx.Response) -> list[dict[str, Any]]:
    assert answer.status_code == 200, answer.text
    return [json.loads(line) for line in answer.text.split("\n")[:-1]]


def run(http: httpx.Client, *requests: dict[str, Any]) -> list[dict[str, Any]]:
    """The lines in the order of the requests."""
    lines = lines_of(http.post("/sgl/batch", json={"requests": requests}))
    assert sorted(line["index"] for line in lines) == list(range(len(requests)))
    return sorted(lines, key=lambda line: line["index"])


def alone(http: httpx.Client, request: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    answer = http.post(f"/{request['path']}", json=request["body"])
    return answer.status_code, answer.json()


def comparable(body: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in body.items() if key not in ("id", "created")}


def wait_until(holds: Callable[[], bool], timeout_s: float = 20) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, "it does not come to that"
        time.sleep(0.05)


def num_running(server) -> float:
    metrics = server.metrics()
    return metrics["vllm:num_requests_running"] + metrics["vllm:num_requests_waiting"]


GOOD = {
    "a text": complete("The capital of France"),
    "token ids": complete([5, 6, 7]),
    "several prompts": complete(["Once", "Twice"], n=2, temperature=0.7, seed=1),
    "log-probabilities": complete("Once", logprobs=2, prompt_logprobs=0),
    "separators of lines in the text": complete("One\u2028two\u0085three\x0bfour", echo=True),
    "a format": complete("A card: ", max_tokens=60, **FORMAT),
    "a report": chat("Who are you?", max_tokens=60, vllm_xargs={REPORT: 1}, **FORMAT),
    "a chat": chat("Who are you?"),
    "a chat with log-probabilities": chat("Who are you?", logprobs=True, top_logprobs=2),
}
BAD = {
    "no such model": complete("Once", model="none"),
    "a chat with no such model": chat("Once", model="none"),
    "a wrong type": complete("Once", max_tokens="many"),
    "two wrong types": chat("Once", max_tokens="many", temperature=[]),
    "no prompt": {"path": "completions", "body": {"model": "demo"}},
    "no messages": {"path": "chat/completions", "body": {"model": "demo"}},
    "a body that is no object": {"path": "completions", "body": [1]},
    "too long": complete([5] * 3000),
    "out of vocabulary": complete([10**9]),
    "a bad grammar": complete("Once", structured_outputs={"regex": "[a-"}),
    "two formats": chat("Once", structured_outputs={"regex": "a", "choice": ["a"]}),
}


def test_every_line_is_what_the_route_answers(http):
    lines = run(http, *GOOD.values())
    for (name, request), line in zip(GOOD.items(), lines, strict=True):
        status, body = alone(http, request)
        assert line["status"] == status == 200, name
        assert comparable(line["body"]) == comparable(body), name
        if name == "a report":
            assert body["kv_transfer_params"][REPORT]["forced_bytes"]


def test_every_error_is_what_the_route_answers_and_hurts_no_neighbour(http):
    good = complete("The capital of France")
    requests = [request for bad in BAD.values() for request in (bad, good)]
    lines = run(http, *requests)
    for (name, request), line in zip(BAD.items(), lines[::2], strict=True):
        status, body = alone(http, request)
        assert (line["status"], line["body"]) == (status, body), name
        assert 400 <= status < 500, name
    _, body = alone(http, good)
    for line in lines[1::2]:
        assert comparable(line["body"]) == comparable(body)


def test_an_answer_comes_as_soon_as_it_is_there(server, http):
    requests = [complete(**{**LONG, "max_tokens": 1000}), complete("Once")]
    with http.stream("POST", "/sgl/batch", json={"requests": requests}) as answer:
        assert answer.headers["content-type"].startswith("application/x-ndjson")
        lines = answer.iter_lines()
        assert json.loads(next(lines))["index"] == 1
        wait_until(lambda: num_running(server) == 1)
        assert json.loads(next(lines))["index"] == 0


def test_a_client_that_goes_leaves_nothing_running(server, http):
    wait_until(lambda: num_running(server) == 0)
    requests = [complete(**LONG) for _ in range(12)] + [chat("Hi", max_tokens=2000, n=2)]
    requests += [complete(["One", "Two"], max_tokens=2000, ignore_eos=True)]
    with http.stream("POST", "/sgl/batch", json={"requests": requests}):
        wait_until(lambda: num_running(server) >= 12)
    wait_until(lambda: num_running(server) == 0, timeout_s=3)
    before = server.counters().output_tokens
    time.sleep(0.5)
    assert server.counters().output_tokens == before


def test_single_requests_are_stopped_by_their_ids(server, http):
    wait_until(lambda: num_running(server) == 0)
    before = server.counters().output_tokens
    longer = {**LONG, "max_tokens": 800}  # their stop comes long before the others' end
    requests = [{**complete(**longer), "id": f"r{i}"} for i in range(4)]
    with http.stream("POST", "/sgl/batch", json={"requests": requests}) as answer:
        wait_until(lambda: num_running(server) == 4)
        stop = {"ids": ["r1", "r2", "r2", "unknown"]}
        assert http.post("/sgl/batch/abort", json=stop).json() == {"aborted": 2}
        assert http.post("/sgl/batch/abort", json=stop).json() == {"aborted": 0}
        lines = [json.loads(line) for line in answer.iter_lines()]
    assert {line["index"] for line in lines[:2]} == {1, 2}
    by_index = {line["index"]: line for line in lines}
    assert server.counters().output_tokens - before < 3 * 800  # of 4 * 800
    assert [by_index[i]["status"] for i in range(4)] == [200, 499, 499, 200]
    assert by_index[1]["body"]["error"]["message"] == "the request was aborted"
    assert by_index[3]["body"]["usage"]["completion_tokens"] == 800
    assert http.post("/sgl/batch/abort", json={"ids": ["r0", "r3"]}).json() == {"aborted": 0}


def test_a_request_is_stopped_also_right_at_its_start(server, http):
    """Whatever the abort meets: a request not started, tokenized just now, running, or ended."""
    for _ in range(5):
        requests = [{**complete(**LONG), "id": f"s{i}"} for i in range(100)]
        with http.stream("POST", "/sgl/batch", json={"requests": requests}) as answer:
            ids = [f"s{i}" for i in range(100)]
            aborted = http.post("/sgl/batch/abort", json={"ids": ids}).json()["aborted"]
            lines = [json.loads(line) for line in answer.iter_lines()]
        assert aborted == 100
        assert [line["status"] for line in lines] == [499] * 100
    wait_until(lambda: num_running(server) == 0, timeout_s=3)


def test_an_id_of_the_batch_is_that_of_its_answers_with_their_index(http):
    headers = {"X-Request-Id": "mine"}
    requests = [complete("Once"), chat("Once")]
    answer = http.post("/sgl/batch", json={"requests": requests}, headers=headers)
    ids = {line["index"]: line["body"]["id"] for line in lines_of(answer)}
    assert ids == {0: "cmpl-mine-0", 1: "chatcmpl-mine-1"}
