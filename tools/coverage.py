"""Writes docs/support.md's tables and the README's: which part is on in which deployment.

Owns the form of the tables. The deployments, and the small models that stand for families, are in
`coverage.toml`. Does not own the answers: they are those of `sgl-vllm doctor MODEL`, so of the
functions that an engine asks. A model is a `config.json` of a few layers; there are no weights.

    python -m tools.coverage [--check]

Takes about 40 s.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any  # Any: TOML

from sgl_vllm.preview.outlook import Outlook, PartOutlook, State
from tools.generated import ROOT, GeneratedSection
from tools.outlooks import CPU, GPU, ask

_DATA: dict[str, Any] = tomllib.loads((ROOT / "tools" / "coverage.toml").read_text())
CONFIGS = {name: {**_DATA["common"], **values} for name, values in _DATA["models"].items()}
"""By model, its `config.json`."""


@dataclass(frozen=True)
class Deployment:
    """A row.

    Attributes:
        flags: of `vllm serve`.
        devices: where the row is shown.
    """

    name: str
    model: str = "llama"
    flags: Sequence[str] = ()
    devices: Sequence[str] = (CPU, GPU)


DEPLOYMENTS = [Deployment(**row) for row in _DATA["deployments"]]


@cache
def outlooks(device: str) -> list[tuple[Deployment, Outlook]]:
    """What is foreseen for each deployment on a device."""
    rows = [one for one in DEPLOYMENTS if device in one.devices]
    answers = ask(device, CONFIGS, [(one.model, *one.flags) for one in rows])
    return [(row, answer.outlook) for row, answer in zip(rows, answers, strict=True)]


# -- the page ------------------------------------------------------------------------------------


def section_lines() -> Iterator[str]:
    """The tables in Markdown, and below them the reasons in the engine's own words."""
    notes: dict[str, int] = {}
    for device, heading in (
        (GPU, "On a GPU, as predicted for an NVIDIA H100"),
        (CPU, "On a CPU"),
    ):
        yield f"\n### {heading}\n"
        yield from table_lines(outlooks(device), notes)
    yield "\n### Why a part is off\n"
    yield "In the words of the engine's log:\n"
    for reason, number in notes.items():
        yield f"{number}. {reason}"


def table_lines(rows: Sequence[tuple[Deployment, Outlook]], notes: dict[str, int]) -> Iterator[str]:
    """One table. Numbers each reason in `notes` when it is first met."""
    names = [part.name for part in rows[0][1].parts]
    yield f"| deployment | runner, scheduling | {' | '.join(names)} |"
    yield "|---|---|" + "---|" * len(names)
    for deployment, outlook in rows:
        how = f"{outlook.model_runner}, {'asynchronous' if outlook.is_async else 'synchronous'}"
        cells = (_cell(part, notes) for part in outlook.parts)
        yield f"| {deployment.name} | {how} | {' | '.join(cells)} |"


def _cell(part: PartOutlook, notes: dict[str, int]) -> str:
    if part.state is not State.OFF:
        return "checked" if part.state is State.CHECKED else "on"
    return f"off ({notes.setdefault(part.reason, len(notes) + 1)})"


# -- the README ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Summary:
    """A row of the README's table.

    Attributes:
        deployments: names of rows of the page, which have the same parts.
        tests: vLLM's model runners on which this project's tests run it, on a CPU; written by hand
            from docs/support.md.
    """

    name: str
    deployments: Sequence[str]
    tests: str


SUMMARIES = [Summary(**row) for row in _DATA["summaries"]]


def summary_lines() -> Iterator[str]:
    """The README's table in Markdown."""
    yield ""
    yield "| your server | parts on a GPU | parts on a CPU | tests |"
    yield "| --- | --- | --- | --- |"
    for row in SUMMARIES:
        cells = [row.name, *(common_parts(row, device) for device in (GPU, CPU)), row.tests]
        yield f"| {' | '.join(cells)} |"


def common_parts(row: Summary, device: str) -> str:
    """The cell of a row on a device. ValueError if the row's deployments have different parts."""
    found = {
        parts_in_words(one.parts)
        for deployment, one in outlooks(device)
        if deployment.name in row.deployments
    }
    if len(found) > 1:
        raise ValueError(f"{row.name}, on a {device}: {found}")
    return found.pop() if found else "does not start"


def parts_in_words(parts: Sequence[PartOutlook]) -> str:
    """Which parts are on, and whether any of them is checked."""
    off = [f"`{part.name}`" for part in parts if part.state is State.OFF]
    on = f"all but {', '.join(off)}" if off else "all"
    is_checked = any(part.state is State.CHECKED for part in parts)
    return f"{on}; checked at start" if is_checked else on


SECTIONS = (
    GeneratedSection(
        page=ROOT / "docs" / "support.md",
        command="make coverage",
        source="the parts' own answers",
        lines=section_lines,
    ),
    GeneratedSection(
        page=ROOT / "README.md",
        command="make coverage",
        source="the parts' own answers",
        lines=summary_lines,
    ),
)


if __name__ == "__main__":
    sys.exit(max(section.main() for section in SECTIONS))
