"""Forecasts of forced text: from the automaton before the first time, then from what happened."""

from __future__ import annotations

import pytest

from sgl_vllm.fsm.automaton import Automaton, State
from sgl_vllm.fsm.expressions import Alt
from sgl_vllm.fsm.forecast import Forecast
from sgl_vllm.fsm.masks import Bitmasks, some_tokens
from sgl_vllm.fsm.regex import full_match
from sgl_vllm.fsm.vocabulary import Vocabulary
from sgl_vllm.jump.part import WORTH_WAITING

WORDS = b"le lev la lab co col colour Gry Huff Raven Sly tr true fal false 01 12 33 47 88".split()
PIECES = [bytes([byte]) for byte in range(256)] + WORDS
BITMASKS = Bitmasks(Vocabulary(PIECES, len(PIECES)))


def start_of(pattern: str) -> State:
    return Automaton(full_match(pattern).expression).start


def likelihood(state: State) -> float:
    """In a vocabulary of the 256 bytes and some words."""

    def pieces() -> list[bytes]:
        return [PIECES[token] for token in some_tokens(BITMASKS.of(state), 8)]

    return state.likelihood(lambda: state.is_mostly_forced(pieces))


def is_expected(state: State) -> bool:
    """Whether forced text is likely enough after the next token for a pass to wait."""
    return likelihood(state) >= WORTH_WAITING


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("(Gryffindor|Hufflepuff|Ravenclaw|Slytherin)", True),
        ("(true|false)", True),
        ("[0-9]: ", True),
        ("[ab]", True),  # then only the end may follow
        ("[a-z]{3,8}", False),
        ("(level|label|colour)", True),  # most of its tokens are longer than a byte
        ("[1-9][0-9]", True),  # and here: a number is a token
        ("[1-9][0-9]{2}", False),
        ("[ab]?c*", False),
    ],
)
def test_an_unseen_state_is_judged_by_what_follows_its_tokens(pattern: str, expected: bool) -> None:
    assert is_expected(start_of(pattern)) is expected


@pytest.mark.parametrize("pattern", ["(true|false)", "[a-z]{3,8}"])
@pytest.mark.parametrize("was_forced", [True, False])
def test_what_happened_once_is_expected_again_whatever_the_automaton_says(
    pattern: str, was_forced: bool
) -> None:
    start = start_of(pattern)
    start.learn(was_forced)
    assert is_expected(start) is was_forced


def test_a_forecast_follows_what_happens() -> None:
    def never_asked() -> bool:
        raise AssertionError("something has happened already")

    forecast = Forecast()
    for _ in range(10):
        forecast.learn(False)
    assert forecast.likelihood(never_asked) < WORTH_WAITING
    for _ in range(3):
        forecast.learn(True)
    assert forecast.likelihood(never_asked) >= WORTH_WAITING
    likelihoods = []
    for number in range(800):
        forecast.learn(number % 8 == 0)
        likelihoods.append(forecast.likelihood(never_asked))
    assert sum(likelihoods[400:]) / 400 == pytest.approx(1 / 8, abs=0.02)


def test_a_state_with_many_threads_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    start = Automaton(Alt([full_match(f"a{n}b").expression for n in range(33)])).start
    assert len(start.threads) == 33
    monkeypatch.setattr(State, "walk", lambda *_: pytest.fail("a step of the automaton"))
    assert not is_expected(start)
