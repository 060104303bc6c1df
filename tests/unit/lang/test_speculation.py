"""API speculative execution: text generated ahead is exactly what the server would answer."""

from __future__ import annotations

import itertools
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

import sgl_vllm as sgl
from sgl_vllm.lang.backends.requests import GenAnswer, Generated
from sgl_vllm.lang.prompts import ChatPrompt
from sgl_vllm.lang.sampling import DEFAULT_SAMPLING, Sampling
from sgl_vllm.lang.speculation import Ahead, Mark, first_stop, without_begun_stop
from tests.unit.lang.conftest import seen_to_go, words
from tests.unit.lang.http_server import refusing
from tests.unit.lang.programs import ScriptedBackend
from tests.unit.lang.scripted import appending

FORM = "Name: Ada Lovelace\nJob: mathematician\nBorn: 1815\n"


def form(prompt):
    """Continues the form from where the prompt ends in it."""
    begun = next(n for n in range(len(FORM), -1, -1) if prompt.endswith(FORM[:n]))
    return FORM[begun:]


def fill_in(s):
    s += "Fill in.\nName:" + sgl.gen("name", stop="\n")
    s += "\nJob:" + sgl.gen("job", stop="\n")
    s += "\nBorn:" + sgl.gen("born", stop=["\n", "."], max_tokens=20)


def sampling(stop=None, max_tokens=10):
    return Sampling(stop=stop, max_new_tokens=max_tokens).over(DEFAULT_SAMPLING)


def ahead_of(tokens, finish_reason="length", *, max_tokens=None, marks=True, per_chunk=1):
    text, known = "", []
    for count, token in enumerate(tokens, 1):
        text += token
        if count % per_chunk == 0 or count == len(tokens):
            known.append(Mark(count, len(text)))
    # The end of text is a token, too.
    asked = max_tokens or len(tokens) + (finish_reason == "stop")
    return Ahead(text, finish_reason, sampling(), 7, asked, tuple(known) if marks else None)


# --- the pure part ------------------------------------------------------------------------------


def test_the_first_stop_is_the_one_that_is_complete_first_and_of_those_the_first_listed():
    assert first_stop("one. two\n", ("\n", ".")) == (3, 4)
    assert first_stop("xab", ("b", "ab")) == (2, 3)
    assert first_stop("xab", ("ab", "b")) == (1, 3)
    assert first_stop("xab", None) is None
    assert first_stop("xab", "") is None


@given(text=st.text("ab\n", max_size=8), more=st.text("ab\n", max_size=8), stop=st.text("ab\n"))
def test_what_may_begin_a_stop_is_held_back_until_it_is_known(text, more, stop):
    shown = without_begun_stop(text, stop)
    assert text.startswith(shown)
    if first_stop(text, stop) is None:
        end = first_stop(text + more, stop)
        assert (text + more)[: None if end is None else end[0]].startswith(shown)


def test_nothing_is_answered_from_the_middle_of_a_token():
    _, rest = ahead_of(["a", "\nJob", ":", " x", "."]).answer(sampling("\n"))
    assert rest.after("\nJo").answer(sampling(".")) is None
    assert rest.after("\nJob:").answer(sampling("."))[0] == Generated(" x", "stop")


def test_other_sampling_is_not_answered():
    ahead = ahead_of(["a", "\n"])
    hot = Sampling(temperature=0.3, stop="\n").over(DEFAULT_SAMPLING)
    assert ahead.answer(hot) is None


