"""docs/support.md and the README say what the parts answer now."""

from __future__ import annotations

import pytest

from sgl_vllm.preview.outlook import Outlook, PartOutlook, State
from tools import coverage


@pytest.mark.nightly
@pytest.mark.timeout(400)
def test_the_tables_are_up_to_date() -> None:
    for section in coverage.SECTIONS:
        page = section.page.read_text()
        assert page == section.written_into(page), f"run `{section.command}`"


def test_a_reason_is_written_once_and_its_cells_have_its_number() -> None:
    def row(name: str, *parts: PartOutlook) -> tuple[coverage.Deployment, Outlook]:
        outlook = Outlook("m", "cpu", False, "V1", False, True, [], [*parts])
        return coverage.Deployment(name), outlook

    off = PartOutlook("radix", State.OFF, "a reason")
    other = PartOutlook("select", State.OFF, "another")
    notes: dict[str, int] = {}
    rows = [
        row("first", off, PartOutlook("select", State.CHECKED)),
        row("second", off, other),
    ]
    assert list(coverage.table_lines(rows, notes)) == [
        "| deployment | runner, scheduling | radix | select |",
        "|---|---|---|---|",
        "| first | V1, synchronous | off (1) | checked |",
        "| second | V1, synchronous | off (1) | off (2) |",
    ]
    assert notes == {"a reason": 1, "another": 2}


def test_deployments_name_models_that_exist() -> None:
    assert {one.model for one in coverage.DEPLOYMENTS} <= set(coverage.CONFIGS)
    assert len({one.name for one in coverage.DEPLOYMENTS}) == len(coverage.DEPLOYMENTS)


def test_a_row_of_the_readme_names_deployments_that_exist() -> None:
    named = [name for row in coverage.SUMMARIES for name in row.deployments]
    assert set(named) <= {one.name for one in coverage.DEPLOYMENTS}
    assert len(set(named)) == len(named)


@pytest.mark.parametrize(
    ("states", "words"),
    [
        ((State.ON, State.ON), "all"),
        ((State.CHECKED, State.ON), "all; checked at start"),
        ((State.CHECKED, State.OFF), "all but `select`; checked at start"),
        ((State.OFF, State.OFF), "all but `radix`, `select`"),
    ],
)
def test_the_readme_says_which_parts_are_off_and_whether_the_others_are_checked(
    states: tuple[State, State], words: str
) -> None:
    parts = [PartOutlook(name, one) for name, one in zip(("radix", "select"), states, strict=True)]
    assert coverage.parts_in_words(parts) == words


def test_deployments_with_different_parts_cannot_share_a_row_of_the_readme(monkeypatch) -> None:
    def row(name: str, state: State) -> tuple[coverage.Deployment, Outlook]:
        part = PartOutlook("radix", state)
        return coverage.Deployment(name), Outlook("m", "cpu", False, "V1", False, True, [], [part])

    rows = [row("first", State.ON), row("second", State.OFF), row("third", State.ON)]
    monkeypatch.setattr(coverage, "outlooks", lambda device: rows)
    same = coverage.Summary("a row", ("first", "third"), "no")
    assert coverage.common_parts(same, coverage.CPU) == "all"
    assert (
        coverage.common_parts(coverage.Summary("a row", (), "no"), coverage.CPU) == "does not start"
    )
    different = coverage.Summary("a row", ("first", "second"), "no")
    with pytest.raises(ValueError, match="a row, on a cpu"):
        coverage.common_parts(different, coverage.CPU)
