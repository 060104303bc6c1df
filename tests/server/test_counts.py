"""Every workload with the plugin costs what is written down: a change is made on purpose."""

from __future__ import annotations

import json

import pytest

from benchmarks import counts
from benchmarks.ab.workloads import WORKLOADS


def test_every_workload_is_written_down() -> None:
    assert [*json.loads(counts.FILE.read_text())["counts"]] == [*WORKLOADS]


def test_every_workload_costs_what_is_written_down(capsys: pytest.CaptureFixture[str]) -> None:
    assert counts.main([]) == 0, capsys.readouterr().out
