"""A model's reasoning, split from its answer."""

from __future__ import annotations

import pytest
from pydantic import BaseModel

import sgl_vllm as sgl
from sgl_vllm.lang.reasoning import FORMATS, reasoning_format
from tests.unit.lang.http_server import completes, refusing
from tests.unit.lang.scripted import appending

pytestmark = [pytest.mark.usefixtures("backend"), pytest.mark.timeout(20)]


@pytest.mark.parametrize(
    ("model_type", "text", "reasoning", "answer"),
    [
        ("qwen3", "<think>\nhm\n</think>\n\nyes", "hm", "yes"),
        ("qwen3", "<think>\n\n</think>\n\nyes", "", "yes"),
        ("qwen3", " yes ", "", " yes "),
        ("qwen3", "<think>hm, cut off", "hm, cut off", ""),
        ("qwen3", "hm</think>yes", "hm", "yes"),
        ("qwen3", "well <think>hm</think> yes", "hm", "well  yes"),
        ("qwen3", "hm</think>say <think>", "hm", "say <think>"),
        ("deepseek-r1", "hm, cut off", "hm, cut off", ""),
        ("deepseek-r1", "hm</think>yes", "hm", "yes"),
        ("deepseek-r1", "<think>hm</think>yes", "hm", "yes"),
        ("kimi", "◁think▷hm◁/think▷yes", "hm", "yes"),
        ("Qwen3", "<think>hm</think>yes", "hm", "yes"),
        ("gpt-oss", "analysishmassistantfinalyes", "hm", "yes"),
        ("minimax", "hm</think>yes", "hm", "yes"),
        ("minimax", "hm, cut off", "hm, cut off", ""),
        ("mistral", "[THINK]hm[/THINK]yes", "hm", "yes"),
        ("interns1", "<think>hm</think>yes", "hm", "yes"),
        ("interns1", "yes", "", "yes"),
    ],
)
def test_the_reasoning_is_split_off_where_the_family_of_models_writes_it(
    model_type, text, reasoning, answer
):
    assert reasoning_format(model_type).split(text) == (reasoning, answer)


def test_a_family_that_is_not_known_is_refused_with_those_that_are():
    with pytest.raises(ValueError, match=r"one of deepseek-r1.*, not 'gpt'"):
        sgl.separate_reasoning(sgl.gen("a"), "gpt")
    assert set(FORMATS) >= {"deepseek-r1", "qwen3", "kimi"}  # SGLang's


@sgl.function
def ask(s, n=1, **kwargs):
    s += sgl.user("Q")
    s += sgl.assistant(sgl.separate_reasoning("A: " + sgl.gen("a", n=n), "qwen3"))
    s += sgl.user("So?")
    s += sgl.assistant(sgl.gen("b"))


def test_only_the_answer_stays_in_the_prompt_and_the_reasoning_is_a_variable(server):
    server.reply = lambda prompt: "<think>let me see</think>42"
    state = ask.run()
    assert state["a"] == "42"
    assert state["a_reasoning_content"] == "let me see"
    assert state.messages()[1] == {"role": "assistant", "content": "A: 42"}
    assert server.calls[1]["messages"][1]["content"] == "A: 42"
    assert state["b"] == "<think>let me see</think>42"


def test_several_texts_have_their_reasoning_each(server):
    """In SGLang, n > 1 breaks it (its issue 10640)."""
    replies = iter(["<think>one</think>1", "2", "<think>three</think>3", "end"])
    server.reply = lambda prompt: next(replies)
    state = ask.run(n=3)
    assert state["a"] == ["1", "2", "3"]
    assert state["a_reasoning_content"] == ["one", "", "three"]
    assert state.messages()[1]["content"] == "A: 1"


def test_what_is_left_is_read_as_its_type(server):
    class Answer(BaseModel):
        n: int

    server.reply = lambda prompt: '<think>{"n": 1}?</think>{"n": 2}'
    program = appending(
        sgl.user("Q"), sgl.assistant(sgl.separate_reasoning(sgl.gen("a", json_schema=Answer)))
    )
    state = program.run()
    assert state["a"] == Answer(n=2)
    assert state["a_reasoning_content"] == '{"n": 1}?'


def test_a_failed_gen_fails_its_reasoning(server):
    server.fault = refusing(completes, 500)

    @sgl.function
    def program(s):
        s += "x" + sgl.separate_reasoning(sgl.gen("a"))
        s["a_reasoning_content"]

    with pytest.raises(sgl.ProgramError, match="gen 'a' failed"):
        program.run()
