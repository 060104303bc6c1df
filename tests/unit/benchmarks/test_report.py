"""`benchmarks.report` over recorded results: what is read, what rounds bear out, and the README."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.report import __main__ as command
from benchmarks.report import loading, tables
from benchmarks.report.loading import Spread, Verdict

RECORDED = Path(__file__).parents[3] / "benchmarks" / "results" / "cpu"


@pytest.mark.parametrize(
    ("ratio", "rounds", "verdict"),
    [
        (2.3, [2.2, 2.4, 2.3], Verdict.BETTER),
        (0.8, [0.79, 0.8, 0.82], Verdict.WORSE),
        (0.995, [0.98, 1.005, 0.997], Verdict.NO_DIFFERENCE),
        (1.02, [1.01, 1.05, 1.02], Verdict.NO_DIFFERENCE),  # as far apart as it is from 1
        (1.02, [1.018, 1.02, 1.022], Verdict.BETTER),
        (5.0, [5.0], Verdict.UNKNOWN),
    ],
)
def test_rounds_decide_what_a_ratio_says(ratio, rounds, verdict) -> None:
    assert Spread.of(ratio, rounds).verdict is verdict


def test_the_table_has_the_recorded_ratio_of_each_workload(tmp_path: Path) -> None:
    recorded = json.loads((RECORDED / "rag.json").read_text())
    (tmp_path / "rag.json").write_text(json.dumps(recorded))
    (tmp_path / "masks.json").write_text('{"backends": []}')
    loaded = loading.load([tmp_path])
    assert [file.name for file in loaded.skipped] == ["masks.json"]
    (row,) = (line for line in tables.markdown(loaded).splitlines() if line.startswith("| rag"))
    assert f"{recorded['ratio']['throughput']:.2f}" in row


def test_the_readme_gets_the_table_and_a_second_time_nothing_changes(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(f"# A title\n\n{tables.BEGIN}\nold\n{tables.END}\n\nAfter.\n")
    words = [str(RECORDED), "--readme", str(readme)]
    assert command.main(words) == 0
    once = readme.read_text()
    assert once.startswith("# A title\n") and once.endswith("\n\nAfter.\n")
    assert "\n| rag" in once and "old\n" not in once
    assert "DIR --readme README.md`" in once  # no folder of this machine
    assert command.main(words) == 0
    assert readme.read_text() == once
