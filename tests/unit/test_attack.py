"""How `make attack` judges what came of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tools.attack.__main__ import Answered, Figures
from tools.attack.target import Resident

MB = 1 << 20


GOOD = Figures(
    answered=[Answered("pins", "pin", 200, 0.5)],
    before=Resident(900 * MB, 2000 * MB, 400 * MB),
    after=Resident(1000 * MB, 2100 * MB, 400 * MB),
    ttft_s={"idle": [0.02] * 100, "formats": [0.03] * 900, "pins": [0.03] * 100},
    blocks_in_use=0,
    flushed=True,
    same_answers=[True] * 6,
    parts={"radix": "on", "fsm": "on"},
    reports=[],
    log_lines=1.0,
    stops_s=[2.0, 3.0],
)


@pytest.mark.parametrize(
    ("worse", "name"),
    [
        ({}, None),
        ({"answered": [Answered("pins", "pin", 500, 0.5, "500: x")]}, "answered as they should"),
        ({"answered": []}, "answered as they should"),
        ({"answered": [Answered("pins", "pin", -1, 61.0)]}, "slowest answer"),
        ({"after": Resident(1201 * MB, 2100 * MB, 400 * MB)}, "API server"),
        ({"ttft_s": {"idle": [0.02] * 100, "pins": [0.03] * 1000 + [0.05] * 11}}, "TTFT"),
        ({"blocks_in_use": 1}, "KV blocks"),
        ({"same_answers": [True, False]}, "greedy"),
        ({"parts": {"radix": "on", "fsm": "switched off by an error: see the log"}}, "parts that"),
        ({"reports": ["... Please report this ..."]}, "unexpected errors"),
        ({"log_lines": 70.0}, "log lines"),
        ({"stops_s": [2.0, 11.0]}, "SIGTERM"),
    ],
)
def test_a_figure_outside_its_limit_fails(worse, name) -> None:
    failed = [check.name for check in replace(GOOD, **worse).checks() if not check.passed]
    assert any(name in one for one in failed) if name else failed == []
