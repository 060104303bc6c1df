from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_vllm.protocol.cache_namespace import CacheNamespace
from sgl_vllm.routing.prompts import chat_text, read_request

messages = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["system", "user", "assistant"]),
            "content": st.one_of(
                st.text(max_size=20),
                st.none(),
                st.lists(
                    st.fixed_dictionaries({"type": st.just("text"), "text": st.text(max_size=9)}),
                    max_size=3,
                ),
            ),
        }
    ),
    max_size=4,
)


def read(body, lora=None):
    return read_request(body, lora, "a request")


@given(messages, messages)
def test_a_continued_conversation_starts_with_the_one_before(said, more):
    assert chat_text(said + more).startswith(chat_text(said))


@given(st.text(min_size=1), st.text(min_size=1))
def test_different_messages_are_different_texts(one, other):
    texts = [chat_text([{"role": "user", "content": content}]) for content in (one, other)]
    assert (texts[0] == texts[1]) == (one == other)


def test_a_completion_is_its_prompt():
    assert read({"prompt": "Once upon"}).prompt == b"Once upon"
    assert read({"prompt": ["Once upon", "another"]}).prompt == b"Once upon"


@pytest.mark.parametrize("prompt", [[5, 6, 7], [[5, 6, 7], [8]]], ids=["one", "first of two"])
def test_a_prompt_in_tokens_stays_in_tokens(prompt):
    assert np.array_equal(read({"prompt": prompt}).prompt, [5, 6, 7])


@pytest.mark.parametrize(
    "body", [{}, {"messages": []}, {"prompt": None}, {"prompt": []}, {"input": "to embed"}, None]
)
def test_a_body_without_a_prompt_has_no_summary(body):
    assert read(body) is None


def test_objects_are_read_as_bodies_are():
    body = {
        "messages": [{"role": "user", "content": "hello"}],
        "cache_salt": "tenant",
        "vllm_xargs": {"sgl_program": "p", "sgl_fork_group": 3},
    }
    assert read(SimpleNamespace(**body)) == read(body)
    assert read(body).namespace == CacheNamespace(None, "tenant")
    assert read(body).group is not None
    assert read(body).group == read({"prompt": "x", "vllm_xargs": {"sgl_program": "p"}}).group


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_the_output_limit_is_read(name):
    assert read({"prompt": "x", name: 7}).max_output_tokens == 7
    assert read({"prompt": "x", name: "seven"}).max_output_tokens is None
    assert read({"prompt": "x"}).max_output_tokens is None
