"""A small part of `python -m tools.attack.parts`: no request turns a part off for others."""

from __future__ import annotations

import pytest

from tools.attack.parts import fuzz

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NUM_REQUESTS = 800


def test_odd_requests_turn_no_part_off_and_get_no_5xx_that_stock_does_not_give(tmp_path):
    outcome = fuzz(NUM_REQUESTS, 7, tmp_path / "server.log", advance=lambda: None)
    assert set(outcome.parts.values()) == {"on"}
    assert outcome.reports == [] and outcome.worse_than_stock == []
    assert outcome.statuses.total() == NUM_REQUESTS
    assert outcome.statuses[200] > NUM_REQUESTS / 4 and outcome.statuses[400] > NUM_REQUESTS / 10
