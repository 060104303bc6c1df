"""A small part of `make attack`: no odd request turns a part off for others."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from tools.attack import target
from tools.attack.__main__ import REPORT, stock_fails_too
from tools.attack.client import send_all
from tools.attack.hostile import Attack
from tools.attack.odd import odd_requests

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NUM_REQUESTS = 800


def test_odd_requests_turn_no_part_off_and_get_no_5xx_that_stock_does_not_give():
    statuses: Counter[int] = Counter()
    failed: dict[int, Attack] = {}

    def on_answer(one: Attack, status: int, text: str, seconds: float) -> None:
        if status < 0 or status >= 500:
            failed[statuses.total()] = one
        statuses[status] += 1

    with target.demo_server() as server:
        send_all(server.url, odd_requests(random.Random(7), NUM_REQUESTS), 24, on_answer)
        assert set(target.parts(server.url).values()) == {"on"}
        assert target.log_lines(server, REPORT) == []
    assert statuses.total() == NUM_REQUESTS
    assert statuses[200] > NUM_REQUESTS / 4 and statuses[400] > NUM_REQUESTS / 10
    assert {*stock_fails_too(failed)} == {*failed}
