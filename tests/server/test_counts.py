"""Every workload with the plugin costs what is written down: a change is made on purpose."""

from __future__ import annotations

import pytest

from benchmarks import counts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_every_workload_costs_what_is_written_down(capsys: pytest.CaptureFixture[str]) -> None:
    assert counts.main([]) == 0, capsys.readouterr().out
