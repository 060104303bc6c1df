from __future__ import annotations

import pytest

pytest.importorskip("transformers", reason="the tokenizer is Hugging Face's")

from sgl_vllm.demo import MODEL_PATH
from sgl_vllm.routing.ray.rendering import renderer_of

QUESTION = {"role": "user", "content": "What is the capital of Peru?"}
ANSWER = {"role": "assistant", "content": "The capital of Peru is Lima."}


@pytest.fixture(scope="module")
def render():
    return renderer_of(str(MODEL_PATH))


def test_the_next_turn_begins_with_the_one_before(render):
    turn = render({"messages": [QUESTION]})
    next_turn = render({"messages": [QUESTION, ANSWER, QUESTION]})
    assert 10 < len(turn) < len(next_turn)
    assert next_turn[: len(turn)] == turn


def test_an_answer_that_is_to_be_continued_has_no_end(render):
    body = {"messages": [QUESTION, ANSWER], "add_generation_prompt": False}
    continued = render({**body, "continue_final_message": True})
    ended = render(body)
    assert ended[: len(continued)] == continued and len(ended) > len(continued)


def test_of_several_prompts_the_first_counts(render):
    assert render({"prompt": ["Once upon", "a time"]}) == render({"prompt": "Once upon"})
