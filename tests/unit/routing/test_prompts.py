from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_vllm.routing.prefix_hashes import Namespace
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


def asked(body, lora=None):
    return read_request(body, lora, "a request")


@given(messages, messages)
def test_a_conversation_that_goes_on_begins_with_the_one_before(said, more):
    assert chat_text(said + more).startswith(chat_text(said))


@given(st.text(min_size=1), st.text(min_size=1))
def test_different_beginnings_are_different_texts(one, other):
    texts = [chat_text([{"role": "user", "content": content}]) for content in (one, other)]
    assert (texts[0] == texts[1]) == (one == other)


def test_tools_come_first_as_in_chat_templates():
    said = [{"role": "user", "content": "hello"}]
    with_tools = chat_text(said, tools=[{"type": "function", "function": {"name": "search"}}])
    assert "search" in with_tools and with_tools.endswith(chat_text(said))


def test_images_are_told_apart():
    def text(url):
        part = {"type": "image_url", "image_url": {"url": url}}
        return chat_text([{"role": "user", "content": [part, {"type": "text", "text": "what?"}]}])

    assert text("a.png") != text("b.png")


def test_a_completion_is_its_prompt():
    assert asked({"prompt": "Once upon"}).units == b"Once upon"
    assert asked({"prompt": ["Once upon", "another"]}).units == b"Once upon"


@pytest.mark.parametrize("prompt", [[5, 6, 7], [[5, 6, 7], [8]]], ids=["one", "first of two"])
def test_a_prompt_in_tokens_stays_in_tokens(prompt):
    assert np.array_equal(asked({"prompt": prompt}).units, [5, 6, 7])


@pytest.mark.parametrize(
    "body", [{}, {"messages": []}, {"prompt": None}, {"prompt": []}, {"input": "to embed"}, None]
)
def test_without_a_prompt_nothing_is_asked(body):
    assert asked(body) is None


def test_objects_are_read_as_bodies_are():
    body = {
        "messages": [{"role": "user", "content": "hello"}],
        "cache_salt": "tenant",
        "vllm_xargs": {"sgl_program": "p", "sgl_fork_group": 3},
    }
    assert asked(SimpleNamespace(**body)) == asked(body)
    assert asked(body).namespace == Namespace(None, "tenant")
    assert asked(body).group is not None
    assert asked(body).group == asked({"prompt": "x", "vllm_xargs": {"sgl_program": "p"}}).group


def test_an_adapter_is_a_namespace():
    assert asked({"prompt": "x"}, lora="sql").namespace == Namespace("sql", None)


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_a_limit_of_its_own_is_read(name):
    assert asked({"prompt": "x", name: 7}).max_output_tokens == 7
    assert asked({"prompt": "x", name: "seven"}).max_output_tokens is None
    assert asked({"prompt": "x"}).max_output_tokens is None


def test_a_bad_hint_is_no_group():
    assert asked({"prompt": "x", "vllm_xargs": {"sgl_fork_group": [1]}}).group is None


def test_a_lone_surrogate_is_text_too():
    assert asked({"prompt": "a\ud800b"}).units
