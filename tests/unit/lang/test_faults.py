"""Known faults of SGLang's frontend, which must not occur here.

Others are in the tests of what they are about: silent errors (`test_errors.py`), select in a chat
(`test_select.py`), forks of an empty prompt (`test_program.py`), several texts with reasoning
(`test_reasoning.py`), tracing, compiled programs and speculation.
"""

from __future__ import annotations

import asyncio
import pickle

import pytest

import sgl_vllm as sgl
from tests.unit.lang.conftest import LONG
from tests.unit.lang.http_server import refusing
from tests.unit.lang.scripted import appending

pytestmark = [pytest.mark.usefixtures("backend"), pytest.mark.timeout(30)]


def fails_after(server, text, status=500):
    server.fault = refusing(lambda path, body: str(body.get("prompt")).endswith(text), status)


# --- 1: errors ----------------------------------------------------------------------------------


def test_an_error_can_cross_to_another_process(server):
    fails_after(server, "x")

    @sgl.function
    def program(s):
        forks = s.fork(2)
        forks += "x" + sgl.gen("a")

    with pytest.raises(sgl.ProgramError) as caught:
        program.run()
    sent = pickle.loads(pickle.dumps(caught.value))
    assert (str(sent), sent.operation) == (str(caught.value), "gen 'a'")
    assert sent.__cause__.status == 500
    unsupported = sgl.UnsupportedError("a backend", "a feature", "do without")
    assert str(pickle.loads(pickle.dumps(unsupported))) == str(unsupported)


# --- 2: bind() drops num_api_spec_tokens; forked children lose it, and use_thread=False ---------


def test_bind_keeps_num_api_spec_tokens(server):
    server.document = lambda prompt: "one\ntwo\n"[len(prompt) - 2 :]

    @sgl.function(num_api_spec_tokens=32)
    def program(s, q):
        s += q + sgl.gen("a", stop="\n") + "\n" + sgl.gen("b", stop="\n")

    bound = program.bind(q="x:")
    assert bound.num_api_spec_tokens == 32
    state = bound.run()
    assert (state["a"], state["b"]) == ("one", "two")
    assert state.usage.calls == 1
    assert bound.run_batch([{}])[0].usage.calls == 1


def test_forked_children_keep_num_api_spec_tokens(server):
    server.document = lambda prompt: "one\ntwo\n"[len(prompt) - 3 :]

    @sgl.function(num_api_spec_tokens=32)
    def program(s):
        s += "x"
        forks = s.fork(2)
        forks += lambda i: f"{i}:" + sgl.gen("a", stop="\n") + "\n" + sgl.gen("b", stop="\n")
        forks.join()

    state = program.run()
    assert state["b"] == ["two", "two"]
    assert (state.usage.calls, state.usage.saved_calls) == (2, 2)


def test_use_thread_is_taken():
    @sgl.function
    def program(s):
        forks = s.fork(2)
        forks += sgl.gen("a")
        forks.join()

    assert len(program.run(use_thread=False)["a"]) == 2
    assert len(asyncio.run(program.run_async(use_thread=False))["a"]) == 2


# --- 5: concate_and_append calls a route that no server has -------------------------------------


def test_concate_and_append_is_a_join_of_texts_that_asks_no_server(server):
    @sgl.function
    def program(s):
        s += "x"
        forks = s.fork(3)
        forks += lambda i: f" {i}:" + sgl.gen("b")
        forks.join(mode="concate_and_append")
        s += " so " + sgl.gen("c")

    @sgl.function
    def wrong_join(s):
        s.fork(2).join("concat")

    state = program.run()
    assert state.text() == "x 0:[4] 1:[4] 2:[4] so [23]"
    assert len(server.calls) == 4
    assert not [path for path, _ in server.requests if "concat" in path]
    # The next prompt begins with the parent's text, which the server has cached.
    assert server.calls[-1]["prompt"].startswith("x 0:")
    with pytest.raises(ValueError, match="gather_variable or concate_and_append"):
        wrong_join.run()


# --- 7: select ----------------------------------------------------------------------------------


@pytest.mark.parametrize("plugin", [False, True])
@pytest.mark.parametrize(
    "method",
    [
        sgl.token_length_normalized,
        sgl.greedy_token_selection,
        sgl.unconditional_likelihood_normalized,
    ],
)
def test_a_logprob_of_exactly_zero_is_a_value_like_any_other(server, plugin, method):
    server.plugin = plugin
    # After the prompt, "b" is certain. Without it (at position 1), all are equally likely.
    server.logprob = lambda token, position: (
        -2.0 if position <= 1 else 0.0 if chr(token) == "b" else -0.5
    )
    program = appending("Q:" + sgl.select("pick", ["a", "b", "c"], choices_method=method))
    state = program.run()
    assert state["pick"] == "b"
    assert state.get_meta_info("pick")["token_logprobs"][1] == [0.0]


@pytest.mark.parametrize("order", [1, -1])
def test_select_prefers_neither_the_longest_nor_the_shortest_choice(server, order):
    """SGLang's issue 523."""
    choices = ["ok", "okay then", "okay then, if you really must"][::order]
    program = appending("Q:" + sgl.select("pick", choices))
    likely = "ok"
    server.logprob = lambda token, position: -0.1 if chr(token) in likely else -1.0
    assert program.run()["pick"] == "ok"
    likely = "okay then, if"
    assert program.run()["pick"] in ("ok", "okay then")
    server.logprob = lambda token, position: -0.5 if position > 20 else -1.0
    assert program.run()["pick"] == "okay then, if you really must"
    server.logprob = lambda token, position: -1.0
    assert program.run()["pick"] == choices[0]  # a tie


# --- usage and ids ------------------------------------------------------------------------------


def test_what_is_spent_during_a_hint_is_counted(server):
    """The sum was once read before the hint was awaited, and written after it."""

    async def slow_hint(path, body):
        if body.get("max_tokens") == 1:
            await asyncio.sleep(0.3)

    server.fault = slow_hint

    @sgl.function
    def program(s):
        left, right = s.fork(2)
        left += LONG
        left.fork(2)
        right += "x" + sgl.gen("a", max_tokens=5)

    usage = program.run().usage
    assert usage.calls == len(server.calls) == 2