@given(
    tokens=st.lists(st.text("ab\n", min_size=1, max_size=3), min_size=1, max_size=8),
    stop=st.sampled_from([None, "\n", "b", ("ab", "b"), ("\n", "a\n")]),
    max_tokens=st.integers(1, 9),
    per_chunk=st.integers(1, 3),
    marks=st.booleans(),
    finish_reason=st.sampled_from(["stop", "length"]),
)
def test_an_answer_is_always_what_generating_token_by_token_gives(
    tokens, stop, max_tokens, per_chunk, marks, finish_reason
):
    ahead = ahead_of(tokens, finish_reason, marks=marks, per_chunk=per_chunk)
    got = ahead.answer(sampling(stop, max_tokens))
    text, expected = "", None
    for count, token in enumerate(tokens, 1):
        text += token
        if (found := first_stop(text, stop)) is not None:
            expected = Generated(text[: found[0]], "stop")
        elif count == max_tokens:
            expected = Generated(text, "length")
        if expected is not None:
            break
    if expected is None and finish_reason == "stop":
        expected = Generated(text, "stop")
    if got is not None:
        assert got[0] == expected
    elif marks and per_chunk == 1:
        assert expected is None


# --- programs -----------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens_of", [list, words], ids=["characters", "words"])
def test_three_fields_take_one_call_and_a_third_of_the_input(server, backend, tokens_of):
    server.document, server.tokens_of = form, tokens_of
    plain = sgl.function(fill_in).run()
    assert plain.usage.calls == 3
    ahead = sgl.function(fill_in, num_api_spec_tokens=64).run()
    for name in ("name", "job", "born"):
        assert ahead[name] == plain[name]
    assert ahead["name"] == " Ada Lovelace"
    assert ahead.text() == plain.text()
    assert (ahead.usage.calls, ahead.usage.saved_calls) == (1, 2)
    assert ahead.usage.prompt_tokens == 1 + len("Fill in.\nName:")
    if tokens_of is list:
        saved = len("Fill in.\nName: Ada Lovelace\nJob:")
        saved += len("Fill in.\nName: Ada Lovelace\nJob: mathematician\nBorn:")
        assert ahead.usage.saved_prompt_tokens == 2 + saved


def test_the_server_is_left_as_soon_as_enough_has_come(server, backend):
    server.document = lambda prompt: "x\n" * 500
    server.chunk_s = 0.005
    program = appending("a:" + sgl.gen("a", stop="\n", max_tokens=500), num_api_spec_tokens=4)
    started = time.monotonic()
    state = program.run()
    assert state["a"] == "x"
    assert state.usage.completion_tokens == 2 + 4
    assert time.monotonic() - started < 2
    assert seen_to_go(server, 1) == 1


def test_each_branch_uses_text_that_its_parent_generated_ahead(server, backend):
    server.document = form

    @sgl.function(num_api_spec_tokens=64)
    def program(s):
        s += "Name:" + sgl.gen("name", stop="\n")
        forks = s.fork(3)
        forks += ["\nJob:", "\nJob: mathematician\nBorn:", "\nHobby:"]
        forks += sgl.gen("x", stop="\n")
        forks.join()

    state = program.run(temperature=0)
    assert state["x"][:2] == [" mathematician", " 1815"]
    assert (state.usage.calls, state.usage.saved_calls) == (2, 2)


def test_a_sample_is_not_shared_by_branches():
    numbers = itertools.count()

    def document(prompt):
        begun = "" if prompt.endswith("A:") else "t\nA:"
        return f"{begun}{next(numbers)}\n"

    backend = ScriptedBackend(document)

    @sgl.function(num_api_spec_tokens=64)
    def program(s):
        s += "Q:" + sgl.gen("t", stop="\n")
        forks = s.fork(3)
        forks += "\nA:" + sgl.gen("a", stop="\n")
        forks.join()

    assert len({*program.run(backend=backend, temperature=1)["a"]}) == 3
    assert len({*program.run(backend=backend, temperature=0)["a"]}) == 1


def test_programs_of_one_function_do_not_see_each_others_text(server, backend):
    """SGLang keeps text generated ahead in one place for all threads."""
    server.document = lambda prompt: f" {prompt[0]}1\n {prompt[0]}2\n"[len(prompt) - 2 :]

    @sgl.function(num_api_spec_tokens=32)
    def program(s, q):
        s += q + ":" + sgl.gen("a", stop="\n") + "\n" + sgl.gen("b", stop="\n")

    states = program.run_batch([{"q": chr(97 + i)} for i in range(20)], num_threads=20)
    assert [(s["a"], s["b"]) for s in states] == [
        (f" {chr(97 + i)}1", f" {chr(97 + i)}2") for i in range(20)
    ]


