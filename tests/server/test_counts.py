"""Workloads with the plugin cost what is written down: a change is made on purpose.

`test_nightly.py` compares all of them.
"""

from __future__ import annotations

import pytest

from benchmarks import counts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_some_workloads_cost_what_is_written_down(capsys: pytest.CaptureFixture[str]) -> None:
    names = ("json_schema", "react", "tree_of_thought")
    words = [word for name in names for word in ("--workload", name)]
    assert counts.main(words) == 0, capsys.readouterr().out
