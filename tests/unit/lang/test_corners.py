"""Corner cases: each was once a hang, a wrong answer or a wrong message."""

from __future__ import annotations

import asyncio
import time

import pytest
from fastapi.responses import JSONResponse

import sgl_vllm as sgl
from tests.unit.lang.http_server import completes, refusing
from tests.unit.lang.scripted import ScriptedBackend, appending

pytestmark = [pytest.mark.usefixtures("backend"), pytest.mark.timeout(60)]


def test_a_batch_on_the_languages_own_loop_is_refused_instead_of_hanging():
    inner = appending("x" + sgl.gen("a"))

    @sgl.function
    async def outer(s):
        inner.run_batch([(), ()])

    with pytest.raises(RuntimeError, match="own event loop"):
        outer.run()


def test_what_is_queued_ends_although_more_is_appended_right_after_a_cancel():
    async def wait(_: object) -> None:
        await asyncio.sleep(60)

    program = appending("x" + sgl.gen("a"))
    for _ in range(20):
        state = program.run(stream=True, backend=ScriptedBackend(before=wait))
        while "a" not in state:
            time.sleep(0.001)
        state.cancel()
        state += "y"
        with pytest.raises(sgl.ProgramError, match="was canceled"):
            state["a"]


def test_the_error_of_a_program_inside_a_tool_names_the_tool(server):
    server.fault = refusing(completes)
    inner = appending("x" + sgl.gen("v"))
    with pytest.raises(sgl.ProgramError, match=r"tool <lambda> for 't' failed: gen 'v' failed"):
        appending(sgl.tool("t", lambda: inner.run()["v"])).run()


def test_an_image_ends_what_was_generated_ahead():
    backend = ScriptedBackend(reply=lambda _: "one\ntwo\nthree\n")

    @sgl.function(num_api_spec_tokens=50)
    def program(s):
        with s.assistant():
            s += sgl.gen("a", stop="\n", max_tokens=10)
            s += sgl.image(b"\x89PNG....")
            s += "\n" + sgl.gen("b", stop="\n", max_tokens=10)

    program.run(backend=backend)
    assert len(backend.requests) == 2


def test_a_readers_text_is_that_of_one_variable_even_if_its_name_is_given_again():
    program = appending(sgl.gen("x") + sgl.gen("x"))
    answers = iter(["answer1", "answer2"])
    state = program.run(backend=ScriptedBackend(reply=lambda _: next(answers)), stream=True)
    text = "".join(state.text_iter("x"))
    assert text in ("answer1", "answer2")
    state.sync()
    assert state["x"] == "answer2"


def test_logprobs_without_text_are_asked_for_by_one_gen_alone(server):
    program = appending(
        "x" + sgl.gen("a", return_logprob=True, return_text_in_logprobs=False),
        sgl.gen("b", return_logprob=True),
    )
    state = program.run()
    assert {e["text"] for e in state.get_meta_info("a")["output_token_logprobs"]} == {None}
    assert None not in {e["text"] for e in state.get_meta_info("b")["output_token_logprobs"]}


def test_prompt_logprobs_and_streaming_exclude_each_other_at_vllm_and_the_first_win(server):
    program = appending("x" + sgl.gen("a", return_logprob=True, logprob_start_len=0))
    state = program.run(stream=True)
    state.sync()
    (body,) = server.bodies("/v1/completions")
    assert "prompt_logprobs" in body and "stream" not in body


def test_a_gateway_that_lets_nothing_else_through_is_asked_once(server):
    server.fault = refusing(lambda path, body: "/sgl/" in path, 403)
    program = appending("x" * 200 + sgl.gen("a") + sgl.select("b", ["yes", "no"]))
    program.run()
    program.run()
    assert len([path for path, _ in server.requests if "/sgl/" in path]) == 1


def test_what_a_server_has_taken_out_of_the_text_is_the_reasoning(server):
    server.fault = lambda path, body: (
        JSONResponse(
            {
                "choices": [
                    {
                        "message": {"content": "Lima", "reasoning": "Peru? Lima."},
                        "finish_reason": "stop",
                    }
                ],
                "usage": {"prompt_tokens": 1, "completion_tokens": 2},
            }
        )
        if path.endswith("chat/completions")
        else None
    )
    program = appending(
        sgl.user("The capital of Peru?"),
        sgl.assistant(sgl.separate_reasoning(sgl.gen("a"), "deepseek-r1")),
    )
    state = program.run()
    assert (state["a"], state["a_reasoning_content"]) == ("Lima", "Peru? Lima.")


def test_the_time_limit_of_a_batch_bounds_the_hint_too(server):
    async def stuck(path, body):
        if body.get("max_tokens") == 1:
            await asyncio.sleep(30)

    server.fault = stuck

    @sgl.function
    def program(s, word):
        s += "The same long beginning of everything that is asked here. " * 4 + word + sgl.gen("a")

    started = time.monotonic()
    states = program.run_batch([("x",), ("y",)], timeout_s=1)
    assert all("a" in state for state in states)
    assert time.monotonic() - started < 20


def test_error_returns_what_the_function_of_a_streamed_run_has_raised():
    @sgl.function
    def program(s):
        raise ValueError("not today")

    error = program.run(stream=True).error()
    assert isinstance(error, sgl.ProgramError) and isinstance(error.__cause__, ValueError)


def test_an_awaited_batch_leaves_no_warning_about_unread_exceptions(server, caplog):
    server.fault = refusing(completes)

    @sgl.function
    def program(s, word):
        s += word + sgl.gen("a")

    results = asyncio.run(program.run_batch_async([("x",), ("y",)], return_errors=True))
    assert all(isinstance(result, sgl.ProgramError) for result in results)
    assert "never retrieved" not in caplog.text
