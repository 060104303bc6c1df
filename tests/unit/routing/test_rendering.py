"""What a router renders of a request, and within which bounds."""

from __future__ import annotations

import asyncio
import time

import pytest

pytest.importorskip("transformers", reason="the tokenizer is Hugging Face's")

from sgl_vllm.demo import MODEL_PATH
from sgl_vllm.routing.ray import rendering
from sgl_vllm.routing.ray.rendering import NotRendered, PromptRenderer

QUESTION = {"role": "user", "content": "What is the capital of Peru?"}
ANSWER = {"role": "assistant", "content": "The capital of Peru is Lima."}
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


@pytest.fixture(scope="module")
def renderer() -> PromptRenderer:
    return PromptRenderer(str(MODEL_PATH))


def render(renderer: PromptRenderer, **body) -> list[int]:
    tokens = asyncio.run(renderer.tokens(body))
    assert tokens is not None
    return list(tokens)


def test_the_next_turn_begins_with_the_one_before(renderer):
    turn = render(renderer, messages=[QUESTION])
    next_turn = render(renderer, messages=[QUESTION, ANSWER, QUESTION])
    assert 10 < len(turn) < len(next_turn)
    assert next_turn[: len(turn)] == turn


def test_an_answer_that_is_to_be_continued_has_no_end(renderer):
    body = {"messages": [QUESTION, ANSWER], "add_generation_prompt": False}
    continued = render(renderer, **body, continue_final_message=True)
    ended = render(renderer, **body)
    assert ended[: len(continued)] == continued and len(ended) > len(continued)


def test_of_several_prompts_the_first_counts(renderer):
    assert render(renderer, prompt=["Once upon", "a time"]) == render(renderer, prompt="Once upon")


def test_a_request_without_a_text_has_nothing_to_render(renderer):
    assert asyncio.run(renderer.tokens({"prompt": [1, 2, 3]})) is None
    assert asyncio.run(renderer.tokens({"input": "for an embedding"})) is None


@pytest.mark.parametrize(
    "values",
    [
        {"chat_template": ENDLESS},
        {"chat_template": "{{ 'x' * 10**9 }}"},
        {"padding": "max_length", "max_length": 10**9},
        {"tokenize": False},
        {"return_tensors": "pt"},
        {"messages": []},
        {"documents": [{"text": "x" * 10**6}]},
        "not a mapping",
        [["chat_template", ENDLESS]],
    ],
)
def test_a_request_cannot_change_how_it_is_rendered(renderer, values):
    plain = render(renderer, messages=[QUESTION])
    assert render(renderer, messages=[QUESTION], chat_template_kwargs=values) == plain


def test_a_request_sets_what_the_models_own_template_asks_for(renderer, monkeypatch):
    tokenizer = renderer._tokenizer
    template = "{% if thinking %}think {{ level }}{% endif %}{{ messages[0].content }}"
    monkeypatch.setattr(tokenizer, "chat_template", template)
    monkeypatch.setattr(renderer, "_template_names", rendering._names_of_template(tokenizer))

    def text(**values) -> str:
        ids = render(renderer, messages=[QUESTION], chat_template_kwargs=values)
        return tokenizer.decode(ids, skip_special_tokens=True)

    assert text() == QUESTION["content"]
    assert text(thinking=True, level=3) == "think 3" + QUESTION["content"]
    assert text(thinking=True, level="x" * 5000) == "think " + QUESTION["content"]
    assert text(thinking=True, level=["nested"]) == "think " + QUESTION["content"]


def test_a_slow_prompt_holds_up_neither_the_loop_nor_its_request(renderer, monkeypatch):
    monkeypatch.setattr(rendering, "TIMEOUT_S", 0.2)

    def slow(body) -> list[int]:
        time.sleep(1)
        return []

    monkeypatch.setattr(renderer, "render", slow)

    async def route() -> float:
        begun = time.monotonic()
        with pytest.raises(NotRendered, match="longer than"):
            await renderer.tokens({"prompt": "slow"})
        return time.monotonic() - begun

    async def longest_pause() -> float:
        routed = asyncio.create_task(route())
        longest = 0.0
        while not routed.done():
            begun = time.monotonic()
            await asyncio.sleep(0.01)
            longest = max(longest, time.monotonic() - begun)
        assert await routed < 0.9
        return longest

    assert asyncio.run(longest_pause()) < 0.5


def test_what_is_beyond_a_bound_is_refused_at_once(renderer, monkeypatch):
    monkeypatch.setattr(rendering, "MAX_CHARACTERS", 100)
    with pytest.raises(NotRendered, match="more than 100 characters"):
        asyncio.run(renderer.tokens({"prompt": "x" * 101}))
    monkeypatch.setattr(rendering, "MAX_PENDING", 0)
    with pytest.raises(NotRendered, match="other prompts"):
        asyncio.run(renderer.tokens({"prompt": "x"}))
