"""Code movement: the leading pieces of a prompt in another order."""

from __future__ import annotations

import json
from typing import Any

import pytest

import sgl_vllm as sgl
from sgl_vllm.lang.ir import Text
from sgl_vllm.lang.planner import model_planner
from sgl_vllm.lang.prefixes import shared_prefix
from sgl_vllm.lang.reordering import ReorderError
from tests.unit.lang.scripted import ScriptedBackend

pytestmark = pytest.mark.usefixtures("backend")


@sgl.function
def judge(s, essay, criterion):
    s += f"Essay: {essay}\n"
    s += "You are a fair judge of essays.\n"
    s += f"Judge its {criterion}.\n"
    s += "Answer with a number.\n"
    s += sgl.gen("score")
    s += "\nBecause" + sgl.gen("reason")


def test_constants_come_first_and_the_order_of_all_else_stays():
    reordering = judge.compile().reordered()
    assert reordering.order[:4] == (1, 3, 0, 2)
    assert reordering.shared_chars_before == len("Essay: ")
    assert reordering.shared_chars_after == len(
        "You are a fair judge of essays.\nAnswer with a number.\nEssay: "
    )
    assert reordering.program.run(essay="E", criterion="style").text() == (
        "You are a fair judge of essays.\nAnswer with a number.\nEssay: E\nJudge its style.\n"
        "[80]\nBecause[92]"
    )


def test_the_diff_shows_what_moved():
    diff = judge.compile().reordered().diff().splitlines()
    assert diff[3:8] == [
        "+You are a fair judge of essays.",
        "+Answer with a number.",
        " Essay: {essay}",
        "-You are a fair judge of essays.",
        " Judge its {criterion}.",
    ]
    assert " [gen 'score']" in diff
    unmoved = judge.compile().reordered(lambda pieces: range(len(pieces)))
    assert unmoved.diff() == ""


def test_text_moves_within_its_turn_only():
    @sgl.function
    def program(s, question):
        s += sgl.system("Be brief.")
        with s.user():
            s += f"{question}\n"
            s += "Answer with a number.\n"
        s += sgl.assistant(sgl.gen("answer"))

    reordering = program.compile().reordered()
    state = reordering.program.run(question="1+1?")
    assert state.messages()[1]["content"] == "Answer with a number.\n1+1?\n"
    assert reordering.shared_chars_after - reordering.shared_chars_before == 22


def test_a_tool_does_not_move_before_what_the_function_waits_for():
    @sgl.function
    def program(s):
        s += "a"
        s += sgl.gen("ok")
        approved = s["ok"]  # noqa: F841
        s += sgl.tool("pay", len, "x")
        s += sgl.tool("tell", len, "y")

    compiled = program.compile()
    answers: list[Any] = [[0, 0, 1, 2], [0], [], list("0123"), [True, 0, 2, 3]]
    for answer in answers:
        with pytest.raises(ReorderError, match="no permutation"):
            compiled.reordered(lambda pieces: answer)  # noqa: B023
    with pytest.raises(ReorderError, match="piece 2 before piece 1, which it needs"):
        compiled.reordered(lambda pieces: [0, 2, 1, 3])
    with pytest.raises(ReorderError, match="piece 3 before piece 2"):
        compiled.reordered(lambda pieces: [0, 1, 3, 2])
    moved = compiled.reordered(lambda pieces: [1, 2, 3, 0]).program
    assert moved.run(backend=ScriptedBackend()).text() == "(0)11a"


def test_a_model_can_be_the_planner(server, backend):
    asked = []

    def reply(prompt):
        asked.append(prompt)
        return json.dumps({"order": [1, 3, 2, 0, 4, 5, 6]})

    server.reply = reply
    compiled = judge.compile()
    reordering = compiled.reordered(model_planner(backend))
    assert '2 (varies): "Judge its {criterion}.\\n"' in asked[0]
    assert "1 (constant)" in asked[0]
    assert reordering.order[:4] == (1, 3, 2, 0)
    server.reply = lambda prompt: json.dumps({"order": [0] * 7})
    with pytest.raises(ReorderError, match="no permutation"):
        compiled.reordered(model_planner(backend))
    server.reply = lambda prompt: "no JSON"
    with pytest.raises(ReorderError, match="has no order"):
        compiled.reordered(model_planner(backend))


def test_a_compiled_program_s_batch_shares_what_its_own_order_has_first():
    compiled = judge.compile()
    items = [{"essay": "E", "criterion": c} for c in ("style", "spelling")]
    before = compiled._shared_prefix(items)
    assert "".join(part.value if isinstance(part, Text) else str(part) for part in before) == (
        "Essay: E\nYou are a fair judge of essays.\nJudge its "
    )
    after = compiled.reordered().program._shared_prefix(items)
    assert after[:2] == (Text("You are a fair judge of essays.\n"), Text("Answer with a number.\n"))
    assert shared_prefix(judge, items)[0] == Text("Essay: E\n")


def test_a_prefix_ends_where_computing_it_fails():
    @sgl.function
    def program(s, n):
        s += "one "
        s += f"{n[0]} two"

    assert program.compile()._shared_prefix([{"n": 0}, {"n": 0}]) == (Text("one "),)
