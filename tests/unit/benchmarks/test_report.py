"""`benchmarks.report`: reading results, spreads, names, tables and the README."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.report import __main__ as command
from benchmarks.report import loading, tables
from benchmarks.report.loading import Spread, Verdict

RECORDED = Path(__file__).parents[3] / "benchmarks/results/cpu/rag.json"


def result(
    workload: str = "rag",
    model: str = "demo",
    ratio: float = 2.0,
    apart: float = 0.01,
    concurrency: int = 8,
) -> dict[str, Any]:
    """A recorded result with three other rounds: their ratios lie within `apart`, a share, of
    `ratio`, and half the passes and tokens are computed."""
    content: dict[str, Any] = json.loads(RECORDED.read_text())
    stock = {**content["arms"]["stock"], "forward_passes": 1000, "computed_prompt_tokens": 6000}
    del stock["rounds"]

    def sgl(ratio: float) -> dict[str, Any]:
        times = {key: stock[key] / ratio for key in stock if key.endswith("_s") and "p" in key}
        throughput = stock["throughput_programs_s"] * ratio
        counts = {"forward_passes": 500, "computed_prompt_tokens": 3000}
        return {**stock, **times, **counts, "throughput_programs_s": throughput}

    def ratios(ratio: float) -> dict[str, float]:
        return dict.fromkeys(("throughput", "latency_p50", "ttft_p99"), ratio)

    of_rounds = [ratio, ratio * (1 - apart), ratio * (1 + apart)]
    return content | {
        "workload": workload,
        "model": model,
        "arms": {
            "stock": {**stock, "rounds": [stock] * 3},
            "sgl": {**sgl(ratio), "rounds": [sgl(one) for one in of_rounds]},
        },
        "ratio": ratios(ratio),
        "ratio_of_rounds": [ratios(one) for one in of_rounds],
        "differences": [{"round_number": 1, "item": 3, "stock": "a cat", "sgl": "a dog"}],
        "arguments": {"workload": workload, "model": model, "concurrency": concurrency},
    }


def write(folder: Path, name: str, content: dict[str, Any]) -> Path:
    file = folder / f"{name}.json"
    file.write_text(json.dumps(content))
    return file


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
