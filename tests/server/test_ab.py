"""`benchmarks.ab` the whole way through: two real servers, the shipped model, exact counts."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import pytest

from benchmarks.ab.__main__ import main
from benchmarks.ab.result import Figures

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_a_tight_cache_is_used_better_for_the_same_texts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "result.json"
    sizes = ["--quick", "--requests", "96", "--concurrency", "96"]
    assert main(["tight_cache", *sizes, "--json", str(file)]) == 0, capsys.readouterr().err
    content = json.loads(file.read_text())
    stock, sgl = content["arms"]["stock"], content["arms"]["sgl"]
    assert stock.keys() == sgl.keys() == {*(one.name for one in fields(Figures)), "rounds"}
    assert content["same_output"] == {"compared": 96, "equal": 96}
    assert content["parts"]["radix"] == content["parts"]["schedule"] == "on"

    for arm in (stock, sgl):
        assert arm["prompt_tokens"] == content["limits"]["prompt_tokens"]
        assert arm["computed_prompt_tokens"] >= content["limits"]["unique_prompt_tokens"]
        assert arm["computed_prompt_tokens"] + arm["cached_prompt_tokens"] == arm["prompt_tokens"]
        assert arm["output_tokens"] == content["limits"]["output_tokens"]
        assert arm["forced_tokens"] == 0
        assert 0 < arm["ttft_p50_s"] <= arm["ttft_p99_s"] <= arm["latency_p99_s"]
    assert sgl["computed_prompt_tokens"] < 0.9 * stock["computed_prompt_tokens"]
    assert content["ratio"].keys() == {"throughput", "latency_p50", "ttft_p99"}
    assert "programs/s" in capsys.readouterr().out


@pytest.mark.nightly
def test_an_image_is_computed_once_for_all_questions_about_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "result.json"
    assert main(["image_qa", "--quick", "--json", str(file)]) == 0, capsys.readouterr().err
    content = json.loads(file.read_text())
    assert content["model"] == "shape:vlm-33m"
    assert content["same_output"] == {"compared": 2, "equal": 2}
    stock, sgl = content["arms"]["stock"], content["arms"]["sgl"]
    unique = content["limits"]["unique_prompt_tokens"]
    assert 2 * 256 < unique <= sgl["computed_prompt_tokens"] <= 1.02 * unique
    assert stock["computed_prompt_tokens"] > 2 * sgl["computed_prompt_tokens"]
