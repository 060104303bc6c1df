"""docs/support.md and the README say what the parts answer, and what is foreseen for models."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from sgl_vllm.preview.outlook import Outlook, PartOutlook
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


def outlook(*parts: PartOutlook) -> Outlook:
    return Outlook("m", "cpu", False, "V1", False, True, [], [*parts])


@pytest.mark.parametrize(
    ("model", "groups"),
    [
        ("Qwen/Qwen3-235B-A22B", "94 full attention, blocks of 16: nodes"),
        ("zai-org/GLM-5", "156 MLA, blocks of 64: nodes"),  # an index for each of 78 layers
        (
            # A state takes 1,097,728 bytes, a token 2,048: 536 tokens, in blocks of 16.
            "Qwen/Qwen3-Next-80B-A3B-Instruct",
            "36 recurrent in 3 groups, blocks of 544: states; "
            "12 full attention, blocks of 544: nodes",
        ),
        (
            "google/gemma-4-31B-it",
            "50 windows in 5 groups, blocks of 16: windows; 10 full attention, blocks of 32: nodes",
        ),
    ],
)
def test_the_row_of_a_model(model: str, groups: str) -> None:
    row = next(row for row in rows_of("Well-known models") if row[0].startswith(f"[{model}]"))
    assert row[2:4] == [groups, "on"]


def test_vllm_builds_as_many_parameters_as_a_model_is_known_for() -> None:
    published = {model["name"]: model["billions"] for model in support.MODELS}
    for row in rows_of("Well-known models"):
        name, _, _ = row[0].removeprefix("[").partition("]")
        assert float(row[1].removesuffix("B")) == pytest.approx(published.pop(name), rel=0.07), name
    assert published == {}


def test_the_share_of_recipes_is_that_of_the_table() -> None:
    num_models: Counter[str] = Counter()
    for row in rows_of("vLLM's recipes"):
        assert int(row[1]) == len(row[4].split(", "))
        num_models[row[2]] += int(row[1])
    on, off, unknown = num_models["on"], num_models["off"], num_models["?"]
    counts = re.search(r"Of (\d+) language models .* on for (\d+) and off for (\d+): (\d+)%", PAGE)
    assert counts is not None
    assert [int(count) for count in counts.groups()] == [
        on + off + unknown,
        on,
        off,
        round(100 * on / (on + off)),
    ]
