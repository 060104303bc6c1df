"""Streaming text: text_iter, text_async_iter, run(stream=True), stop_regex."""

from __future__ import annotations

import asyncio
import queue
import time

import pytest
from fastapi.responses import StreamingResponse
from hypothesis import given
from hypothesis import strategies as st

import sgl_vllm as sgl
from sgl_vllm.lang.reasoning import FORMATS
from tests.unit.lang.conftest import seen_to_go
from tests.unit.lang.scripted import ScriptedBackend, appending

pytestmark = [pytest.mark.usefixtures("backend"), pytest.mark.timeout(20)]


two_gens = appending("one:" + sgl.gen("a") + " two:" + sgl.gen("b"))


@sgl.function
async def two_gens_async(s):
    s += "one:" + sgl.gen("a")
    await s["a"]
    s += " two:" + sgl.gen("b")


@pytest.fixture
def slow(server):
    """A server that streams text in ten pieces, 10 ms apart."""
    server.reply = lambda prompt: "0123456789"
    server.chunk_s = 0.01
    return server


WHOLE = "one:0123456789 two:0123456789"


@pytest.mark.parametrize("program", [two_gens, two_gens_async], ids=["sync", "async"])
def test_a_streamed_run_gives_the_text_in_small_pieces(slow, program):
    state = program.run(stream=True)
    pieces = list(state.text_iter())
    assert "".join(pieces) == WHOLE
    assert len(pieces) > 12
    assert state.text() == WHOLE
    assert state["a"] == "0123456789"


@pytest.mark.parametrize("program", [two_gens, two_gens_async], ids=["sync", "async"])
def test_one_variable_is_streamed_alone_also_one_that_is_not_written_yet(slow, program):
    state = program.run(stream=True)
    for name in ("b", "a"):
        assert "".join(state.text_iter(name)) == "0123456789"
    assert len(list(program.run(stream=True).text_iter("b"))) > 5


def test_a_run_that_is_over_gives_it_all_and_so_does_a_run_that_is_not_streamed(slow):
    state = two_gens.run()
    assert list(state.text_iter()) == [WHOLE]
    assert list(state.text_iter("b")) == ["0123456789"]
    assert "stream" not in slow.calls[0]


def test_no_moment_shows_a_text_twice(server):
    """Also not between the end of a generation and the next operation."""
    server.reply, server.tokens_per_chunk = lambda prompt: "0123456789", 10

    @sgl.function
    def program(s):
        for _ in range(20):
            s += sgl.gen("a")
            s += "x"

    run = program.run(stream=True)
    function_done, seen = run._stream.run.function_done, []
    assert function_done is not None
    while not function_done.done() or not run._stream.is_idle:
        seen.append(run._stream.snapshot().text)
    whole = run.text()
    assert whole == "0123456789x" * 20
    assert all(whole.startswith(text) for text in seen)


@pytest.mark.parametrize("program", [two_gens, two_gens_async], ids=["sync", "async"])
def test_an_async_reader_gets_the_pieces_too(slow, program):
    async def read():
        state = await program.run_async(stream=True)
        return [piece async for piece in state.text_async_iter()]

    pieces = asyncio.run(read())
    assert "".join(pieces) == WHOLE
    assert len(pieces) > 12


def test_a_reader_that_leaves_early_does_not_stop_the_program(slow):
    async def peek():
        state = await two_gens.run_async(stream=True)
        async for piece in state.text_async_iter():
            if "3" in piece:
                break
        return state

    state = asyncio.run(peek())  # the reader's event loop is closed before the program ends
    assert state.text() == WHOLE
    state = two_gens.run(stream=True)
    assert next(state.text_iter())
    assert state.text() == WHOLE
    assert not state._stream.listeners
    assert slow.gone == []


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_a_program_can_read_its_own_text_in_its_body(slow, is_async):
    @sgl.function
    def plain(s):
        s += "x:" + sgl.gen("a")
        pieces = [*s.text_iter(), *s.text_iter("a")]
        s += "!"
        return "".join(pieces)

    @sgl.function
    async def native(s):
        s += "x:" + sgl.gen("a")
        pieces = [piece async for piece in s.text_async_iter()]
        pieces += [piece async for piece in s.text_async_iter("a")]
        s += "!"
        return "".join(pieces)

    program = native if is_async else plain
    for stream in (False, True):
        state = program.run(stream=stream)
        assert state.text() == "x:0123456789!"
        assert state.ret_value == "x:01234567890123456789"


