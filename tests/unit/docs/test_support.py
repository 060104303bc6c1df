"""docs/support.md and the README say what the parts answer, and what is foreseen for models."""

from __future__ import annotations

import re

import pytest

from tools.generated import ROOT
from tools.support import __main__ as support

PAGE = (ROOT / "docs" / "support.md").read_text()


def rows_of(heading: str) -> list[list[str]]:
    """The cells of the table below a heading."""
    _, _, below = PAGE.partition(f"\n### {heading}\n")
    lines = re.split(r"\n##+ ", below)[0].splitlines()
    cells = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")]
    return cells[1:]


@pytest.mark.nightly
@pytest.mark.timeout(400)
def test_the_tables_are_up_to_date() -> None:
    for section in support.SECTIONS:
        page = section.page.read_text()
        assert page == section.written_into(page), f"run `{section.command}`"


def test_vllm_builds_as_many_parameters_as_a_model_is_known_for() -> None:
    published = {model["name"]: model["billions"] for model in support.MODELS}
    for row in rows_of("Well-known models"):
        name, _, _ = row[0].removeprefix("[").partition("]")
        assert float(row[1].removesuffix("B")) == pytest.approx(published.pop(name), rel=0.07), name
    assert published == {}
