"""Writes docs/support.md's tables and the README's: which part is on where, and for which layers.

Owns the form of the tables. `deployments.toml` has the deployments, with small models that stand
for families; `models.json` the configurations of well-known models as far as they decide about
layers, models for images as their text model; `families.json` the models that vLLM has recipes for
(https://github.com/vllm-project/recipes), without those that are no language models. Does not own
the answers: they are those of `sgl-vllm doctor MODEL`. There are no weights.

    python -m tools.support [--check]

Takes about 80 s.
"""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any  # Any: JSON and TOML

from sgl_vllm.preview.outlook import KVCacheGroups, Outlook, PartOutlook, State
from tools.generated import ROOT, GeneratedSection
from tools.support.outlooks import CPU, GPU, Answer, ask

FOLDER = Path(__file__).parent
_DATA: dict[str, Any] = tomllib.loads((FOLDER / "deployments.toml").read_text())
CONFIGS = {name: {**_DATA["common"], **values} for name, values in _DATA["models"].items()}
"""By the name of a small model, its `config.json`."""

DEPLOYMENTS: list[dict[str, Any]] = [
    {"model": "llama", "flags": (), "devices": (CPU, GPU), **row} for row in _DATA["deployments"]
]
"""Rows: a `name`, a model, flags of `vllm serve`, and the devices where the row is shown."""

SUMMARIES: list[dict[str, Any]] = _DATA["summaries"]
"""The README's rows: a `name`, `deployments` with the same parts, and on which of vLLM's model
runners this project's `tests` run them on a CPU, written by hand from docs/support.md."""

MODELS: list[dict[str, Any]] = json.loads((FOLDER / "models.json").read_text())
"""Well-known models: `name`, `source` (where the values were read, in Markdown), `config`, and the
parameters in `billions`, as the authors round them."""

FAMILIES: list[dict[str, Any]] = json.loads((FOLDER / "families.json").read_text())
"""Models with the same kinds of `layers`, the names of their `recipes`, and the well-known model
`built` that answers for them; without one, whether radix `is_on` by vLLM's code, and `why`."""

COMPONENTS = {
    "FullAttentionSpec": ("full attention", "nodes"),
    "MLAAttentionSpec": ("MLA", "nodes"),
    "SlidingWindowSpec": ("windows", "windows"),
    "ChunkedLocalAttentionSpec": ("chunks", "windows"),
    "MambaSpec": ("recurrent", "states"),
}
"""For each of vLLM's kinds of layers what it is called, and what of the tree serves its groups."""


@cache
def outlooks(device: str) -> list[tuple[str, Outlook]]:
    """What is foreseen on a device for each deployment, by its name."""
    rows = [one for one in DEPLOYMENTS if device in one["devices"]]
    answers = ask(device, CONFIGS, [(one["model"], *one["flags"]) for one in rows])
    return [(row["name"], answer.outlook) for row, answer in zip(rows, answers, strict=True)]


# -- which part is on where ----------------------------------------------------------------------


def part_lines() -> Iterator[str]:
    """The tables, and below them the reasons in the engine's own words."""
    notes: dict[str, int] = {}
    headings = ((GPU, "On a GPU, as predicted for an NVIDIA H100"), (CPU, "On a CPU"))
    for device, heading in headings:
        yield f"\n### {heading}\n"
        yield from table_lines(outlooks(device), notes)
    yield "\n### Why a part is off\n"
    yield "In the words of the engine's log:\n"
    for reason, number in notes.items():
        yield f"{number}. {reason}"


def table_lines(rows: Sequence[tuple[str, Outlook]], notes: dict[str, int]) -> Iterator[str]:
    """One table. Numbers each reason in `notes` when it is first met."""
    names = [part.name for part in rows[0][1].parts]
    yield f"| deployment | runner, scheduling | {' | '.join(names)} |"
    yield "|---|---|" + "---|" * len(names)
    for name, outlook in rows:
        how = f"{outlook.model_runner}, {'asynchronous' if outlook.is_async else 'synchronous'}"
        cells = (_cell(part, notes) for part in outlook.parts)
        yield f"| {name} | {how} | {' | '.join(cells)} |"


def _cell(part: PartOutlook, notes: dict[str, int]) -> str:
    if part.state is not State.OFF:
        return "checked" if part.state is State.CHECKED else "on"
    return f"off ({notes.setdefault(part.reason, len(notes) + 1)})"


