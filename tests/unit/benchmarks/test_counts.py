"""The gate on counts: what counts as a change, and how it is told."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

pytest.importorskip("tokenizers")

from benchmarks import counts

BEFORE = {"rag": {"forward_passes": 10, "computed_prompt_tokens": 300}}


def told(now: dict[str, dict[str, int]], vllm: str = "0.32.0") -> tuple[int, str]:
    console = Console(width=120, record=True, file=io.StringIO())
    code = counts._tell({"vllm": "0.32.0", "counts": BEFORE}, vllm, now, console)
    return code, " ".join(console.export_text().split())


def test_the_same_counts_are_no_change() -> None:
    assert counts.changes(BEFORE, BEFORE) == []
    assert told(BEFORE)[0] == 0


def test_one_count_more_or_less_is_a_change_and_is_named() -> None:
    for passes in (9, 11):
        code, said = told({"rag": {"forward_passes": passes, "computed_prompt_tokens": 300}})
        assert code == 1
        assert f"rag forward_passes 10 {passes}" in said
        assert "computed_prompt_tokens" not in said
        assert "--update" in said


def test_a_workload_that_was_never_counted_is_a_change() -> None:
    assert counts.changes(BEFORE, {"react": {"forward_passes": 1}}) == [
        ("react", "forward_passes", "none", "1")
    ]


def test_another_vllm_is_named_as_it_may_be_the_reason() -> None:
    changed = {"rag": {"forward_passes": 9}}
    assert "before: vLLM 0.32.0, now: 0.33.0" in told(changed, vllm="0.33.0")[1]
    assert "before: vLLM" not in told(changed)[1]
