"""The kernels' benchmarks without a GPU: bytes, and results on small cases in the interpreter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.kernels import device, slot_copy
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


def test_one_kernel_may_be_named_and_columns_are_explained(
    capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.setattr(slot_copy, "CASES", slot_copy.CASES[:1])
    assert main(["slot_copy", "--explain"]) == 0
    printed = capsys.readouterr().out
    assert "*least* is what has to be read and written" in printed
    assert "prefix_decode" not in printed
    with pytest.raises(SystemExit):
        main(["slot_cpy"])
    assert "no kernel named slot_cpy" in capsys.readouterr().err


def test_the_least_is_the_matched_slots_read_and_written_once() -> None:
    case = slot_copy.Case(3, num_layers=5, num_kv_heads=2, head_size=16)
    num_slots = sum(number for *_, number in case.copies())
    assert slot_copy.least_bytes(case) == 2 * num_slots * 5 * 2 * 2 * 16 * 2
    assert slot_copy.stock_bytes(case) == 4 * 3 * 16 * 5 * 2 * 2 * 16 * 2