def test_text_of_a_streamed_run_is_that_of_the_whole_program(slow):
    @sgl.function
    def program(s):
        s += "a"
        time.sleep(0.2)
        s += "b"

    state = program.run(stream=True)
    assert state.text() == "ab"
    state = program.run(stream=True)
    assert state.error() is None
    assert state.messages() == []


# --- ends that are not good ---------------------------------------------------------------------


def broken_stream(server, *, after, ending):
    """Completions whose prompt ends with `after` stream three pieces, and then `ending`."""

    async def chunks():
        for piece in "abc":
            yield f'data: {{"choices": [{{"text": "{piece}", "finish_reason": null}}]}}\n\n'
        for data in ending:
            yield data

    server.fault = lambda path, body: (
        StreamingResponse(chunks(), media_type="text/event-stream")
        if str(body.get("prompt")).endswith(after)
        else None
    )


@pytest.mark.parametrize(
    ("ending", "message"),
    [
        ([], "stopped in the middle"),
        (['data: {"error": {"message": "EngineDead", "code": 500}}\n\n'], "EngineDead"),
        (["data: {not json\n\n"], "cannot be read"),
        (
            ['data: {"choices": [{"text": "d"}], "usage": {"completion_tokens": "x"}}\n\n'],
            "be read",
        ),
    ],
)
@pytest.mark.parametrize("ahead", [None, 16], ids=["plain", "speculated"])
def test_all_readers_raise_an_error_in_mid_stream(server, ending, message, ahead):
    broken_stream(server, after="two:", ending=ending)
    program = appending("one:" + sgl.gen("a") + " two:" + sgl.gen("b"), num_api_spec_tokens=ahead)
    state = program.run(stream=True)
    with pytest.raises(sgl.ProgramError, match=f"gen 'b' failed: .*{message}") as caught:
        list(state.text_iter())
    assert isinstance(caught.value.__cause__, sgl.BackendError)
    with pytest.raises(sgl.ProgramError, match=message):
        list(state.text_iter("b"))
    with pytest.raises(sgl.ProgramError, match=message):
        state.text()
    assert "".join(state.text_iter("a")) == "[4]"
    error = state.error()
    assert error is not None and error.operation == "gen 'b'"


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize(
    "read",
    [
        lambda state: list(state.text_iter()),
        lambda state: list(state.text_iter("a")),
        lambda state: state["a"],
        lambda state: state.get_meta_info("a"),
        lambda state: state.text(),
        lambda state: list(state.text_iter("never made")),
        lambda state: state["never made"],
    ],
)
def test_what_the_function_raises_is_not_hidden_by_what_it_has_canceled(is_async, read):
    async def wait(_: object) -> None:
        await asyncio.sleep(60)

    def plain(s):
        s += "x:" + sgl.gen("a")
        raise ValueError("the real bug")

    async def native(s):
        plain(s)

    program = sgl.function(native if is_async else plain)
    state = program.run(stream=True, backend=ScriptedBackend(before=wait))
    with pytest.raises(ValueError, match="the real bug") as caught:
        read(state)
    assert caught.value.__cause__ is None and caught.value.__context__ is None


def test_the_operations_that_a_failed_function_has_canceled_name_its_error():
    async def wait(_: object) -> None:
        await asyncio.sleep(60)

    branches: queue.Queue = queue.Queue()

    @sgl.function
    def program(s):
        forks = s.fork(1)
        forks += "x:" + sgl.gen("a")
        branches.put(forks[0])
        raise ValueError("the real bug")

    program.run(stream=True, backend=ScriptedBackend(before=wait))
    with pytest.raises(
        sgl.ProgramError, match="failed: the program's function raised ValueError: the real bug"
    ) as caught:
        branches.get()["a"]
    reason = caught.value.__cause__
    assert isinstance(reason, sgl.ProgramCancelled)
    assert isinstance(reason.__cause__, ValueError)


def test_an_operation_that_failed_by_itself_says_why(server):
    broken_stream(server, after="two:", ending=[])

    @sgl.function
    def program(s):
        s += "one:" + sgl.gen("a") + " two:" + sgl.gen("b")
        s.error()
        raise ValueError("the real bug")

    state = program.run(stream=True)
    with pytest.raises(ValueError, match="the real bug"):
        state.text()
    with pytest.raises(sgl.ProgramError, match=r"gen 'b' failed: .*stopped in the middle"):
        state["b"]
    assert state["a"] == "[4]"


def test_a_name_that_the_program_never_makes_is_a_key_error_in_the_end(slow):
    with pytest.raises(KeyError, match="no variable 'c'"):
        list(two_gens.run(stream=True).text_iter("c"))


# --- what may still be taken back ---------------------------------------------------------------


