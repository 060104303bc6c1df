"""Writes docs/support.md's tables: which component serves which layers of well-known models.

Owns the form of the tables. `models.json` has the configurations as far as they decide about
layers, with models for images as their text model. `families.json` has the models that vLLM has
recipes for (the files under `models/` in https://github.com/vllm-project/recipes), but for those
that are no language models. The layers are built by vLLM's classes of the models, grouped by vLLM,
and judged by the plugin, as for `sgl-vllm doctor MODEL`.

    python -m tools.layouts [--check]

Takes about 40 s.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any  # Any: JSON

from sgl_vllm.preview.outlook import KVCacheGroups, PartOutlook, State
from tools.generated import ROOT, GeneratedSection
from tools.outlooks import GPU, Answer, ask

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class KnownModel:
    """A model.

    Attributes:
        source: where the values were read, in Markdown.
        billions: parameters, as its authors round them. If vLLM builds as many, the configuration
            is complete and this model's.
    """

    name: str
    source: str
    billions: float
    config: dict[str, Any]


@dataclass(frozen=True)
class Family:
    """Models with the same kinds of layers.

    Attributes:
        layers: their kinds, for the table.
        recipes: names at Hugging Face.
        built: the known model that answers for the family.
        is_on: the answer where there is none, by vLLM's code of the model; None if that does not
            say enough.
        why: for such an answer.
    """

    layers: str
    recipes: list[str]
    built: str | None = None
    is_on: bool | None = None
    why: str = ""


MODELS = [KnownModel(**row) for row in json.loads((FOLDER / "models.json").read_text())]
FAMILIES = [Family(**row) for row in json.loads((FOLDER / "families.json").read_text())]

COMPONENTS = {
    "FullAttentionSpec": ("full attention", "nodes"),
    "MLAAttentionSpec": ("MLA", "nodes"),
    "SlidingWindowSpec": ("windows", "windows"),
    "ChunkedLocalAttentionSpec": ("chunks", "windows"),
    "MambaSpec": ("recurrent", "states"),
}
"""For each of vLLM's kinds of layers what it is called, and what of the tree serves its groups."""


def answers() -> dict[str, Answer]:
    """By model."""
    configs = {model.name: model.config for model in MODELS}
    found = ask(GPU, configs, [(model.name,) for model in MODELS])
    return {model.name: answer for model, answer in zip(MODELS, found, strict=True)}


def section_lines() -> Iterator[str]:
    found = answers()
    yield "\n### Well-known models\n"
    yield from model_lines(MODELS, found)
    yield "\n### vLLM's recipes\n"
    yield from recipe_lines(FAMILIES, found)


def model_lines(models: Sequence[KnownModel], found: Mapping[str, Answer]) -> Iterator[str]:
    yield "| model | parameters | layers in groups: component | radix | values from |"
    yield "|---|---:|---|---|---|"
    for model in models:
        answer = found[model.name]
        is_on = radix(answer).state is not State.OFF
        is_single = len(answer.outlook.kv_cache) == 1
        groups = "; ".join(_groups(one, is_on, is_single) for one in answer.outlook.kv_cache)
        yield (
            f"| [{model.name}](https://huggingface.co/{model.name}) "
            f"| {answer.num_parameters / 1e9:.1f}B | {groups} "
            f"| {'on' if is_on else f'off: {radix(answer).reason}'} | {model.source} |"
        )


def _groups(groups: KVCacheGroups, is_on: bool, is_single: bool) -> str:
    layers, component = COMPONENTS[groups.kind]
    component = "nodes" if is_single else component  # of windows that never end, too
    count = "" if groups.num_groups == 1 else f" in {groups.num_groups} groups"
    served_by = f": {component}" if is_on else ""
    return f"{groups.num_layers} {layers}{count}, blocks of {groups.block_size}{served_by}"


def recipe_lines(families: Sequence[Family], found: Mapping[str, Answer]) -> Iterator[str]:
    """A line per family, and below them the share of models for which radix is on."""
    num_models = {True: 0, False: 0, None: 0}
    table = ["| layers | models | radix | by | recipes |", "|---|---:|---|---|---|"]
    for family in families:
        is_on, by = verdict(family, found)
        num_models[is_on] += len(family.recipes)
        word = {True: "on", False: "off", None: "?"}[is_on]
        names = ", ".join(recipe.partition("/")[2] for recipe in family.recipes)
        table.append(f"| {family.layers} | {len(family.recipes)} | {word} | {by} | {names} |")
    on, off, unknown = num_models[True], num_models[False], num_models[None]
    yield (
        f"Of {on + off + unknown} language models with a recipe, radix is on for {on} and off for "
        f"{off}: {on / (on + off):.0%} of those that are classified. {unknown} are not.\n"
    )
    yield from table


def verdict(family: Family, found: Mapping[str, Answer]) -> tuple[bool | None, str]:
    """Whether radix is on for a family, and what says so."""
    if family.built is None:
        return family.is_on, family.why
    return radix(found[family.built]).state is not State.OFF, family.built.partition("/")[2]


def radix(answer: Answer) -> PartOutlook:
    return next(part for part in answer.outlook.parts if part.name == "radix")


SECTION = GeneratedSection(
    page=ROOT / "docs" / "support.md",
    command="make layouts",
    source="the plugin's answers",
    lines=section_lines,
)


if __name__ == "__main__":
    sys.exit(SECTION.main())
