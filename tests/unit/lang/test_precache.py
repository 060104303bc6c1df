"""What a batch and `cache` send ahead: the prompts' common prefix, found by tracing."""

from __future__ import annotations

import pytest

import sgl_vllm as sgl
from tests.unit.lang.http_server import refusing

SHOTS = "Question: what?\nAnswer: that.\n" * 8

pytestmark = pytest.mark.usefixtures("backend")


@sgl.function
def ask(s, shots, question):
    s += shots + f"Question: {question}\nAnswer:" + sgl.gen("answer", stop="\n")


def items(number):
    return [{"shots": SHOTS, "question": f"why {i}?"} for i in range(number)]


def test_a_batch_sends_what_its_prompts_begin_with_first_and_once(server):
    ask.run_batch(items(5))
    (hint,) = server.hints
    assert hint["prompt"] == SHOTS + "Question: "
    assert server.bodies("/v1/completions")[0] == hint


def test_a_batch_that_shares_nothing_sends_nothing_ahead(server, monkeypatch):
    ask.run_batch([{"shots": SHOTS + str(i), "question": "why?"} for i in range(3)])
    ask.run_batch(items(1))
    monkeypatch.setattr(sgl.global_config, "enable_precache_with_tracing", False)
    ask.run_batch(items(3))
    assert not server.hints


def test_a_program_that_cannot_be_traced_runs_all_the_same_and_its_effects_happen_once(server):
    seen = []

    @sgl.function
    def noisy(s, question):
        s += SHOTS
        seen.append(question)
        s += question + sgl.gen("answer")

    states = noisy.run_batch([(f"why {i}?",) for i in range(3)])
    assert sorted(seen) == ["why 0?", "why 1?", "why 2?"]
    assert all("answer" in state for state in states)
    assert [hint["prompt"] for hint in server.hints] == [SHOTS]


def test_a_chat_is_sent_ahead_up_to_its_last_common_turn(server):
    @sgl.function
    def chat(s, question):
        s += sgl.system(SHOTS)
        s += sgl.user(question)
        s += sgl.assistant(sgl.gen("answer"))

    chat.run_batch([("why?",), ("how?",)])
    (hint,) = server.hints
    assert hint["messages"][0] == {"role": "system", "content": SHOTS}


def test_a_hint_that_fails_leaves_the_complaint_to_the_programs(server):
    server.fault = refusing(lambda path, body: body.get("max_tokens") == 1)
    assert all("answer" in state for state in ask.run_batch(items(3)))


def test_cache_sends_the_constant_beginning_of_all_runs(server):
    bound = ask.bind(shots=SHOTS)
    usage = bound.cache()
    assert usage.calls == 1
    (hint,) = server.hints
    assert hint["prompt"] == SHOTS + "Question: "
    assert ask.cache() == sgl.Usage()  # nothing is known about its prompts