def summary_lines() -> Iterator[str]:
    """The README's table."""
    yield ""
    yield "| your server | parts on a GPU | parts on a CPU | tests |"
    yield "| --- | --- | --- | --- |"
    for row in SUMMARIES:
        cells = [common_parts(row["deployments"], device) for device in (GPU, CPU)]
        yield f"| {' | '.join([row['name'], *cells, row['tests']])} |"


def common_parts(deployments: Sequence[str], device: str) -> str:
    """Which parts are on, and whether any is checked. ValueError if deployments differ."""
    found = {_in_words(one.parts) for name, one in outlooks(device) if name in deployments}
    if len(found) > 1:
        raise ValueError(f"{deployments}, on a {device}: {found}")
    return found.pop() if found else "does not start"


def _in_words(parts: Sequence[PartOutlook]) -> str:
    off = [f"`{part.name}`" for part in parts if part.state is State.OFF]
    on = f"all but {', '.join(off)}" if off else "all"
    is_checked = any(part.state is State.CHECKED for part in parts)
    return f"{on}; checked at start" if is_checked else on


# -- which layers of which model -----------------------------------------------------------------


def layer_lines() -> Iterator[str]:
    answers = ask(
        GPU, {one["name"]: one["config"] for one in MODELS}, [(m["name"],) for m in MODELS]
    )
    found = {model["name"]: answer for model, answer in zip(MODELS, answers, strict=True)}
    yield "\n### Well-known models\n"
    yield "| model | parameters | layers in groups: component | radix | values from |"
    yield "|---|---:|---|---|---|"
    for model in MODELS:
        name, answer = model["name"], found[model["name"]]
        groups = answer.outlook.kv_cache
        shown = "; ".join(_groups(one, _is_on(answer), len(groups) == 1) for one in groups)
        radix = "on" if _is_on(answer) else f"off: {_radix(answer).reason}"
        billions = f"{answer.num_parameters / 1e9:.1f}B"
        link = f"[{name}](https://huggingface.co/{name})"
        yield f"| {link} | {billions} | {shown} | {radix} | {model['source']} |"
    yield "\n### vLLM's recipes\n"
    yield from recipe_lines(found)


def _groups(groups: KVCacheGroups, is_on: bool, is_single: bool) -> str:
    layers, component = COMPONENTS[groups.kind]
    component = "nodes" if is_single else component  # of windows that never end, too
    count = "" if groups.num_groups == 1 else f" in {groups.num_groups} groups"
    served_by = f": {component}" if is_on else ""
    return f"{groups.num_layers} {layers}{count}, blocks of {groups.block_size}{served_by}"


def recipe_lines(found: Mapping[str, Answer]) -> Iterator[str]:
    """The share of models for which radix is on, and a line per family."""
    num_models = {"on": 0, "off": 0, "?": 0}
    table = ["| layers | models | radix | by | recipes |", "|---|---:|---|---|---|"]
    for family in FAMILIES:
        recipes, built = family["recipes"], family.get("built")
        is_on = family.get("is_on") if built is None else _is_on(found[built])
        by = family.get("why", "") if built is None else built.partition("/")[2]
        word = {True: "on", False: "off", None: "?"}[is_on]
        num_models[word] += len(recipes)
        names = ", ".join(recipe.partition("/")[2] for recipe in recipes)
        table.append(f"| {family['layers']} | {len(recipes)} | {word} | {by} | {names} |")
    on, off, unknown = num_models.values()
    yield (
        f"Of {on + off + unknown} language models with a recipe, radix is on for {on} and off for "
        f"{off}: {on / (on + off):.0%} of those that are classified. {unknown} are not.\n"
    )
    yield from table


def _radix(answer: Answer) -> PartOutlook:
    return next(part for part in answer.outlook.parts if part.name == "radix")


def _is_on(answer: Answer) -> bool:
    return _radix(answer).state is not State.OFF


SECTIONS = [
    GeneratedSection(ROOT / page, "make coverage", source, lines)
    for page, source, lines in (
        ("docs/support.md", "the parts' own answers", part_lines),
        ("docs/support.md", "what is foreseen for models", layer_lines),
        ("README.md", "the parts' own answers", summary_lines),
    )
]

if __name__ == "__main__":
    sys.exit(max(section.main() for section in SECTIONS))
