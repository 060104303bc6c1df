"""What programs do, against a scripted server: order, variables, roles, fork and join."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time

import pytest

import sgl_vllm as sgl
from sgl_vllm.lang.backends.openai_api import read_usage
from sgl_vllm.lang.ir import parts_of
from sgl_vllm.lang.transcript import WARM_MIN_CHARS
from tests.unit.lang.conftest import LONG
from tests.unit.lang.scripted import ScriptedBackend, appending

assert len(LONG) >= WARM_MIN_CHARS

pytestmark = pytest.mark.usefixtures("backend")


def prompts(server):
    return [body["prompt"] for body in server.bodies("/v1/completions")]


# --- order and variables -----------------------------------------------------------------------


def test_writing_does_not_wait_and_reading_does(server):
    written = threading.Event()

    async def held(path, body):
        while path.endswith("completions") and not written.is_set():
            await asyncio.sleep(0.005)

    server.fault = held

    @sgl.function
    def program(s):
        s += "x" + sgl.gen("a")
        written.set()  # the server answers only now
        return s["a"]

    assert program.run().ret_value == "[1]"


def test_variables_can_be_set_by_the_program():
    @sgl.function
    def program(s):
        s.set_var("k", 3)
        s["l"] = 4
        s += "x" * s["k"]

    state = program.run()
    assert (state.get_var("k"), state["l"], state.text()) == (3, 4, "xxx")
    with pytest.raises(KeyError, match=r"no variable 'b'.*'k'"):
        state["b"]
    assert "k" in state and "b" not in state
    assert state.get_meta_info("k") == {}


def test_at_temperature_0_n_texts_are_one_call_for_one_text(server):
    """vLLM refuses n > 1 there."""

    @sgl.function
    def program(s, temperature):
        s += "x" + sgl.gen("a", n=3, temperature=temperature, return_logprob=True)
        s += "y" + sgl.gen("b", n=3, regex="[0-9]", temperature=temperature)

    state = program.run(0)
    assert state["a"] == ["[1]"] * 3
    assert state["b"] == ["[5]"] * 3
    assert state.get_meta_info("a")["finish_reason"] == ["stop"] * 3
    assert len(state.get_meta_info("a")["output_token_logprobs"]) == 3
    assert [body["n"] for body in server.calls] == [1, 1]
    program.run(0.5)
    assert [body["n"] for body in server.calls[2:]] == [3, 3]


def test_usage_adds_up_over_the_program_and_its_branches(server):
    @sgl.function
    def program(s):
        s += "x" + sgl.gen("a")
        for branch in s.fork(2):
            branch += sgl.gen("b")

    usage = program.run().usage
    assert usage == sgl.Usage(
        prompt_tokens=2 + 5 + 5, cached_prompt_tokens=1 + 2 + 2, completion_tokens=3, calls=3
    )


def test_cached_tokens_that_one_answer_does_not_report_are_unknown_in_the_sum():
    told = read_usage(
        {"usage": {"prompt_tokens": 8, "prompt_tokens_details": {"cached_tokens": 0}}}
    )
    untold = read_usage({"usage": {"prompt_tokens": 5, "prompt_tokens_details": None}})
    assert told.cached_prompt_tokens == 0
    assert untold.cached_prompt_tokens is None
    both = sum([told, untold, told], sgl.Usage())
    assert both == sgl.Usage(prompt_tokens=21, cached_prompt_tokens=None, calls=3)
    assert both.cost(prompt=1e6, completion=0, cached_prompt=0) == 21


def test_usage_is_printed_in_words():
    usage = sgl.Usage(2048, 0, 37, 5, 8, cached_block_size=128)
    assert str(usage) == (
        "5 calls · 2,048 prompt tokens · 0 cached in whole blocks of 128 tokens · 37 generated "
        "tokens · 8 forced"
    )
    assert str(sgl.Usage(7, None, 2, 1)) == "1 call · 7 prompt tokens · 2 generated tokens"


# --- sampling and constraints --------------------------------------------------------------------


def test_a_gen_inherits_from_run_what_it_does_not_say(server):
    program = appending(
        "x" + sgl.gen("a") + sgl.gen("b", max_tokens=7, temperature=0.5, stop=["\n", "."])
    )
    program.run(temperature=0.25, max_new_tokens=9, stop="!", top_k=5)
    first, second = server.bodies("/v1/completions")
    assert (first["max_tokens"], first["temperature"], first["stop"]) == (9, 0.25, "!")
    assert (second["max_tokens"], second["temperature"]) == (7, 0.5)
    assert (second["stop"], second["top_k"]) == (["\n", "."], 5)


def test_the_prompt_up_to_a_slow_tool_is_sent_as_ahead_of_time(server):
    program = appending(
        "How to read what the tool finds, in more than a few words for each part of it: ",
        sgl.tool("found", time.sleep, 0.2) + sgl.gen("a"),
    )
    program.run()
    ahead, answer = server.bodies("/v1/completions")
    assert ahead["vllm_xargs"]["sgl_ahead"] == 1 and ahead["max_tokens"] == 1
    assert ahead["vllm_xargs"]["sgl_program"] == answer["vllm_xargs"]["sgl_program"]
    assert "sgl_ahead" not in answer["vllm_xargs"]
    assert answer["prompt"].startswith(ahead["prompt"])


def test_the_defaults_are_sglangs_and_are_sent_in_full(server):
    appending("x" + sgl.gen("a")).run()
    (body,) = server.bodies("/v1/completions")
    program_id = body.pop("vllm_xargs")["sgl_program"]
    assert body.pop("request_id").startswith(f"{program_id}-") and program_id.startswith("sgl-")
    assert (body.pop("model"), body.pop("prompt"), body.pop("ignore_eos")) == ("fake", "x", False)
    numbers = {"max_tokens": 128, "min_tokens": 0, "n": 1, "temperature": 1.0, "top_p": 1.0}
    numbers |= {"top_k": -1, "min_p": 0.0, "frequency_penalty": 0.0, "presence_penalty": 0.0}
    assert body == numbers


# --- roles ---------------------------------------------------------------------------------------


def test_turns_become_chat_requests_and_the_server_renders_them(server):
    server.reply = lambda prompt: f"re {len(prompt)}"

    @sgl.function
    def program(s):
        s += sgl.system("be brief")
        s += sgl.user("q1")
        s += sgl.assistant(sgl.gen("a1"))
        with s.user():
            s += "q2"
        s.assistant_begin()
        s += "Well, " + sgl.gen("a2")
        s.assistant_end()

    state = program.run()
    first, second = server.bodies("/v1/chat/completions")
    assert first["messages"] == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "q1"},
    ]
    assert (first["add_generation_prompt"], first["continue_final_message"]) == (True, False)
    assert second["messages"][2] == {"role": "assistant", "content": state["a1"]}
    assert second["messages"][-1] == {"role": "assistant", "content": "Well, "}
    assert (second["add_generation_prompt"], second["continue_final_message"]) == (False, True)
    assert state.messages()[-1] == {"role": "assistant", "content": "Well, " + state["a2"]}
    assert not server.bodies("/v1/completions")


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda s: s.user("q") or sgl.gen("a"), "gen outside of a turn"),
        (lambda s: sgl.user("q") + "loose", "text outside of a turn"),
        (lambda s: "loose" + sgl.user("q"), "text before the first turn"),
        (lambda s: sgl.user_begin() + sgl.assistant("x"), "the user turn is still open"),
        (lambda s: sgl.user_begin() + sgl.assistant_end(), "assistant_end: the open turn is user"),
        (lambda s: sgl.user_begin() + sgl.gen("a"), "gen at the start of a user turn"),
    ],
)
def test_turns_that_no_template_can_express_are_an_error(write, message):
    @sgl.function
    def program(s):
        expr = write(s)
        if not isinstance(expr, (str, sgl.lang.ir.Expr)):
            expr = sgl.gen("a")
        s += expr

    with pytest.raises(sgl.ProgramError, match=message):
        program.run()


# --- fork and join -------------------------------------------------------------------------------


def test_branches_run_in_parallel_and_need_no_threads(server):
    server.latency_s = 0.3

    @sgl.function
    def program(s):
        s += "x"
        before = threading.active_count()
        forks = s.fork(100)
        forks += sgl.gen("b")
        after = threading.active_count()
        forks.join()
        return after - before, len(s["b"])

    started = time.monotonic()
    new_threads, values = program.run().ret_value
    assert values == 100
    assert new_threads <= 1
    assert time.monotonic() - started < 15  # sequentially, it would be 30 s


def test_join_gathers_what_the_branches_wrote_as_lists_in_branch_order(server):
    @sgl.function
    def program(s):
        s += "x" + sgl.gen("before")
        forks = s.fork(3)
        forks += ["", "y", "yy"]
        forks += lambda i: sgl.gen("b")
        forks[1] += sgl.gen("only_one")
        forks.join()
        s += " | ".join(s["b"])

    state = program.run()
    assert state["b"] == ["[4]", "[5]", "[6]"]
    assert state["only_one"] == ["[8]"]
    assert state["before"] == "[1]"
    assert state.text() == "x[1][4] | [5] | [6]"


def test_an_empty_prompt_can_be_forked_copied_and_generated_from(server):
    @sgl.function
    def program(s):
        forks = s.fork(2)
        forks += sgl.gen("b")
        forks.join()
        with s.copy() as copy:
            copy += "only here"
        return s.text(), copy.text()

    state = program.run()
    assert state["b"] == ["[0]", "[0]"]
    assert state.ret_value == ("", "only here")
    assert prompts(server) == [[1], [1]]
    assert server.hints == []


def test_a_fork_sends_the_shared_prefix_ahead_exactly_once(server):
    @sgl.function
    def program(s):
        s += LONG
        forks = s.fork(3)
        forks += lambda i: f"{i}" + sgl.gen("b", max_tokens=5)
        again = s.fork(2)
        again += sgl.gen("c", max_tokens=5)

    program.run()
    (hint,) = server.hints
    assert hint["prompt"] == LONG
    assert hint["max_tokens"] == 1
    assert server.bodies("/v1/completions")[0] is hint
    assert len(server.bodies("/v1/completions")) == 6


def test_no_hint_is_sent_for_one_branch_or_for_what_was_just_generated(server):
    @sgl.function
    def program(s):
        s += LONG
        s.fork(1)
        s += sgl.gen("a", max_tokens=5)
        s.fork(3)

    program.run()
    assert server.hints == []


# --- programs as a whole -------------------------------------------------------------------------


def yields(s):
    yield s


FORMATTED = r"cannot be formatted .* \+ sgl\.gen\('name'\)"


@pytest.mark.parametrize(
    ("write", "error", "message"),
    [
        (lambda: f"Name: {sgl.gen('x')}", TypeError, FORMATTED),
        (lambda: "{}".format(sgl.user("who? " + sgl.gen("x"))), TypeError, FORMATTED),
        (lambda: sgl.function(lambda x: None), TypeError, "must be s"),
        (lambda: sgl.function(yields), TypeError, "yields has a yield"),
        (lambda: sgl.function(lambda s: s.fork(-1)).run(), ValueError, "of branches, not -1"),
        (lambda: parts_of(7), TypeError, "not int"),
    ],
)
def test_what_makes_no_program_is_an_error_that_says_what_to_write(write, error, message):
    with pytest.raises(error, match=message):
        write()


@pytest.mark.parametrize("mode", ["gather_variable", "concate_and_append"])
def test_a_fork_of_no_branches_is_empty_and_changes_nothing(server, mode):
    @sgl.function
    def program(s, size):
        s += "before"
        forks = s.fork(size)
        forks += lambda i: f"branch {i}"
        forks += sgl.gen("b")
        forks += []
        for fork in forks:
            fork += "more"
        forks.join(mode)
        s += " after"
        return len(forks), [fork["b"] for fork in forks]

    for state in (program.run(0), program.compile(0).run()):
        assert state.text() == "before after"
        assert state.ret_value == (0, [])
        assert "b" not in state
    assert server.calls == []


def test_without_a_backend_the_message_says_what_to_do(monkeypatch):
    monkeypatch.setattr(sgl.global_config, "default_backend", None)
    with pytest.raises(sgl.BackendError, match="set_default_backend"):
        appending("x").run()


def test_a_stop_pattern_does_not_see_what_an_attempt_before_has_written() -> None:
    replies = iter(["oops;more", "42;more"])
    number = appending("?" + sgl.gen("x", dtype=int, stop_regex=";", retries=1))
    assert number.run(backend=ScriptedBackend(lambda _: next(replies)))["x"] == 42


def test_a_var_scope_that_an_exception_has_left_does_not_end_another():
    @sgl.function
    def program(s):
        with s.var_scope("outer"):
            s += "1"
            with contextlib.suppress(KeyError), s.var_scope("inner"):
                s += "2"
                raise KeyError
            with s.var_scope("outer"):
                s += "3"
            s["same name"] = s["outer"]
            s += "4"

    state = program.run()
    assert (state["same name"], state["outer"]) == ("3", "1234")
