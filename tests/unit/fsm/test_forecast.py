"""Forecasts of forced text: from the automaton before the first time, then from what happened."""

from __future__ import annotations

import pytest

from sgl_vllm.fsm.automaton import Automaton, State
from sgl_vllm.fsm.errors import TooComplexError
from sgl_vllm.fsm.forecast import Forecast, forecast_of
from sgl_vllm.fsm.regex import full_match
from sgl_vllm.jump.part import WORTH_WAITING


def start_of(pattern: str) -> State:
    return Automaton(full_match(pattern).expression).start


@pytest.mark.parametrize(
    ("pattern", "is_expected"),
    [
        ("(Gryffindor|Hufflepuff|Ravenclaw|Slytherin)", True),
        ("(true|false)", True),
        ("[0-9]: ", True),
        ("[ab]", True),  # then only the end may follow
        ("[a-z]{3,8}", False),
        ("[1-9][0-9]", False),
        ("[ab]?c*", False),
    ],
)
def test_an_unseen_state_is_judged_by_what_follows_its_bytes(
    pattern: str, is_expected: bool
) -> None:
    assert (forecast_of(start_of(pattern)).share >= WORTH_WAITING) is is_expected


def test_requests_of_one_format_share_what_was_learned() -> None:
    automaton = Automaton(full_match("[a-z]{3,8}").expression)
    forecast_of(automaton.start).learn(True)
    assert forecast_of(automaton.start).share >= WORTH_WAITING
    assert forecast_of(start_of("[a-z]{3,8}")).share < WORTH_WAITING


def test_a_forecast_follows_what_happens() -> None:
    forecast = Forecast(is_likely=True)
    for _ in range(10):
        forecast.learn(False)
    assert forecast.share < WORTH_WAITING
    for _ in range(3):
        forecast.learn(True)
    assert forecast.share >= WORTH_WAITING
    shares = []
    for number in range(800):
        forecast.learn(number % 8 == 0)
        shares.append(forecast.share)
    assert sum(shares[400:]) / 400 == pytest.approx(1 / 8, abs=0.02)


def test_a_state_with_many_threads_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    start = start_of("|".join(f"{'a' * n}{chr(98 + n % 20)}" for n in range(40)))
    start.threads *= 40
    monkeypatch.setattr(State, "step", lambda *_: pytest.fail("a step of the automaton"))
    assert forecast_of(start).share < WORTH_WAITING


def test_a_step_that_is_too_much_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(state: State, byte: int) -> State | None:
        raise TooComplexError("planted")

    start = start_of("(true|false)")
    monkeypatch.setattr(State, "step", fail)
    assert forecast_of(start).share < WORTH_WAITING
