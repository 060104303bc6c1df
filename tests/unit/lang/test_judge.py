"""`sgl.judge`: grades of the prompt so far, which stays as it is."""

from __future__ import annotations

import math
from typing import Any

import pytest

import sgl_vllm as sgl
from sgl_vllm.lang.backends.requests import ChoiceAnswer, ScoreAnswer
from sgl_vllm.lang.prompts import Prompt
from sgl_vllm.lang.usage import Usage
from sgl_vllm.protocol.scoring import ChoiceTokens
from tests.unit.lang.scripted import ScriptedBackend, appending, text_of

pytestmark = pytest.mark.timeout(20)


class Grading(ScriptedBackend):
    """A model with these log-probabilities of the grades after each prompt that has the text."""

    def __init__(self, logprobs: dict[str, list[float]], **options: Any) -> None:
        super().__init__(**options)
        self.logprobs = logprobs

    async def score(
        self, prompt: Prompt, choices: tuple[str, ...], *, unconditional: bool, warm: bool
    ) -> ScoreAnswer | ChoiceAnswer:
        self.asked.append((text_of(prompt), choices))
        logprobs = next(v for text, v in self.logprobs.items() if text in text_of(prompt))
        scored = tuple(ChoiceTokens((1,), (logprob,), (-1.0,)) for logprob in logprobs)
        return ScoreAnswer(scored, Usage(calls=1))


class Choosing(ScriptedBackend):
    """A service that chooses without scores."""

    scoreless_methods = (sgl.token_length_normalized,)

    async def score(
        self, prompt: Prompt, choices: tuple[str, ...], *, unconditional: bool, warm: bool
    ) -> ScoreAnswer | ChoiceAnswer:
        return ChoiceAnswer(1, Usage(calls=1))


def chat(**options: Any) -> Any:
    @sgl.function
    def program(s):
        s += sgl.user("Say hello.") + sgl.assistant("Hello!")
        s += sgl.judge("grade", **options)
        s += sgl.user("Thanks.")
        return s["grade"]

    return program


def test_the_grade_is_the_mean_under_the_models_probabilities():
    backend = Grading({"polite": [math.log(p) for p in (0.1, 0.2, 0.7)]})
    state = chat(criteria="Is it polite?", scale=3).run(backend=backend)
    assert state.ret_value == pytest.approx(1 * 0.1 + 2 * 0.2 + 3 * 0.7)
    assert state.get_meta_info("grade")["grades"] == {"Is it polite?": state["grade"]}
    ((prompt, choices),) = backend.asked
    assert prompt.startswith(
        "<user>Say hello.<assistant>Hello!<user>Is it polite?\nGrade it from 1"
    )
    assert choices == ("1", "2", "3")


def test_several_criteria_are_asked_on_copies_of_their_own():
    backend = Grading({"polite": [-99.0, 0.0], "short": [0.0, -99.0]})
    state = chat(criteria=["polite", "short"], scale=2).run(backend=backend)
    assert state["grade"] == pytest.approx(1.5)
    grades = state.get_meta_info("grade")["grades"]
    assert grades == {"polite": pytest.approx(2.0), "short": pytest.approx(1.0)}
    assert not any("polite" in text and "short" in text for text, _ in backend.asked)
    assert state.usage.calls == 2


def test_in_a_prompt_without_roles_and_inside_of_a_turn():
    backend = Grading({"polite": [0.0, -99.0]})
    program = appending("Hello!" + sgl.judge("grade", "polite", scale=2) + " Bye.")
    state = program.run(backend=backend)
    assert state.text() == "Hello! Bye."
    text, choices = backend.asked[0]
    assert text == "Hello!\npolite\nGrade it from 1 to 2, where 2 is best.\nGrade:"
    assert choices == (" 1", " 2")
    inside = appending(
        sgl.user("Hi") + sgl.assistant("Hello!" + sgl.judge("grade", "polite", scale=2) + " Bye.")
    )
    state = inside.run(backend=backend)
    assert state.messages()[-1] == {"role": "assistant", "content": "Hello! Bye."}
    assert backend.asked[-1][0].startswith("<user>Hi<assistant>Hello!<user>polite\n")


def test_a_service_without_scores_gives_the_number_itself():
    assert chat(criteria="polite", scale=4).run(backend=Choosing()).ret_value == 2.0


def test_a_judge_rates_the_branches_of_best_of():
    says = iter(["good", "bad"])
    backend = Grading({"bad": [0.0, -9.0], "good": [-9.0, 0.0]}, reply=lambda prompt: next(says))

    @sgl.function
    def program(s):
        s += sgl.user("Write.")
        answer = sgl.gen("text")
        s += sgl.assistant(sgl.best_of(answer, 2, score=sgl.judge("grade", "Well?", scale=2)))

    state = program.run(backend=backend)
    assert state["text"] == "good"
    assert state.messages()[-1] == {"role": "assistant", "content": "good"}


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"criteria": []}, "at least one criterion"),
        ({"criteria": "a", "scale": 1}, "scale must be from 2 to 10"),
    ],
)
def test_wrong_arguments_are_refused_at_once(arguments, error):
    with pytest.raises(ValueError, match=error):
        sgl.judge("grade", **arguments)
