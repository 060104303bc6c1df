"""docs/coverage.md says what the parts answer now."""

from __future__ import annotations

import pytest

from sgl_vllm.preview.outlook import Outlook, PartOutlook, State
from tools import coverage


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_tables_are_up_to_date() -> None:
    page = coverage.SECTION.page.read_text()
    assert page == coverage.SECTION.written_into(page), f"run `{coverage.SECTION.command}`"


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
    assert {one.model for one in coverage.DEPLOYMENTS} <= set(coverage.MODELS)
    assert len({one.name for one in coverage.DEPLOYMENTS}) == len(coverage.DEPLOYMENTS)