@pytest.mark.parametrize("tokens_per_chunk", [1, 2, 3, 5])
def test_a_stop_pattern_is_found_over_the_seams_of_the_pieces(server, tokens_per_chunk):
    server.reply = lambda prompt: "The answer is 42. END1 and more" + "." * 300
    server.tokens_per_chunk, server.chunk_s = tokens_per_chunk, 0.002
    program = appending("Q:" + sgl.gen("a", stop_regex=r" END\d") + "!")
    for stream in (False, True):
        state = program.run(stream=stream)
        assert "".join(state.text_iter()) == "Q:The answer is 42.!"
        assert "".join(state.text_iter("a")) == state["a"] == "The answer is 42."
        assert state.get_meta_info("a")["finish_reason"] == "stop"
    assert seen_to_go(server, 2) == 2  # does not wait for what follows


@sgl.function
def stopped(s, pattern):
    s += "x" + sgl.gen("answer", stop_regex=pattern)


@pytest.mark.parametrize("tokens_per_chunk", [1, 3, 100])
@pytest.mark.parametrize(
    ("pattern", "text", "cut"),
    [
        (r"\bEND\b", "say ENDING or END now", "say ENDING or "),
        (r"\n(?! )", "a:\n  b\n  c\nd", "a:\n  b\n  c"),
        (r"\bEND\b", "the END", "the "),
        (r"[.!]", "one. two", "one"),
        ("never", "one. two", "one. two"),
    ],
)
def test_the_text_is_cut_before_the_match(server, pattern, text, cut, tokens_per_chunk):
    server.reply = lambda prompt: text
    server.tokens_per_chunk = tokens_per_chunk
    assert stopped.run(pattern)["answer"] == cut


@pytest.mark.parametrize(
    "make", [lambda p: sgl.gen("a", stop_regex=p), lambda p: stopped.run("x", stop_regex=p)]
)
def test_what_is_no_pattern_is_refused_at_once(server, make):
    with pytest.raises(ValueError, match=r"stop_regex '\[' is not a pattern"):
        make("[")
    assert server.calls == []


def test_several_stop_patterns_and_run_wide_ones(server):
    server.reply = lambda prompt: "one 2 three"
    program = appending("Q:" + sgl.gen("a", stop_regex=["th?", r"\d"]) + sgl.gen("b"))
    state = program.run(stop_regex="e+$")
    assert (state["a"], state["b"]) == ("one ", "one 2 thr")  # `$` is the end of all of it


def test_readers_get_nothing_of_an_attempt_that_is_made_again(server):
    replies = iter(["12", "12", "3"])
    server.reply = lambda prompt: next(replies)

    def one_digit(text):
        if len(text) > 1:
            raise ValueError("too long")
        return int(text)

    from dataclasses import replace

    from sgl_vllm.lang.ir import Gen

    @sgl.function
    def program(s):
        number = sgl.gen("n", retries=2)
        assert isinstance(number, Gen)
        s += "n=" + replace(number, parse=one_digit) + "!"

    state = program.run(stream=True)
    assert "".join(state.text_iter()) == "n=3!"
    assert state["n"] == 3


@given(
    text=st.lists(st.sampled_from(["<think>", "</think>", "a", " ", "\n", "<", "◁think▷"])).map(
        "".join
    ),
    cut=st.integers(0, 60),
    model_type=st.sampled_from(sorted(FORMATS)),
)
def test_what_readers_get_of_an_answer_after_reasoning_is_its_beginning(text, cut, model_type):
    thinking = FORMATS[model_type]
    assert thinking.split(text)[1].startswith(thinking.begun(text[:cut]))


def test_reasoning_is_not_in_the_streamed_text(server):
    server.reply = lambda prompt: "<think>\nlet me see\n</think>\n\nThe answer is 42. "
    server.chunk_s = 0.002
    program = appending(
        sgl.user("Q") + sgl.assistant(sgl.separate_reasoning(sgl.gen("a"), "qwen3"))
    )
    state = program.run(stream=True)
    pieces = list(state.text_iter("a"))
    assert "".join(pieces) == state["a"] == "The answer is 42."
    assert len(pieces) > 3
    assert state["a_reasoning_content"] == "let me see"


def test_a_chat_is_streamed_and_several_texts_are_not(slow):
    state = appending(sgl.user("Q") + sgl.assistant(sgl.gen("a"))).run(stream=True)
    assert len(list(state.text_iter("a"))) > 5
    assert state.messages()[1]["content"] == "0123456789"
    state = appending("x" + sgl.gen("a", n=3)).run(stream=True)
    assert list(state.text_iter("a")) == ["0123456789"]
    assert len(state["a"]) == 3
