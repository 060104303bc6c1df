"""`benchmarks.serve` the whole way through: vLLM's load generator, two real servers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.serve.__main__ import main

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_vllms_own_load_generator_finds_no_more_prompt_tokens_computed_than_on_stock(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "serve.json"
    sizes = ["--dataset", "prefix_repetition", "--quick", "--num-prompts", "16"]
    assert main([*sizes, "--model", "demo", "--json", str(file)]) == 0, capsys.readouterr().err
    (dataset,) = json.loads(file.read_text())["datasets"]
    stock, sgl = dataset["arms"]["stock"], dataset["arms"]["sgl"]
    for arm in (stock, sgl):
        assert (arm["completed"], arm["failed"]) == (16, 0)
        assert arm["output_tokens"] == arm["output_tokens_sent"] == 16 * 128
        assert arm["computed_prompt_tokens"] + arm["cached_prompt_tokens"] == arm["prompt_tokens"]
        assert 0 < arm["ttft_p50_s"] <= arm["ttft_p99_s"] <= arm["latency_p99_s"]
    assert sgl["prompt_tokens"] == stock["prompt_tokens"]
    assert sgl["computed_prompt_tokens"] <= stock["computed_prompt_tokens"]
    assert "prompt tokens computed" in capsys.readouterr().out
