"""The blocks of docs/primitives.md print what the page says, and its pictures are their runs."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from sgl_vllm.lang.settings import global_config
from tools import pictures


@pytest.fixture(scope="module")
def runs():
    before = global_config.default_backend
    yield {run.name: run for run in pictures.runs()}
    global_config.default_backend = before


@pytest.mark.parametrize("name", pictures.SAYS)
def test_a_block_prints_what_the_page_says(runs, name: str) -> None:
    assert runs[name].printed == runs[name].block.printed


@pytest.mark.parametrize("name", pictures.SAYS)
def test_a_picture_is_up_to_date(runs, name: str) -> None:
    path = pictures.FOLDER / f"{name}.svg"
    assert path.read_text() == runs[name].picture, "run `make pictures`"
    ElementTree.parse(path)


def test_every_picture_is_on_the_page() -> None:
    page = pictures.PAGE.read_text()
    assert {path.stem for path in pictures.FOLDER.iterdir()} == {*pictures.SAYS}
    assert [name for name in pictures.SAYS if f"](pictures/{name}.svg)" not in page] == []
