"""The gate on counts: what counts as a change, and how it is told."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

pytest.importorskip("tokenizers")

from benchmarks import counts
from benchmarks.ab.workloads import WORKLOADS
from benchmarks.counts import COUNTS, Counts

RAG: Counts = {"texts": "ab12", **dict.fromkeys(COUNTS, 100)}
BEFORE = {"rag": RAG}


def told(now: dict[str, Counts], vllm: str = "0.32.0") -> tuple[int, str]:
    console = Console(width=120, record=True, file=io.StringIO())
    code = counts._tell({"vllm": "0.32.0", "counts": BEFORE}, vllm, now, console)
    return code, " ".join(console.export_text().split())


def test_every_workload_is_written_down() -> None:
    assert [*json.loads(counts.FILE.read_text())["counts"]] == [*WORKLOADS]


@pytest.mark.parametrize("passes", [99, 101])
def test_one_count_more_or_less_is_a_change_and_is_named(passes: int) -> None:
    code, said = told({"rag": {**RAG, "forward_passes": passes}})
    assert code == 1
    assert f"rag forward_passes 100 {passes}" in said
    assert "computed_prompt_tokens" not in said
    assert "--update" in said


@pytest.mark.parametrize(("passes", "code"), [(94, 1), (95, 0), (105, 0), (106, 1)])
def test_where_other_texts_were_written_a_little_is_allowed(passes: int, code: int) -> None:
    assert told({"rag": {**RAG, "texts": "cd34", "forward_passes": passes}})[0] == code
