"""The quick half of `make attack`: other clients of an attacked server notice little of it."""

from __future__ import annotations

import pytest

from tools.attack.__main__ import QUICK, attack
from tools.attack.figures import Figures

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def figures() -> Figures:
    return attack(QUICK, seed=0, step=lambda name, total: lambda: None)


def test_every_hostile_request_is_answered_as_it_should_be(figures):
    assert [one for one in figures.answered if one.error] == []


def test_every_figure_is_within_its_limit(figures):
    assert [check for check in figures.checks() if not check.passed] == []
