"""The README: pictures drawn from recorded runs, ratios that were measured, commands to try."""

from __future__ import annotations

import io
import json
import re
import tomllib
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console

from sgl_vllm.commands import demo
from tools import chart, recording
from tools.generated import ROOT

README = (ROOT / "README.md").read_text()
SUPPORT = (ROOT / "docs" / "support.md").read_text()
EXPECT = SUPPORT[SUPPORT.index("## What to expect") : SUPPORT.index("### With windows")]
"""Of the page, what names ratios of the chart."""

CHAR_WIDTH = 12.2  # in rich's pictures


def texts_of(picture: Path) -> list[ElementTree.Element]:
    return list(ElementTree.parse(picture).iter("{http://www.w3.org/2000/svg}text"))


def lines_of_terminal(picture: Path) -> list[str]:
    """Its text, put together from pieces of a line and their columns."""
    lines: dict[float, str] = {}
    for piece in texts_of(picture):
        if "clip-path" in piece.attrib:  # so not the window's title
            x, y = float(piece.attrib["x"]), float(piece.attrib["y"])
            text = "".join(piece.itertext()).replace("\xa0", " ")
            lines[y] = lines.get(y, "").ljust(round(x / CHAR_WIDTH)) + text
    return [lines[y].rstrip() for y in sorted(lines)]


def recorded_ratios() -> dict[str, float]:
    """Throughput with the plugin as a multiple of stock's, by the name of the file."""
    files = (ROOT / "benchmarks" / "results" / "cpu").glob("*.json")
    return {file.stem: json.loads(file.read_text())["ratio"]["throughput"] for file in files}


def test_the_pictures_are_up_to_date() -> None:
    assert chart.CHART.read_text() == chart.chart(), "run `make pictures`"
    drawn = recording.picture(recording.recorded())
    assert recording.PICTURE.read_text() == drawn, "run `make pictures`"


def test_the_chart_has_the_recorded_ratios_next_to_their_names() -> None:
    ratios = recorded_ratios()
    words = ["".join(one.itertext()) for one in texts_of(chart.CHART)]
    for rows in chart.ROWS.values():
        for file, name in rows.items():
            shown = words[words.index(name) :][2]  # after the name and the model
            value = float(re.findall(r"([\d.]+)x", shown)[0])
            assert value == pytest.approx(ratios[file], abs=0.05 if value >= 10 else 0.005), file


@pytest.mark.parametrize("page", [README, EXPECT], ids=["README", "expect"])
def test_the_ratios_are_recorded_ones(page: str) -> None:
    named = re.findall(r"\b(\d+\.(\d+))x", page)
    assert len(named) > 5
    for text, digits in named:
        measured = {f"{one:.{len(digits)}f}" for one in recorded_ratios().values()}
        assert text in measured, f"{text}x"


def test_the_terminal_shows_what_the_demo_prints_of_the_recorded_run() -> None:
    console = Console(width=84, record=True, file=io.StringIO())
    demo.show(recording.recorded(), console)
    printed = [line.rstrip() for line in console.export_text().splitlines()]

    command, *shown = lines_of_terminal(recording.PICTURE)
    assert command == "$ sgl-vllm demo"
    (cut,) = (number for number, line in enumerate(shown) if "more lines" in line)
    num_last = len(shown) - cut - 1
    assert shown[:cut] == printed[:cut] and shown[-num_last:] == printed[-num_last:]
    assert shown[cut] == f"... {len(printed) - cut - num_last} more lines ..."
    assert shown[-1] == "same answers: yes"


@pytest.mark.parametrize("page", ["README.md", "docs/index.md", "docs/install.md"])
def test_the_first_command_clones_the_repository(page: str) -> None:
    source = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Source"]
    commands = re.findall(r"^    (.+)$", (ROOT / page).read_text(), re.MULTILINE)
    assert commands[0] == f"git clone {source} && cd {source.rpartition('/')[2]}"
    assert commands[1].startswith("pip install '.[server]'")
