"""The kernels' benchmarks without a GPU: bytes, and results on small cases in the interpreter."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks.kernels import device, slot_copy
from benchmarks.kernels.__main__ import KERNELS, main
from sgl_vllm.commands.terminal import WIDTH_OF_FILES


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


@pytest.mark.parametrize("kernel", KERNELS)
def test_times_have_columns_of_their_own(kernel: str) -> None:
    bytes_of = {f"{name}_bytes": 10**9 for name in ("least", "kernel", "stock", "one_by_one")}
    facts = {"case": "one", "pays": True, "plan_us": 7.0}
    times = {"ms": 1.0, "kernel_ms": 0.5, "stock_ms": 4.0, "ratio": 4.0, "gb_s": 2000.0}
    row = {**bytes_of, **facts, **times, "off": 0.0, "stock_off": 0.0}
    output = StringIO()
    console = Console(file=output, width=WIDTH_OF_FILES)
    console.print(device.table([row], KERNELS[kernel].COLUMNS))
    headings, cells = output.getvalue().splitlines()
    assert headings.split()[-4:] == ["stock", "ms", "ratio", "GB/s"]
    assert cells.split()[-3:] == ["4.000", "4.00", "2,000"]


def test_the_least_is_the_matched_slots_read_and_written_once() -> None:
    case = slot_copy.Case(3, num_layers=5, num_kv_heads=2, head_size=16)
    num_slots = sum(number for *_, number in case.copies())
    assert slot_copy.least_bytes(case) == 2 * num_slots * 5 * 2 * 2 * 16 * 2
    assert slot_copy.stock_bytes(case) == 4 * 3 * 16 * 5 * 2 * 2 * 16 * 2
