"""What `make attack` sends, and how it judges what came of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tools.attack import hostile
from tools.attack.__main__ import QUICK, Answered, Figures
from tools.attack.client import problem
from tools.attack.target import Resident

MB = 1 << 20


def test_the_same_seed_gives_the_same_requests() -> None:
    one, again, other = (hostile.phases(QUICK, seed) for seed in (3, 3, 4))
    assert one == again != other


def test_every_hint_is_sent_with_a_value_of_every_json_type() -> None:
    kinds = {attack.kind for attack in hostile.hints()}
    types = {"null", "boolean", "number", "string", "array", "object"}
    assert {f"{name}: {kind}" for name in hostile.HINTS for kind in types} <= kinds


@pytest.mark.parametrize(
    ("may_fail", "status", "body", "is_problem"),
    [
        (True, 200, "anything", False),
        (True, 500, '{"error": {"message": "too large"}}', False),
        (False, 500, '{"error": {"message": "too large"}}', True),
        (False, 400, '{"error": {"message": "no"}}', False),
        (False, 400, "Bad Request", True),
        (True, 500, "Internal Server Error", True),
        (False, 404, '{"detail": "Not Found"}', False),
        (False, 404, '{"error": "Not Found"}', True),
        (True, -1, "no answer in time", True),
    ],
)
def test_an_error_has_a_message_and_is_the_clients(may_fail, status, body, is_problem) -> None:
    assert bool(problem(status, body, may_fail=may_fail)) == is_problem


GOOD = Figures(
    answered=[Answered("pins", "pin", 200, 0.5)],
    before=Resident(900 * MB, 2000 * MB, 400 * MB),
    after=Resident(1000 * MB, 2100 * MB, 400 * MB),
    ttft_s={"idle": [0.02] * 100, "formats": [0.03] * 900, "pins": [0.03] * 100},
    blocks_in_use=0,
    flushed=True,
    same_answers=[True] * 6,
    log_lines=1.0,
    stops_s=[2.0, 3.0],
)


def failed(figures: Figures) -> list[str]:
    return [check.name for check in figures.checks() if not check.passed]


@pytest.mark.parametrize(
    ("worse", "name"),
    [
        ({"answered": [Answered("pins", "pin", 500, 0.5, "500: x")]}, "answered as they should"),
        ({"answered": []}, "answered as they should"),
        ({"answered": [Answered("pins", "pin", -1, 61.0)]}, "slowest answer"),
        ({"after": Resident(1201 * MB, 2100 * MB, 400 * MB)}, "API server"),
        ({"after": Resident(1000 * MB, 0, 400 * MB)}, "RSS of the engine"),
        ({"after": Resident(1000 * MB, 2100 * MB, 601 * MB)}, "compile workers"),
        ({"ttft_s": {"idle": [0.02] * 100, "pins": [0.03] * 1000 + [0.05] * 11}}, "TTFT"),
        ({"ttft_s": {"idle": [], "pins": [0.03]}}, "TTFT"),
        ({"blocks_in_use": 1}, "KV blocks"),
        ({"flushed": False}, "KV blocks"),
        ({"same_answers": [True, False]}, "greedy"),
        ({"log_lines": 70.0}, "log lines"),
        ({"stops_s": [2.0, 11.0]}, "SIGTERM"),
    ],
)
def test_a_figure_outside_its_limit_fails(worse, name) -> None:
    assert any(name in one for one in failed(replace(GOOD, **worse)))
