"""The code of the documentation, run against one real server with the plugin."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import sgl_vllm as sgl
from tests.pages import blocks_of, printed_by
from tests.server.conftest import API_KEY

ROOT = Path(sgl.__file__).parent.parent
DOCS = ROOT / "docs"
SIDE_BY_SIDE = sorted(
    path.name.removesuffix("_sgl.py") for path in (DOCS / "side_by_side").glob("*_sgl.py")
)
URL = "http://127.0.0.1:8000"


@pytest.fixture
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", API_KEY)


@pytest.mark.parametrize("page", ["guide", "moving"])
def test_a_page_prints_what_it_says(server, key, page: str, tmp_path: Path) -> None:
    blocks = list(blocks_of(DOCS / f"{page}.md"))
    assert len(blocks) >= 3
    namespace = {"__name__": page}
    for block in blocks:
        if not block.can_run:
            continue
        here = replace(block, code=block.code.replace(URL, server.url))
        printed = printed_by(here, namespace, tmp_path / f"{page}_{block.line}.py")
        assert printed == (block.printed or ""), f"{page}.md, line {block.line}"


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
