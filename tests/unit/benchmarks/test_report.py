"""`benchmarks.report`: reading results, spreads, names, tables, the README and the page."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.ab.workloads import WORKLOADS
from benchmarks.report import __main__ as command
from benchmarks.report import loading, page, tables
from benchmarks.report.loading import Result, Spread, Verdict
from tests.results_of_benchmarks import HOSTILE, old_result, result, serve_result, write

RATIOS = st.floats(0.05, 20)


def load_one(folder: Path, content: dict[str, Any]) -> Result:
    (one,) = loading.load([write(folder, "one", content)]).results
    return one


# -- spreads


@given(st.lists(RATIOS, min_size=2, max_size=6), RATIOS)
def test_nothing_is_called_better_whose_rounds_are_on_both_sides_of_1(rounds, ratio) -> None:
    spread = Spread.of(ratio, rounds)
    if min(rounds) <= 1 <= max(rounds):
        assert spread.verdict is Verdict.NO_DIFFERENCE
    elif spread.verdict is not Verdict.NO_DIFFERENCE:
        assert (spread.verdict is Verdict.BETTER) == (ratio > 1)


@given(st.lists(RATIOS, min_size=2, max_size=6), RATIOS)
def test_a_ratio_and_its_inverse_are_judged_alike(rounds, ratio) -> None:
    inverse = Spread.of(1 / ratio, [1 / one for one in rounds])
    opposite = {Verdict.BETTER: Verdict.WORSE, Verdict.WORSE: Verdict.BETTER}
    found = Spread.of(ratio, rounds).verdict
    # Rounding may decide where the ratio is exactly as far from 1 as the rounds are apart.
    if inverse.verdict is not opposite.get(found, found):
        assert Verdict.NO_DIFFERENCE in (inverse.verdict, found)


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


def test_the_spread_of_any_figure_is_of_its_rounds(tmp_path) -> None:
    one = load_one(tmp_path, result())
    passes = one.spread_of("forward_passes", -1)
    assert passes is not None
    assert (passes.ratio, passes.low, passes.high) == (2.0, 2.0, 2.0)
    assert one.spread_of("forced_tokens", 0) is None
    assert one.spread_of("a figure of tomorrow", 1) is None


# -- reading


def test_a_folder_is_read_whole_and_says_what_it_skips(tmp_path) -> None:
    for name in ("rag", "react"):
        write(tmp_path, name, result(workload=name))
    write(tmp_path, "masks", {"backends": []})
    (tmp_path / "notes.txt").write_text("no JSON")
    results = loading.load([tmp_path])
    assert {one.workload for one in results.results} == {"rag", "react"}
    assert [file.name for file in results.skipped] == ["masks.json"]


def test_older_files_lack_keys_and_are_shown_without_them(tmp_path) -> None:
    one = load_one(tmp_path, old_result())
    assert (one.gain, one.machine, one.ablations, one.score) == ("", "", (), {})
    headings = tables.full_table([one]).headings
    assert "throughput" in headings
    assert not {"score", "of the limit"} & set(headings)
    assert "one round" in tables.markdown(loading.load([tmp_path]))


def test_keys_that_are_null_are_keys_that_are_missing(tmp_path) -> None:
    content = result()
    content["score"] = {"stock": None, "sgl": None}
    content["near_limit"] = None
    content["limits"]["best_wall_s"] = None
    one = load_one(tmp_path, content)
    assert (one.score, one.near_limit) == ({}, {})
    assert not [fact for fact in page.limits_of(one) if "would take" in fact]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is no JSON"),
        ("[]", "its JSON is no object"),
        ('{"workload": "rag"}', "is no result of benchmarks.ab"),
        ('{"workload": "rag", "arms": {}}', "KeyError('same_output')"),
        (json.dumps(result() | {"ratio": {}}), "KeyError('throughput')"),
        (json.dumps(result() | {"limits": 3}), "is no result of benchmarks.ab"),
        (json.dumps(result() | {"ratio": {"throughput": 0}}), "ratio.throughput is not above 0"),
        (json.dumps(result() | {"ablations": [{"name": "fcfs"}]}), "KeyError('throughput')"),
        (json.dumps(result() | {"differences": ["x"]}), "is no result of benchmarks.ab"),
    ],
)
def test_a_bad_file_is_one_line_that_names_it(tmp_path, capsys, text, message) -> None:
    file = tmp_path / "bad.json"
    file.write_text(text)
    assert command.main([str(file)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert str(file) in line


def test_a_file_or_result_that_is_not_there_is_said(tmp_path, capsys) -> None:
    assert command.main([str(tmp_path / "none.json")]) == 1
    assert "cannot read" in capsys.readouterr().err
    assert command.main([str(tmp_path)]) == 1
    assert "no result of benchmarks.ab" in capsys.readouterr().err


# -- names


def names_of(folder: Path, contents: dict[str, dict[str, Any]]) -> list[str]:
    for name, content in contents.items():
        write(folder, name, content)
    return [one.label for one in loading.load([folder]).results]


def test_results_of_one_workload_are_told_apart_by_concurrency(tmp_path) -> None:
    contents = {str(n): result(workload="json_regex", concurrency=n) for n in (1, 32, 8)}
    assert names_of(tmp_path, contents) == [f"json_regex, {n} at a time" for n in (1, 8, 32)]


def test_a_concurrency_that_was_not_given_is_the_workloads_own(tmp_path) -> None:
    contents = {str(n): result(workload="json_regex", concurrency=n) for n in (1, 8)}
    contents["1"]["arguments"]["concurrency"] = None
    assert WORKLOADS["json_regex"].concurrency == 1
    assert names_of(tmp_path, contents) == ["json_regex, 1 at a time", "json_regex, 8 at a time"]


def test_a_workload_that_is_not_known_here_has_only_the_concurrency_that_was_given(
    tmp_path,
) -> None:
    content = result(workload="of tomorrow")
    content["arguments"]["concurrency"] = None
    assert load_one(tmp_path, content).concurrency is None


def test_of_the_same_workload_the_number_of_programs_comes_before_the_names_of_files(
    tmp_path,
) -> None:
    contents = {"one": result(), "two": result() | {"requests": 144}}
    few = contents["one"]["requests"]
    assert sorted(names_of(tmp_path, contents)) == sorted(
        [f"rag, {few} programs", "rag, 144 programs"]
    )
    again = {"three": result() | {"requests": 144}}
    assert "rag, 144 programs, three" in names_of(tmp_path, again)


def test_models_are_in_the_names_only_if_there_are_several(tmp_path) -> None:
    contents = {"a": result(model="demo"), "b": result(workload="react", model="demo")}
    assert sorted(names_of(tmp_path, contents)) == ["rag", "react"]
    contents = {"c": result(workload="react", model="/models/large")}
    assert sorted(names_of(tmp_path, contents)) == ["rag, demo", "react, demo", "react, large"]


def test_a_plugin_without_a_part_never_passes_for_the_whole(tmp_path) -> None:
    content = result()
    content["arguments"] |= {"off": ["radix"], "policy": "fcfs", "quick": True}
    assert names_of(tmp_path, {"a": content}) == ["rag, without radix, fcfs, quick"]


def test_stock_with_flags_of_its_own_never_passes_for_plain_stock(tmp_path) -> None:
    content = result()
    content["arguments"]["stock_args"] = "--no-enable-prefix-caching"
    contents = {"a": result(), "b": content}
    assert names_of(tmp_path, contents) == ["rag", "rag, stock with --no-enable-prefix-caching"]


def test_results_that_nothing_else_tells_apart_have_their_files_names(tmp_path) -> None:
    assert names_of(tmp_path, {"monday": result(), "tuesday": result()}) == [
        "rag, monday",
        "rag, tuesday",
    ]


def test_the_greatest_gain_comes_first_and_a_workload_stays_together(tmp_path) -> None:
    contents = {
        "a": result(workload="rag", ratio=1.2),
        "b": result(workload="json_regex", ratio=1.1, concurrency=32),
        "c": result(workload="json_regex", ratio=3.0, concurrency=1),
    }
    assert names_of(tmp_path, contents) == [
        "json_regex, 1 at a time",
        "json_regex, 32 at a time",
        "rag",
    ]


def test_the_command_repeats_the_measurement_without_the_machines_paths() -> None:
    arguments = {
        "workload": "all",
        "model": "shape:33m",
        "json": "/results/x.json",
        "data": "/data/here",
        "quick": False,
        "ablations": True,
        "rounds": 5,
        "requests": None,
        "server_args": "--max-num-seqs 16",
        "off": ["radix", "select"],
    }
    assert loading.command_of("rag", arguments) == (
        "python -m benchmarks.ab rag --model shape:33m --data DIR --ablations --rounds 5 "
        "--server-args='--max-num-seqs 16' --off radix --off select"
    )


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


def test_the_caption_says_what_made_the_table(tmp_path) -> None:
    write(tmp_path, "one", result())
    text = tables.markdown(loading.load([tmp_path]), "--readme README.md")
    assert "`python -m benchmarks.report DIR --readme README.md`" in text
    for fact in ("model demo", "2 cores of a processor", "2026-11-22", "vllm 0.32.0 (cpu)"):
        assert fact in text


def test_every_row_of_a_table_has_a_cell_for_every_heading(tmp_path) -> None:
    for name, content in {"new": result(), "old": old_result()}.items():
        write(tmp_path, name, content)
    write(tmp_path, "serve", serve_result())
    results = loading.load([tmp_path])
    made = [
        tables.full_table(results.results),
        tables.short_table(results.results),
        tables.serve_table(results.datasets),
        *(tables.figures_table(one) for one in results.results),
    ]
    for table in made:
        assert {len(row) for row in table.rows} == {len(table.headings)}


@given(st.text())
def test_a_models_name_cannot_break_a_markdown_table(name) -> None:
    cell = tables._markdown_cell(tables.Cell(name))
    assert "\n" not in cell
    assert re.search(r"(?<!\\)(\\\\)*\|", cell) is None
    assert "<" not in cell


def test_figures_whose_counts_are_the_same_are_equal(tmp_path) -> None:
    content = result()
    for arm in content["arms"].values():
        for one in (arm, *arm["rounds"]):
            one["forward_passes"] = 7
    one = load_one(tmp_path, content)
    (row,) = (row for row in tables.figures_table(one).rows if row[0].text == "forward passes")
    assert [cell.text for cell in row] == ["forward passes", "7", "7", "equal"]


def test_hit_rates_of_arms_that_ask_in_different_ways_are_not_compared(tmp_path) -> None:
    content = result()
    content["arms"]["sgl"]["prompt_tokens"] = 2_000
    one = load_one(tmp_path, content)
    assert one.different_prompts
    table = tables.full_table([one])
    cell = table.rows[0][table.headings.index("hit rate")]
    assert cell.text == "different prompts"


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


def test_the_command_in_the_readme_has_its_path_from_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    readme = tmp_path / "docs" / "page.md"
    readme.parent.mkdir()
    readme.write_text(README)
    results = write(tmp_path, "one", result())
    assert command.main([str(results), "--readme", "docs/page.md"]) == 0
    assert "DIR --readme docs/page.md`" in readme.read_text()


@pytest.mark.parametrize(
    "text",
    [
        "nothing",
        tables.BEGIN,
        tables.END,
        f"{tables.END}\n{tables.BEGIN}",
        f"{README}\n{tables.BEGIN}",
    ],
)
def test_a_readme_without_its_two_markers_is_left_alone(tmp_path, capsys, text) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(text)
    html = tmp_path / "page.html"
    one = write(tmp_path, "one", result())
    assert command.main([str(one), "--readme", str(readme), "--html", str(html)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert str(readme) in line
    assert "benchmarks:" in line
    assert readme.read_text() == text
    assert not html.exists()


# -- the page and the command


def test_markdown_goes_to_a_file_or_to_the_terminal(tmp_path, capsys) -> None:
    one, file = write(tmp_path, "one", result()), tmp_path / "table.md"
    assert command.main([str(one)]) == 0
    printed = capsys.readouterr().out
    assert command.main([str(one), "--markdown", str(file)]) == 0
    assert capsys.readouterr().out == ""
    assert file.read_text().splitlines()[:3] == printed.splitlines()[:3]


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


def test_the_policy_of_the_page_allows_its_own_script_alone(tmp_path) -> None:
    text = page.page(loading.load([write(tmp_path, "serve", serve_result())]))
    (script,) = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', text)
    assert re.findall(r"script-src ([^;]*)", policy) == [f"'sha256-{digest}'"]


def test_the_table_has_both_tails_of_the_time_to_first_token(tmp_path) -> None:
    table = tables.full_table([load_one(tmp_path, result(ratio=4.0))])
    cells = dict(zip(table.headings, table.rows[0], strict=True))
    assert cells["first token, p50"].text == cells["first token, p99"].text == "4.00"
    assert cells["first token, p50"].order == 4.0


def test_pairs_are_ordered_by_the_number_with_the_plugin(tmp_path) -> None:
    table = tables.full_table([load_one(tmp_path, result())])
    cells = dict(zip(table.headings, table.rows[0], strict=True))
    assert (cells["forward passes"].text, cells["forward passes"].order) == ("1,000 → 500", 500)
    assert cells["workload"].order is None


def test_a_report_of_vllms_own_figures_alone_needs_no_workload(tmp_path) -> None:
    results = loading.load([write(tmp_path, "serve", serve_result())])
    assert "| prefix_repetition (demo) | 1.50 (one round) |" in tables.markdown(results)
    assert "All workloads" not in page.page(results)


def test_a_spread_of_serve_is_read_like_any_other(tmp_path) -> None:
    content = serve_result()
    content["datasets"][0]["ratio_of_rounds"] = [{"throughput": 1.4}, {"throughput": 1.5}]
    one, _ = loading.load([write(tmp_path, "serve", content)]).datasets
    assert one.spreads["throughput"].verdict is Verdict.BETTER
    assert one.spreads["ttft_p99"].verdict is Verdict.UNKNOWN
