"""`benchmarks.calibrate`: the real engine's passes, and a cost model of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("vllm")

import torch

from benchmarks import calibrate
from benchmarks.calibrate import DECODE_PASSES, Experiment, experiments, medians
from benchmarks.cost_model import Batch, CostModel, Pass


@pytest.mark.slow  # times, so nothing runs beside it
def test_the_measured_passes_are_those_of_the_experiments_and_have_a_cost_model(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
    torch.set_num_threads(1)
    file = tmp_path / "cost.json"
    words = "--model demo --max-num-batched-tokens 128 --max-num-seqs 4 --max-model-len 256"
    assert calibrate.main([*words.split(), "--repeats", "1", "--json", str(file)]) == 0

    document = json.loads(file.read_text())
    cost = CostModel.from_json(file)
    assert cost.step_s > 0
    assert "--step-s" in capfd.readouterr().out
    batches = {
        tuple(p[name] for name in ("prefill", "decode", "context")) for p in document["passes"]
    }
    assert (16, 0, 0) in batches  # one short prompt
    assert (0, 4, 4 * 16) in batches  # four of them decode
    assert (0, 4, 4 * (16 + DECODE_PASSES - 1)) in batches
    assert (123, 0, 128) in batches  # the rest of one of 251 tokens
    assert all(p["seconds"] > 0 for p in document["passes"])
    assert document["fit"]["num_passes"] == len(document["passes"])


def test_experiments_keep_to_what_the_engine_can_hold() -> None:
    found = experiments(
        max_num_batched_tokens=512, max_num_seqs=32, max_model_len=2048, cache_tokens=4096
    )
    assert len(found) == len(set(found))
    for one in found:
        assert one.num_requests <= 32
        assert one.num_prompt + one.num_reply <= 2048
        assert one.num_requests * (one.num_prompt + one.num_reply) <= 4096
    assert Experiment(1, 16, 1) in found
    assert max(one.num_requests for one in found) == 32


def test_a_pass_gets_the_median_of_its_times() -> None:
    batch, other = Batch(16, 0, 0), Batch(0, 1, 16)
    repeats = [
        [Pass(batch, first), Pass(other, second)] for first, second in ((1, 9), (3, 7), (2, 8))
    ]
    assert medians(repeats) == [Pass(batch, 2), Pass(other, 8)]
