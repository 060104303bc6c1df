"""What `tools.attack.parts` sends, and how it judges what came of it."""

from __future__ import annotations

import random

import pytest

from tools.attack import odd
from tools.attack.hostile import Attack
from tools.attack.parts import Outcome

ON = {"radix": "on", "fsm": "on"}


def test_the_same_seed_gives_the_same_requests() -> None:
    one, again, other = (list(odd.odd_requests(random.Random(seed), 60)) for seed in (3, 3, 4))
    assert one == again != other


@pytest.mark.parametrize(
    ("outcome", "passed"),
    [
        (Outcome(parts=ON), True),
        (Outcome(), False),
        (Outcome(parts={**ON, "fsm": "switched off by an error: see the log"}), False),
        (Outcome(parts=ON, reports=["... Please report this ..."]), False),
        (Outcome(parts=ON, failed=[(Attack("a", "/"), "500")]), True),
        (Outcome(parts=ON, worse_than_stock=[(Attack("a", "/"), "500")]), False),
    ],
)
def test_an_outcome_passes_if_all_is_on_and_nothing_is_worse_than_stock(outcome, passed) -> None:
    assert outcome.passed is passed
