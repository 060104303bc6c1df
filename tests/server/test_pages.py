"""The code of the documentation, run against one real server with the plugin."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import sgl_vllm as sgl
from sgl_vllm.demo import MODEL_PATH
from tests.pages import blocks_of, cells_of, printed_by, shown_by
from tests.server.conftest import API_KEY

ROOT = Path(sgl.__file__).parent.parent
DOCS = ROOT / "docs"
SIDE_BY_SIDE = sorted(
    path.name.removesuffix("_sgl.py") for path in (DOCS / "side_by_side").glob("*_sgl.py")
)
TUTORIAL = ROOT / "examples" / "tutorial.ipynb"
URL = "http://127.0.0.1:8000"


@pytest.fixture
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", API_KEY)


@pytest.mark.slow
@pytest.mark.parametrize("page", ["README", "docs/guide", "docs/moving"])
def test_a_page_prints_what_it_says(compact_server, key, page: str, tmp_path: Path) -> None:
    blocks = list(blocks_of(ROOT / f"{page}.md"))
    assert any(block.printed for block in blocks)
    namespace = {"__name__": "page"}
    for block in blocks:
        here = replace(block, code=block.code.replace(URL, compact_server.url))
        printed = printed_by(here, namespace, tmp_path / f"line_{block.line}.py")
        if block.printed is not None:
            assert printed == block.printed, f"{page}.md, line {block.line}"


@pytest.mark.parametrize("program", SIDE_BY_SIDE)
def test_programs_side_by_side_print_the_same(server, program: str) -> None:
    finished = [
        subprocess.run(
            [sys.executable, str(DOCS / "side_by_side" / f"{program}_{how}.py"), server.url],
            env={**os.environ, "VLLM_API_KEY": API_KEY, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=60,
        )
        for how in ("openai", "sgl")
    ]
    assert [process.returncode for process in finished] == [0, 0], finished
    assert finished[0].stdout == finished[1].stdout
    assert finished[0].stdout.count("\n") >= 2


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_tutorial_runs_from_its_first_cell_to_its_last(monkeypatch) -> None:
    """As in Jupyter; its model is the demo's, which it serves itself."""
    monkeypatch.setenv("TUTORIAL_MODEL", str(MODEL_PATH))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    namespace: dict[str, Any] = {"__name__": "__main__"}

    async def run_all() -> list[str]:
        return [await shown_by(cell, namespace) for cell in cells_of(TUTORIAL)]

    try:
        shown = asyncio.run(run_all())
    finally:
        namespace["server"].stop()
    everything = "\n".join(shown)
    for answer in (
        "The capital of France is Paris.",
        "Asia and 3 is one leg more",
        "- Sleep eight hours. A good night makes the whole day easier.",
        "4 calls, ",
        "Peru     The capital of Peru is Lima.",
        "'Cairo'",
        "gen 'number' failed: ",
    ):
        assert answer in everything
    assert not namespace["server"].running
