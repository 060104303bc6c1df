"""`sgl.retry_until`: answers that a check rejects, and what the model is told."""

from __future__ import annotations

import asyncio
import threading

import pytest

import sgl_vllm as sgl
from tests.unit.lang.scripted import ScriptedBackend, text_of

pytestmark = pytest.mark.timeout(20)


def saying(*replies: str) -> ScriptedBackend:
    left = iter(replies)
    return ScriptedBackend(reply=lambda prompt: next(left))


def even(text):
    number = int(text)
    if number % 2:
        return f"{number} is odd"
    return None


@sgl.function
def asking(s, check, options=None):
    s += sgl.user("An even number.")
    s += sgl.assistant(sgl.retry_until(sgl.gen("number"), check, **(options or {})) + "!")


def test_the_model_is_told_what_is_wrong_until_the_check_accepts():
    backend = saying("3", "many", "4")
    state = asking.run(even, backend=backend)
    assert [(m["role"], m["content"]) for m in state.messages()] == [
        ("user", "An even number."),
        ("assistant", "3"),
        ("user", "That is not right: 3 is odd\nTry again."),
        ("assistant", "many"),
        ("user", "That is not right: invalid literal for int() with base 10: 'many'\nTry again."),
        ("assistant", "4!"),
    ]
    meta = state.get_meta_info("number")
    assert (state["number"], meta["attempts"], meta["errors"][0]) == ("4", 3, "3 is odd")
    for before, after in zip(backend.prompts, backend.prompts[1:], strict=False):
        assert after.startswith(before)


def test_without_roles_it_is_told_in_a_line():
    @sgl.function
    def program(s):
        s += "An even number.\n"
        answer = "Number: " + sgl.gen("number")
        s += sgl.retry_until(answer, even, feedback="No, {error}.")

    state = program.run(backend=saying("3", "4"))
    assert state.text() == "An even number.\nNumber: 3\nNo, 3 is odd.\nNumber: 4"


async def only_true(text):
    return text == "yes"


def raises(text):
    if text != "yes":
        raise RuntimeError


@pytest.mark.parametrize(
    ("check", "told"), [(only_true, "it was rejected"), (raises, "RuntimeError")]
)
def test_false_and_exceptions_reject_as_well(check, told):
    state = asking.run(check, backend=saying("no", "yes"))
    assert state["number"] == "yes"
    (error,) = state.get_meta_info("number")["errors"]
    assert error == told


def test_after_the_last_attempt_the_reason_is_the_error():
    backend = saying("1", "3", "5")
    with pytest.raises(sgl.ProgramError) as caught:
        asking.run(even, {"attempts": 2}, backend=backend)
    assert str(caught.value) == (
        "retry_until 'number' failed: ValueError: 2 attempts were rejected, "
        "the last one with: 3 is odd"
    )
    assert len(backend.requests) == 2


def test_it_can_be_compiled_and_put_into_branches():
    @sgl.function
    def program(s, start):
        s += start
        forks = s.fork(2)
        forks += sgl.retry_until("n", even)
        forks.join()
        return s["n"]

    def reply(prompt: str) -> str:
        return "4" if "odd" in prompt else "3"

    for runnable in (program, program.compile()):
        state = runnable.run("x", backend=ScriptedBackend(reply=reply))
        assert state.ret_value == ["4", "4"]


def test_wrong_arguments_are_refused_at_once():
    with pytest.raises(ValueError, match="attempts must be at least 1"):
        sgl.retry_until("x", even, attempts=0)
    with pytest.raises(ValueError, match="makes a variable"):
        sgl.retry_until(sgl.gen(), even)
    with pytest.raises(ValueError, match=r"may have no field but .error."):
        sgl.retry_until("x", even, feedback="{reason}")


def test_a_block_that_fails_cancels_no_branches_that_were_forked_before_it():
    has_failed = threading.Event()

    async def answers_after_the_failure(request):
        if "branch" in text_of(request.prompt):
            await asyncio.to_thread(has_failed.wait)

    def check(text):
        raise TypeError("a check that is wrong")

    @sgl.function
    def program(s):
        (branch,) = s.fork(1)
        branch += "branch:" + sgl.gen("detail")
        s += sgl.retry_until(sgl.gen("number"), check)
        error = s.error()
        has_failed.set()
        return str(error), branch["detail"]

    backend = ScriptedBackend(reply=lambda text: "4", before=answers_after_the_failure)
    error, detail = program.run(backend=backend).ret_value
    assert "a check that is wrong" in error
    assert detail == "4"
