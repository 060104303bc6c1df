"""`benchmarks.report`: reading results, spreads, names, tables, the README and the page."""

from __future__ import annotations

import json
import re

import pytest

from benchmarks.report import __main__ as command
from benchmarks.report import loading, page, tables
from benchmarks.report.loading import Spread, Verdict
from tests.results_of_benchmarks import HOSTILE, result, write

# -- spreads


@pytest.mark.parametrize(
    ("ratio", "rounds", "verdict"),
    [
        (2.3, [2.2, 2.4, 2.3], Verdict.BETTER),
        (0.8, [0.79, 0.8, 0.82], Verdict.WORSE),
        (0.995, [0.98, 1.005, 0.997], Verdict.NO_DIFFERENCE),
        (1.02, [1.01, 1.05, 1.02], Verdict.NO_DIFFERENCE),  # as far apart as it is from 1
        (1.02, [1.018, 1.02, 1.022], Verdict.BETTER),
        (5.0, [5.0], Verdict.UNKNOWN),
        (5.0, [], Verdict.UNKNOWN),
    ],
)
def test_rounds_decide_what_a_ratio_says(ratio, rounds, verdict) -> None:
    assert Spread.of(ratio, rounds).verdict is verdict


# -- reading


def test_a_folder_is_read_whole_and_says_what_it_skips(tmp_path) -> None:
    for name in ("rag", "react"):
        write(tmp_path, name, result(workload=name))
    write(tmp_path, "masks", {"backends": []})
    (tmp_path / "notes.txt").write_text("no JSON")
    results = loading.load([tmp_path])
    assert {one.workload for one in results.results} == {"rag", "react"}
    assert [file.name for file in results.skipped] == ["masks.json"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is no JSON"),
        ("[]", "its JSON is no object"),
        ('{"workload": "rag", "arms": {}}', "KeyError('arguments')"),
        (json.dumps(result() | {"ratio": {}}), "KeyError('throughput')"),
        (json.dumps(result() | {"ratio": {"throughput": 0}}), "ratio.throughput is not above 0"),
    ],
)
def test_a_bad_file_is_one_line_that_names_it(tmp_path, capsys, text, message) -> None:
    file = tmp_path / "bad.json"
    file.write_text(text)
    assert command.main([str(file)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert str(file) in line


# -- tables


def test_the_table_says_what_the_rounds_bear_out(tmp_path) -> None:
    contents = {"a": result(ratio=2.0), "b": result(workload="no_sharing", ratio=1.0, apart=0.02)}
    for name, content in contents.items():
        write(tmp_path, name, content)
    text = tables.markdown(loading.load([tmp_path]))
    rag, no_sharing = (line for line in text.splitlines() if re.match(r"\| (rag|no_sh)", line))
    assert "| **2.00** (1.98 to 2.02) |" in rag.replace(tables.SPACE, " ")
    assert "| no difference (1.000, 0.980 to 1.020) |" in no_sharing.replace(tables.SPACE, " ")
    assert "**" not in no_sharing.split("|")[2]
    assert "| 1,000 → 500 |" in rag


# -- the README

README = f"# A title\n\nBefore.\n\n{tables.BEGIN}\nold\n{tables.END}\n\nAfter.\n"


def test_the_readme_gets_the_table_and_a_second_time_nothing_changes(tmp_path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(README)
    results = write(tmp_path, "one", result())
    words = [str(results), "--readme", str(readme)]
    assert command.main(words) == 0
    once = readme.read_text()
    assert once.startswith("# A title\n\nBefore.\n")
    assert once.endswith("\n\nAfter.\n")
    assert "| rag |" in once
    assert "old" not in once
    assert "DIR --readme README.md`" in once  # no folder of this machine
    assert command.main(words) == 0
    assert readme.read_text() == once


# -- the page and the command


def test_the_page_is_the_same_from_the_same_results_and_escapes_what_models_wrote(tmp_path) -> None:
    content = result(workload=HOSTILE, model=HOSTILE)
    content["differences"] = [{"round_number": 1, "item": 2, "stock": HOSTILE, "sgl": "</pre>"}]
    content["gain"] = content["ablations"][0]["title"] = HOSTILE
    write(tmp_path, "one", content)
    write(tmp_path, "two", result())
    results = loading.load([tmp_path])
    text = page.page(results)
    assert text == page.page(results)
    assert text.count("<script") == 1
    assert "<img" not in text
    assert "&lt;script" in text
    assert re.findall(r'(?:src|href)="(?!#|data:)', text) == []
