"""Tests that take minutes: complete comparisons of two servers, hostile clients, and the newest
supported vLLM."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from benchmarks import agent_programs, counts
from benchmarks.ab import __main__ as ab
from benchmarks.ab.result import Figures
from sgl_vllm.vllm_api.versions import SUPPORTED_VERSIONS, release_of
from tools.attack import __main__ as attacks
from tools.vllm_versions import BUILDS, ROOT

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]


def test_a_tight_cache_is_used_better_for_the_same_texts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "result.json"
    sizes = ["--quick", "--requests", "96", "--concurrency", "96"]
    assert ab.main(["tight_cache", *sizes, "--json", str(file)]) == 0, capsys.readouterr().err
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
        assert 0 < arm["ttft_p50_s"] <= arm["ttft_p99_s"] <= arm["latency_p99_s"]
    assert sgl["computed_prompt_tokens"] < 0.9 * stock["computed_prompt_tokens"]
    assert content["ratio"].keys() == {"throughput", "latency_p50", "ttft_p99"}
    assert "programs/s" in capsys.readouterr().out


def test_an_image_is_computed_once_for_all_questions_about_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "result.json"
    assert ab.main(["image_qa", "--quick", "--json", str(file)]) == 0, capsys.readouterr().err
    content = json.loads(file.read_text())
    assert content["model"] == "shape:vlm-33m"
    assert content["same_output"] == {"compared": 2, "equal": 2}
    stock, sgl = content["arms"]["stock"], content["arms"]["sgl"]
    unique = content["limits"]["unique_prompt_tokens"]
    assert 2 * 256 < unique <= sgl["computed_prompt_tokens"] <= 1.02 * unique
    assert stock["computed_prompt_tokens"] > 2 * sgl["computed_prompt_tokens"]


def test_tools_that_are_called_early_save_their_time_and_at_most_a_block_is_computed_twice(
    tmp_path,
):
    """A request that arrives while the last block of its prefix is being computed does not find
    that block, of 32 tokens, in each of two runs."""
    assert agent_programs.main(["--quick", "--json", str(tmp_path / "result.json")]) == 0
    results = {one["program"]: one for one in json.loads((tmp_path / "result.json").read_text())}
    assert set(results) == {"research", "review", "repair"}
    for result in results.values():
        assert set(result["seconds"]) == set(agent_programs.WAYS)
        assert result["num_different"] == 0
        assert max(result["wasted_tokens"].values()) < 2 * 32
    assert results["repair"]["prefilled_tokens"][agent_programs.MARKED] > 0
    # Three of its four tools, of 50 to 500 ms each, may run at the same time.
    seconds = results["repair"]["seconds"]
    early = max(seconds[agent_programs.MARKED], seconds[agent_programs.COMPILED])
    assert early < seconds[agent_programs.ORDINARY]


def test_every_workload_costs_what_is_written_down(capsys: pytest.CaptureFixture[str]) -> None:
    assert counts.main([]) == 0, capsys.readouterr().out


def test_other_clients_of_an_attacked_server_notice_little() -> None:
    """The attacked server has to end in time, which takes no other one. Its TTFT is not compared
    with that of an idle server, which is more than it can be on two cores."""
    figures = attacks.attack(attacks.QUICK, 0, lambda *_: lambda: None, num_stops=1, idle_s=1)
    assert [one for one in figures.answered if one.error] == []
    assert [c for c in figures.checks() if not c.passed and not c.name.startswith("TTFT")] == []
    assert len(figures.attacked_s()) > 50
    assert attacks.percentile(figures.attacked_s(), 99) < 5


def test_the_engine_tests_that_matter_most_pass_on_the_newest_vllm() -> None:
    """Downloads it the first time (0.34 GB). `make versions` runs all tests on all versions."""
    newest = BUILDS[-1].version
    assert release_of(newest)[:2] == SUPPORTED_VERSIONS[1]
    tests = ("test_block_hashes.py", "test_radix.py", "test_jump_forward.py")
    command = [sys.executable, "-m", "tools.vllm_versions", "test", newest, "--only", *tests]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"[-5000:]
