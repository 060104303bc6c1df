"""`benchmarks.micro` with real benchmarks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.micro import main

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_the_quick_sizes_are_taken_and_both_are_summed_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "micro.json"
    assert main(["--quick", "--only", "simulate,schedule", "--json", str(file)]) == 0
    content = json.loads(file.read_text())
    assert content["simulate"]["arguments"]["requests"] == 200
    assert content["simulate"]["ratio"]["hit_rate"] > 0.5
    cases = {"unshared", "full", "groups", "few", "hold", "programs"}
    assert content["schedule"].keys() == cases
    shown = capsys.readouterr().out
    assert "hit rate; above 1 the plugin is better" in shown
    assert "a step, groups" in shown
