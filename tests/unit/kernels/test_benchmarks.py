"""The kernel's benchmark without a GPU: bytes, and results on small cases in the interpreter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from benchmarks import kernels


def test_without_cuda_it_says_so_and_shows_bytes_and_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.setattr(kernels, "CASES", kernels.CASES[:2])
    file = tmp_path / "rows.json"
    assert kernels.main(["--json", str(file)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(kernels.NO_CUDA)
    assert "stock ms" not in printed
    content = json.loads(file.read_text())
    assert content["device"] is None
    (rows,) = content["kernels"].values()
    assert len(rows) == 2
    for row in rows:
        assert row["off"] < 2e-2
        assert row["kernel_bytes"] >= row["least_bytes"]
        assert "ms" not in row


def test_distinct_tokens_are_counted_once() -> None:
    case = kernels.Case(12, ((64, 1), (40, 3)), own_tokens=30)
    table, lengths = kernels.tables_of(case)
    # Of 40 tokens, 32 are whole blocks.
    assert kernels.distinct_tokens(table, lengths, 16) == 64 + 3 * 32 + 12 * (8 + 30)
