"""The kernels' benchmarks without a GPU: bytes, and results on small cases in the interpreter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.kernels import device
from benchmarks.kernels.__main__ import KERNELS, main


def test_without_cuda_it_says_so_and_shows_bytes_and_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    for benchmark in KERNELS.values():
        monkeypatch.setattr(benchmark, "CASES", benchmark.CASES[:2])
    file = tmp_path / "rows.json"
    assert main(["--json", str(file)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(device.NO_CUDA)
    assert "stock ms" not in printed
    content = json.loads(file.read_text())
    assert content["device"] is None and content["kernels"].keys() == KERNELS.keys()
    for rows in content["kernels"].values():
        assert len(rows) == 2
        for row in rows:
            assert row["off"] < 2e-2
            assert row["kernel_bytes"] >= row["least_bytes"]
            assert "ms" not in row
