"""`sgl.map_reduce`: documents, their answers, and reductions in groups that fit."""

from __future__ import annotations

import re
from typing import Any

import pytest

import sgl_vllm as sgl
from tests.unit.lang.scripted import ScriptedBackend

pytestmark = pytest.mark.timeout(20)

DOCUMENTS = [f"document {letter}" for letter in "abcdefg"]


def about(text):
    return sgl.user(f"Map: {text}") + sgl.assistant(sgl.gen("part"))


def merging(text):
    return sgl.user(f"Reduce: {text}") + sgl.assistant(sgl.gen("whole"))


@sgl.function
def summary(s, documents, options=None):
    s += sgl.system("You summarize.")
    s += sgl.map_reduce("summary", documents, map=about, reduce=merging, **(options or {}))
    s += sgl.user("Thanks.")
    return s["summary"]


def letters(prompt: str) -> str:
    """A model that answers with the first and the last letter of its documents, in brackets."""
    asked = prompt.rpartition("<user>")[2]
    found = "".join(map("".join, re.findall(r"document (\w)|<(\w+)>", asked)))
    return f"<{found[0]}{found[-1] * (len(found) > 1)}>"


def run(documents: list[str], **options: Any) -> tuple[sgl.ProgramState, ScriptedBackend]:
    backend = ScriptedBackend(reply=letters)
    return summary.run(documents, options, backend=backend), backend


def test_the_answers_about_all_documents_are_reduced_to_one_in_the_prompt():
    state, backend = run(DOCUMENTS)
    assert state.ret_value == "<ag>"
    asked = "\n\n".join(f"<{letter}>" for letter in "abcdefg")
    assert [message["content"] for message in state.messages()] == [
        "You summarize.",
        f"Reduce: {asked}",
        "<ag>",
        "Thanks.",
    ]
    assert len(backend.requests) == 7 + 1
    meta = state.get_meta_info("summary")
    assert (meta["levels"], meta["num_reductions"]) == (1, 1)
    assert meta["parts"] == [f"<{letter}>" for letter in "abcdefg"]


def test_answers_that_do_not_fit_are_reduced_in_groups_of_neighbors():
    state, backend = run(DOCUMENTS, max_chars=9, separator=" ")
    reductions = [p.rpartition("Reduce: ")[2] for p in backend.prompts if "Reduce: " in p]
    first, second, last = reductions[:3], reductions[3:5], reductions[5:]
    assert sorted(first) == ["<a> <b>", "<c> <d>", "<e> <f>"]  # and <g> is left as it is
    assert sorted(second) == ["<ab> <cd>", "<ef> <g>"]
    assert last == ["<ad> <eg>"]
    assert state.ret_value == "<ag>"
    meta = state.get_meta_info("summary")
    assert (meta["levels"], meta["num_reductions"]) == (3, 6)


def test_no_reduction_is_given_more_than_fits():
    for max_chars in range(8, 40):
        state, backend = run([*DOCUMENTS, *DOCUMENTS], max_chars=max_chars, separator="")
        reductions = [p.rpartition("Reduce: ")[2] for p in backend.prompts if "Reduce: " in p]
        assert state.ret_value == "<ag>"
        assert max(map(len, reductions)) <= max_chars


def test_answers_that_never_fit_are_an_error_that_says_what_to_do():
    with pytest.raises(
        sgl.ProgramError, match=r"map_reduce 'summary' failed: ValueError: no two .* raise"
    ):
        run(DOCUMENTS, max_chars=5)


def test_a_question_that_fails_is_the_error_and_ends_the_others():
    def reply(prompt: str) -> str:
        if "document c" in prompt:
            raise sgl.BackendError("no c")
        return letters(prompt)

    backend = ScriptedBackend(reply=reply)
    with pytest.raises(sgl.ProgramError, match=r"map_reduce 'summary' failed: .*fork\[2\].*no c"):
        summary.run(DOCUMENTS, {"at_once": 1}, backend=backend)
    assert len(backend.requests) == 3


def test_without_roles_and_in_a_compiled_program():
    @sgl.function
    def program(s, documents):
        s += "Letters."
        s += sgl.map_reduce("all", documents, map=in_lines, reduce=in_lines)
        return s["all"]

    for runnable in (program, program.compile()):
        state = runnable.run(DOCUMENTS[:2], backend=ScriptedBackend(reply=letters))
        assert state.text() == "Letters.\n<user>document <a>\n\n<b>:<ab>"
        assert state.ret_value == "<ab>"


def in_lines(text):
    return (
        f"\n<user>{text}:" + sgl.gen("x")
        if "document" in text
        else (f"\n<user>document {text}:" + sgl.gen("x"))
    )


@pytest.mark.parametrize(
    ("documents", "options", "error"),
    [
        ([], {}, "at least one document"),
        ("a text", {}, "a list"),
        (["a"], {"at_once": 0}, "at_once must be at least 1"),
        (["a"], {"max_chars": 0}, "max_chars must be at least 1"),
    ],
)
def test_wrong_arguments_are_refused_at_once(documents, options, error):
    with pytest.raises(ValueError, match=error):
        sgl.map_reduce("x", documents, map=about, reduce=merging, **options)
