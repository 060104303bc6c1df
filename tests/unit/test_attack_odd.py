"""What `tools.attack.parts` sends, and how it judges what came of it."""

from __future__ import annotations

import json
import random
from collections import Counter

import pytest

from tools.attack import odd
from tools.attack.hostile import Attack
from tools.attack.parts import Outcome

ON = {"radix": "on", "fsm": "on"}


def test_the_same_seed_gives_the_same_requests() -> None:
    one, again, other = (list(odd.odd_requests(random.Random(seed), 60)) for seed in (3, 3, 4))
    assert one == again != other


def test_all_kinds_come_in_turn_and_no_body_is_large() -> None:
    sent = list(odd.odd_requests(random.Random(0), 200))
    kinds = Counter(attack.kind.partition(":")[0] for attack in sent)
    assert len(kinds) == 10 and set(kinds.values()) == {20}
    assert all(len(attack.body) < 200_000 for attack in sent)


def test_nothing_asks_for_a_long_answer() -> None:
    for attack in odd.odd_requests(random.Random(1), 400):
        if attack.kind.startswith("fields"):
            body = json.loads(attack.body)
            assert not isinstance(body.get("max_tokens"), int) or body["max_tokens"] <= 4


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
