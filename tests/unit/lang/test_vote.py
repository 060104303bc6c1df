"""`sgl.vote` and `sgl.best_of`: branches that answer the same, and the one that is kept."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import BaseModel

import sgl_vllm as sgl
from sgl_vllm.lang.backends.base import branch_name
from sgl_vllm.lang.backends.requests import GenRequest
from tests.unit.lang.scripted import ScriptedBackend, appending

pytestmark = pytest.mark.timeout(20)

HANGS = "hangs"
FAILS = "fails"


def number_of_branch() -> int:
    return int(branch_name.get().partition("[")[2].partition("]")[0])


class Branches(ScriptedBackend):
    """A model that writes one text per branch. Branches answer in the order `turns`, one after the
    other; the request of one that says `HANGS` is answered never."""

    def __init__(self, *says: str, turns: tuple[int, ...] | None = None) -> None:
        super().__init__(reply=lambda prompt: says[number_of_branch()])
        self._says = says
        self._turns = turns or tuple(range(len(says)))
        self._next = 0
        self._changed = asyncio.Condition()
        self.num_canceled = 0
        self.before = self._wait

    async def _wait(self, request: GenRequest) -> None:
        number = number_of_branch()
        if self._says[number] == HANGS:
            try:
                await asyncio.Event().wait()
            finally:
                self.num_canceled += 1
        async with self._changed:
            place = self._turns.index(number)
            await self._changed.wait_for(lambda: self._next >= place)
            self._next += 1
            self._changed.notify_all()
        if self._says[number] == FAILS:
            raise sgl.BackendError(f"branch {number} fails")


@sgl.function
def voting(s, n, options=None):
    s += "2 + 2 ="
    s += sgl.vote(sgl.gen("sum"), n, **(options or {})) + "."


def vote(backend: ScriptedBackend, n: int, **options: Any) -> Any:
    return voting.run(n, options, backend=backend)


def test_the_prompt_goes_on_as_the_first_branch_with_the_answer_of_most():
    state = vote(Branches(" 5", " 4", " 3", " 4", " 4"), 5)
    assert state.text() == "2 + 2 = 4."
    assert state["sum"] == " 4"
    meta = state.get_meta_info("sum")
    assert meta["votes"] == [(" 4", 3), (" 5", 1), (" 3", 1)]
    assert meta["finish_reason"] == "stop"


def test_a_vote_that_is_decided_cancels_the_rest():
    backend = Branches(" 4", " 4", " 4", HANGS, HANGS)
    state = vote(backend, 5)
    meta = state.get_meta_info("sum")
    assert state["sum"] == " 4"
    assert (meta["votes"], meta["num_started"], meta["num_canceled"]) == ([(" 4", 3)], 5, 2)
    assert backend.num_canceled == 2
    assert state.usage.saved_calls == 0  # their requests had been sent


def clear_winner(ballots: tuple[str, ...]) -> str | None:
    """The answer with the most ballots; None for a tie."""
    most = max(map(ballots.count, ballots))
    winners = {one for one in ballots if ballots.count(one) == most}
    return winners.pop() if len(winners) == 1 else None


def decided_after(ballots: tuple[str, ...]) -> int:
    """After how many of the ballots the winner is clear, whatever the others are."""
    for num in range(1, len(ballots)):
        others = itertools.product("abx", repeat=len(ballots) - num)
        winners = {clear_winner((*ballots[:num], *rest)) for rest in others}
        if len(winners) == 1 and None not in winners:
            return num
    return len(ballots)


@pytest.mark.parametrize("ballots", [*itertools.product("ab", repeat=5)])
def test_a_vote_ends_as_soon_as_it_is_decided_and_not_before(ballots):
    backend = Branches(*ballots)
    state = vote(backend, 5, at_once=1)
    most = max("ab", key=ballots.count)
    assert state["sum"] == most
    num_asked = len(backend.requests)
    assert num_asked == decided_after(ballots) == state.get_meta_info("sum")["num_started"]
    assert state.usage.saved_calls == 5 - num_asked


def test_a_tie_is_won_by_the_earlier_branch_whichever_is_done_first():
    for turns in ((0, 1, 2, 3), (3, 2, 1, 0), (1, 0, 3, 2)):
        state = vote(Branches("a", "b", "b", "a", turns=turns), 4)
        assert state["sum"] == "a"


def test_answers_with_the_same_key_are_votes_for_the_same():
    async def number(text: str) -> int:
        return int(text)

    state = vote(Branches(" 5", "4", " 4", "4 "), 4, key=number)
    assert state["sum"] == "4"
    assert state.get_meta_info("sum")["votes"] == [(4, 3), (5, 1)]


def test_answers_need_not_be_hashable():
    class Sum(BaseModel):
        value: int

    four, five = '{"value": 4}', '{"value": 5}'
    program = appending(sgl.vote(sgl.gen("sum", json_schema=Sum), 3))
    state = program.run(backend=Branches(five, four, four))
    assert state["sum"] == Sum(value=4)
    assert state.get_meta_info("sum")["votes"] == [(Sum(value=4), 2), (Sum(value=5), 1)]


def test_a_vote_that_fails_leaves_no_branch_running():
    backend = Branches("a", HANGS, HANGS)
    with pytest.raises(sgl.ProgramError, match="invalid literal"):
        vote(backend, 3, key=int)
    deadline_s = time.monotonic() + 5
    while backend.num_canceled < 2 and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert backend.num_canceled == 2


def test_a_branch_that_fails_does_not_vote():
    state = vote(Branches(FAILS, "a", "b", "b"), 4)
    assert (state["sum"], state.get_meta_info("sum")["votes"]) == ("b", [("b", 2), ("a", 1)])
    with pytest.raises(sgl.ProgramError, match=r"vote 'sum' failed: .* in fork\[0\].*branch 0"):
        vote(Branches(FAILS, FAILS), 2)


def test_all_variables_of_the_winner_are_kept_and_whole_turns_too():
    backend = ScriptedBackend(
        reply=lambda prompt: (
            f"because {number_of_branch()}"
            if prompt.endswith("?")
            else "ab"[number_of_branch() > 0]
        )
    )
    program = appending(
        sgl.system("Think."),
        sgl.vote(
            sgl.user("Why?")
            + sgl.assistant(sgl.gen("thought"))
            + sgl.user("So:")
            + sgl.assistant(sgl.gen("letter")),
            3,
            at_once=3,
        ),
        sgl.user(sgl.var("thought")),
    )
    state = program.run(backend=backend)
    assert (state["letter"], state["thought"]) == ("b", "because 1")
    assert [message["content"] for message in state.messages()] == [
        "Think.",
        "Why?",
        "because 1",
        "So:",
        "b",
        "because 1",
    ]


def test_a_vote_in_branches_of_the_program_and_in_a_compiled_one():
    @sgl.function
    def program(s, n):
        s += "?"
        forks = s.fork(2)
        forks += sgl.vote(sgl.gen("x"), 3)
        forks.join()
        return s["x"]

    backend = ScriptedBackend(reply=lambda prompt: "a")
    assert program.run(1, backend=backend).ret_value == ["a", "a"]
    assert program.compile().run(1, backend=backend).ret_value == ["a", "a"]


def test_after_a_loss_the_run_is_not_failed_by_the_losers():
    """Branches that were canceled or failed are no errors of the run, and none is left running."""
    state = vote(Branches("a", FAILS, "a", HANGS), 4)
    assert state.error() is None
    assert state.text() == "2 + 2 =a."


@pytest.mark.parametrize("make", [sgl.vote, lambda e, **o: sgl.best_of(e, score=len, **o)])
@pytest.mark.parametrize(
    ("answer", "options", "error"),
    [
        (sgl.gen(), {}, "makes a variable"),
        ("x", {"n": 0}, "n must be at least 1"),
        ("x", {"at_once": 0}, "at_once must be at least 1"),
    ],
)
def test_wrong_arguments_are_refused_at_once(make: Callable[..., Any], answer, options, error):
    with pytest.raises(ValueError, match=error):
        make(answer, **options)


# --- best_of -------------------------------------------------------------------------------------


@sgl.function
def choosing(s, n, options):
    s += "A word:"
    s += sgl.best_of(sgl.gen("word"), n, **options) + "."


def choose(backend: ScriptedBackend, n: int, **options: Any) -> Any:
    return choosing.run(n, options, backend=backend)


def test_the_answer_with_the_highest_score_is_kept():
    state = choose(Branches("aa", "bbbb", "c", "dddd"), 4, score=len)
    assert state.text() == "A word:bbbb."
    assert state.get_meta_info("word")["scores"] == {0: 2.0, 1: 4.0, 2: 1.0, 3: 4.0}


def test_a_score_that_is_enough_cancels_the_rest():
    backend = Branches("aa", "bbbb", HANGS, HANGS)
    state = choose(backend, 4, score=len, enough=3)
    meta = state.get_meta_info("word")
    assert (state["word"], meta["num_canceled"], backend.num_canceled) == ("bbbb", 2, 2)


def test_a_branch_that_fails_is_left_out():
    assert choose(Branches(FAILS, "a", "bb"), 3, score=len)["word"] == "bb"
    with pytest.raises(sgl.ProgramError, match=r"best_of 'word' failed: .*branch 0 fails"):
        choose(Branches(FAILS, FAILS), 2, score=len)


def test_a_score_of_the_model_is_asked_on_a_copy():
    def reply(prompt: str) -> str:
        return "7" if prompt.endswith("bb\nLength:") else "3" if "Length" in prompt else answer()

    def answer() -> str:
        return ["a", "bb", "ccc"][number_of_branch()]

    score = "\nLength:" + sgl.gen("length", dtype=int)
    state = choose(ScriptedBackend(reply=reply), 3, score=score)
    assert state.text() == "A word:bb."
    assert state.get_meta_info("word")["scores"] == {0: 3.0, 1: 7.0, 2: 3.0}
    assert "length" not in state
