"""`POST /v1/sgl/score` on the real server: what a client gets by itself, in one request."""

from __future__ import annotations

import math
from typing import Any

import httpx
import pytest

import sgl_vllm as sgl
from sgl_vllm.lang.loop import background_loop
from sgl_vllm.lang.prompts import ChatPrompt, Message, TextPrompt
from tests.server.conftest import API_KEY

PROMPT = "The hare lived at the edge of a large and dark forest. " * 20 + "It was"
CHOICES = (" old", " very young", " a hare")
MESSAGES = (Message("user", PROMPT), Message("assistant", "It was"))
PROMPTS = [TextPrompt(PROMPT), TextPrompt(""), ChatPrompt(MESSAGES, "continue")]


class Counting(sgl.VLLM):
    """Counts its calls."""

    def __init__(self, url: str) -> None:
        super().__init__(url, api_key=API_KEY)
        self.paths: list[str] = []

    async def call(self, url, body=None, headers=None) -> dict[str, Any]:
        self.paths.append(url.removeprefix(self.url))
        return await super().call(url, body, headers)


class ByItself(Counting):
    """Asks for tokens and log-probabilities by itself, as of a server without the route."""

    async def score(self, prompt, choices, *, unconditional, warm):
        return await self.score_by_prompts(prompt, choices, unconditional, warm)


def wait_for(coroutine):
    background = background_loop()
    return background.wait_for(background.start(coroutine))


@pytest.mark.parametrize("prompt", PROMPTS, ids=["text", "empty", "chat"])
@pytest.mark.parametrize("unconditional", [False, True])
def test_scores_are_those_that_a_client_gets_by_itself(server, prompt, unconditional):
    choices = tuple(choice * 2 for choice in CHOICES)  # two tokens, also without a prompt
    at_once, by_itself = (
        wait_for(kind(server.url).score(prompt, choices, unconditional=unconditional, warm=True))
        for kind in (Counting, ByItself)
    )
    for one, other in zip(at_once.choices, by_itself.choices, strict=True):
        assert one.token_ids == other.token_ids
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-3)
        assert (one.unconditional_logprobs is not None) == unconditional
        if unconditional:
            others = pytest.approx(other.unconditional_logprobs, abs=1e-3)
            assert one.unconditional_logprobs == others
    assert at_once.usage.calls == by_itself.usage.calls
    assert at_once.usage.prompt_tokens == by_itself.usage.prompt_tokens


def test_choices_of_one_token_are_scored_as_next_tokens_in_one_request(server):
    choices = (" old", " a", " in", " the", " old")
    prompt = TextPrompt("A new prompt, which nobody has seen, of some length. " * 9 + PROMPT)
    before = server.counters()
    at_once = wait_for(Counting(server.url).score(prompt, choices, unconditional=False, warm=False))
    spent = server.counters() - before
    assert all(len(choice.token_ids) == 1 for choice in at_once.choices)
    assert spent.output_tokens == at_once.usage.calls == 1
    assert spent.prompt_tokens == at_once.usage.prompt_tokens
    by_itself = wait_for(
        ByItself(server.url).score(prompt, choices, unconditional=False, warm=False)
    )
    for one, other in zip(at_once.choices, by_itself.choices, strict=True):
        assert one.token_ids == other.token_ids
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-3)


URL = {"url": "http://127.0.0.1:9/picture.png"}
PICTURE = {"role": "user", "content": [{"type": "image_url", "image_url": URL}]}
A: dict[str, Any] = {"prompt": "a"}


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ({"prompt": A, "continuations": []}, 400, "continuations"),
        ({"prompt": {"messages": ["Hi"]}, "continuations": [A]}, 400, "messages.0: Input"),
        ({"prompt": A, "continuations": [A], "model": "nobody"}, 404, "nobody"),
        ({"prompt": A, "continuations": [{"prompt": "a b c d " * 3000}]}, 400, "context length"),
        ({"prompt": {"prompt": ""}, "continuations": [A]}, 400, "no token"),
        ({"prompt": {"messages": [PICTURE]}, "continuations": [A]}, 400, "only prompts"),
    ],
)
def test_what_cannot_be_scored_is_refused_and_said(http, body, status, said):
    answer = http.post("/sgl/score", json={"model": "demo", **body})
    assert answer.status_code == status, answer.text
    assert said in answer.text
    assert http.get("/sgl/stats").status_code == 200


# -- /generative_scoring ------------------------------------------------------------------------

BAD_LABELS: list[Any] = [[], [""], [[]], "yes", [1], [[-1]], [None]]
QUERY, ITEMS = "Is this animal fast? ", ["The hare.", "The turtle, of course."]


def score_labels(server, **body: Any) -> Any:
    url = server.url + "/generative_scoring"
    body = {"model": "demo", "query": QUERY, "items": ITEMS, "label_token_ids": [], **body}
    return httpx.post(url, json=body, headers={"Authorization": f"Bearer {API_KEY}"}, timeout=60)


@pytest.mark.parametrize("apply_softmax", [True, False])
def test_labels_of_several_tokens_have_the_probability_of_all_their_tokens(
    server, http, apply_softmax
):
    labels = [" yes, it is", " not at all", " no"]
    answer = score_labels(server, labels=labels, apply_softmax=apply_softmax).json()

    def probability(item: str, label: str) -> float:
        def tokens(text: str) -> list[int]:
            body = {"model": "demo", "prompt": text, "add_special_tokens": False}
            answer = httpx.post(server.url + "/tokenize", json=body, headers=http.headers)
            return answer.json()["tokens"]

        prompt = tokens(QUERY) + tokens(item) + tokens(label)
        body = {"model": "demo", "prompt": prompt, "max_tokens": 1, "prompt_logprobs": 0}
        rows = http.post("/completions", json=body).json()["choices"][0]["prompt_logprobs"]
        ending = zip(tokens(label), rows[-len(tokens(label)) :], strict=True)
        return math.exp(sum(row[str(token)]["logprob"] for token, row in ending))

    for item, got in zip(ITEMS, answer["data"], strict=True):
        want = [probability(item, label) for label in labels]
        if apply_softmax:
            want = [one / sum(want) for one in want]
        assert got["label_scores"] == pytest.approx(want, rel=1e-3)
        assert got["score"] == got["label_scores"][0]


def test_labels_of_one_token_have_vllms_score(server):
    ids = [300, 400]
    ours = score_labels(server, labels=[[one] for one in ids]).json()["data"]
    vllms = score_labels(server, label_token_ids=ids).json()["data"]
    assert [one["score"] for one in ours] == pytest.approx([one["score"] for one in vllms])


@pytest.mark.parametrize(
    ("body", "status"),
    [
        *(({"labels": labels}, 400) for labels in BAD_LABELS),
        ({"labels": [" yes"], "label_token_ids": [5]}, 400),
        ({"labels": [" yes"], "items": []}, 400),
        ({"labels": [" yes"], "model": "nobody"}, 404),
        ({"labels": [[10**6]]}, 400),
    ],
)
def test_labels_that_cannot_be_scored_are_refused(server, body, status):
    answer = score_labels(server, **body)
    assert answer.status_code == status, answer.text
    assert len(answer.json()["error"]["message"]) < 300