def test_tokens_ahead_that_do_not_fit_the_context_are_not_insisted_on(server, backend):
    server.document = form
    server.fault = refusing(lambda path, body: body.get("max_tokens", 0) > 128)
    state = sgl.function(fill_in, num_api_spec_tokens=64).run()
    assert state["job"] == " mathematician"


def test_in_a_chat_the_turn_is_written_ahead(server, backend):
    server.document = lambda prompt: form(prompt)

    @sgl.function(num_api_spec_tokens=64)
    def program(s):
        s += sgl.user("Fill in.")
        with s.assistant():
            s += "Name:" + sgl.gen("name", stop="\n") + "\nJob:" + sgl.gen("job", stop="\n")
        s += sgl.user("And again.")
        s += sgl.assistant("Name:" + sgl.gen("again", stop="\n"))

    state = program.run()
    assert (state["name"], state["job"]) == (" Ada Lovelace", " mathematician")
    assert (state.usage.calls, state.usage.saved_calls) == (2, 1)


class ChatOnly(ScriptedBackend):
    """A chat service: it cannot continue a turn and does not report tokens."""

    continues_turns = False

    def __init__(self, document):
        super().__init__(document, tells_tokens=False)
        self.tells_tokens = False

    async def generate(self, request) -> GenAnswer:
        assert isinstance(request.prompt, ChatPrompt)
        assert request.prompt.ending == "generate"
        return await super().generate(request)


def chat(s):
    s += sgl.user("Fill in the form.")
    with s.assistant():
        s += "Name:" + sgl.gen("name", stop="\n") + "\nJob:" + sgl.gen("job", stop="\n")


def test_a_chat_service_writes_the_whole_turn_which_must_fit_the_program():
    state = sgl.function(chat, num_api_spec_tokens=64).run(backend=ChatOnly(lambda prompt: FORM))
    assert (state["name"], state["job"]) == (" Ada Lovelace", " mathematician")
    assert state.usage.calls == 1
    with pytest.raises(sgl.ProgramError, match="the model began it with 'Sure!"):
        sgl.function(chat, num_api_spec_tokens=64).run(backend=ChatOnly(lambda p: "Sure! " + FORM))
    with pytest.raises(sgl.ProgramError, match=r"num_api_spec_tokens=\.\.\."):
        sgl.function(chat).run(backend=ChatOnly(lambda prompt: FORM))


def test_readers_of_a_speculated_run_get_only_what_the_variables_have(server, backend):
    server.document, server.tokens_of, server.chunk_s = form, words, 0.03

    def program(s):
        s += "Name:" + sgl.gen("name", stop="\nJob") + "\nJob:" + sgl.gen("job", max_tokens=2)

    state = sgl.function(program, num_api_spec_tokens=64).run(stream=True)
    pieces = list(state.text_iter())
    assert "".join(pieces) == state.text() == "Name: Ada Lovelace\nJob: mathemat"
    assert len(pieces) > 3


def test_a_server_that_falls_behind_is_asked_ahead_again():
    backend = ScriptedBackend(form, words)
    function = sgl.function(fill_in, num_api_spec_tokens=64)

    def num_calls() -> int:
        return function.run(backend=backend).usage.calls

    at_best = num_calls()
    backend.tokens_per_chunk = 3
    calls = [num_calls() for _ in range(40)]
    plain = sgl.function(fill_in).run(backend=backend).usage.calls
    assert sum(calls) <= 40 * plain * (1 + 1 / 16) + 4
    backend.tokens_per_chunk = 1
    assert [num_calls() for _ in range(20)][-1] == at_best < plain
