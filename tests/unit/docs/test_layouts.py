"""docs/support.md says what is foreseen for well-known models, and counts recipes right."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

import sgl_vllm
from tools.layouts.__main__ import COMPONENTS, FAMILIES, MODELS, SECTION

PAGE = (Path(sgl_vllm.__file__).parent.parent / "docs" / "support.md").read_text()


def rows_of(heading: str) -> list[list[str]]:
    """The cells of the table below a heading."""
    _, _, below = PAGE.partition(f"\n### {heading}\n")
    lines = re.split(r"\n##+ ", below)[0].splitlines()
    cells = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")]
    return cells[1:]


@pytest.mark.nightly
@pytest.mark.timeout(400)
def test_the_tables_are_up_to_date() -> None:
    assert SECTION.written_into(PAGE) == PAGE, f"run `{SECTION.command}`"


@pytest.mark.parametrize(
    ("model", "groups", "radix"),
    [
        ("Qwen/Qwen3-235B-A22B", "94 full attention, blocks of 16: nodes", "on"),
        ("zai-org/GLM-5", "156 MLA, blocks of 64: nodes", "on"),  # an index for each of 78 layers
        (
            "stepfun-ai/Step-3.5-Flash",
            "12 full attention, blocks of 16: nodes; 33 windows in 3 groups, blocks of 16: windows",
            "on",
        ),
        (
            # A state takes 1,097,728 bytes, a token 2,048: 536 tokens, in blocks of 16.
            "Qwen/Qwen3-Next-80B-A3B-Instruct",
            "36 recurrent in 3 groups, blocks of 544: states; "
            "12 full attention, blocks of 544: nodes",
            "on",
        ),
        (
            "google/gemma-4-31B-it",
            "50 windows in 5 groups, blocks of 16: windows; 10 full attention, blocks of 32: nodes",
            "on",
        ),
    ],
)
def test_the_row_of_a_model(model: str, groups: str, radix: str) -> None:
    row = next(row for row in rows_of("Well-known models") if row[0].startswith(f"[{model}]"))
    assert row[2:4] == [groups, radix]


def test_vllm_builds_as_many_parameters_as_a_model_is_known_for() -> None:
    published = {model.name: model.billions for model in MODELS}
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


def test_families_name_models_that_are_built_and_each_recipe_once() -> None:
    assert {one.built for one in FAMILIES if one.built} <= {model.name for model in MODELS}
    recipes = Counter(recipe for family in FAMILIES for recipe in family.recipes)
    assert [recipe for recipe, count in recipes.items() if count > 1] == []
    assert all(family.built or family.why for family in FAMILIES)


def test_the_page_explains_each_component() -> None:
    head, _, _ = PAGE.partition(SECTION.begin)
    assert all(f"*{component}*" in head for _, component in COMPONENTS.values())
