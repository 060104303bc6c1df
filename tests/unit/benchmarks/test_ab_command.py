"""The command `benchmarks.ab` and its client, over small HTTP servers in vLLM's place."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tokenizers")
pytest.importorskip("prometheus_client")

from fastapi.responses import JSONResponse, PlainTextResponse, Response

import sgl_vllm as sgl
from benchmarks.ab.__main__ import main
from benchmarks.ab.client import run_programs, unique_prompt_tokens
from tests.unit.lang.conftest import RunningServer

ARM_KEYS = (
    *("throughput_programs_s", "output_tokens_s", "latency_p50_s", "latency_p99_s", "ttft_p50_s"),
    *("ttft_p99_s", "forward_passes", "prompt_tokens", "computed_prompt_tokens"),
    *("cached_prompt_tokens", "forced_tokens", "rounds"),
)

METRICS = """\
vllm:num_requests_running 0
vllm:num_requests_waiting 0
vllm:iteration_tokens_total_count {passes}
vllm:prompt_tokens_total {prompt_tokens}
vllm:prompt_tokens_cached_total {cached_tokens}
vllm:generation_tokens_total {output_tokens}
vllm:num_preemptions_total 0
"""


class FakeVllm(RunningServer):
    """Answers a prompt with its length in two parts; a word is a token, which no other holds."""

    def __init__(self, *, plugin: bool = False) -> None:
        super().__init__()
        self.fails_from: int | None = None
        self.num_emptied = 0
        self._tokens: dict[str, int] = {}
        self.fake.plugin, self.fake.fault, self.fake.tells_tokens = plugin, self._answer, False
        self.fake.reply = lambda prompt: f"{len(prompt.split())} words"
        self.fake.tokens_of = lambda text: [text[:-6], text[-6:]]

    @property
    def prompts(self) -> list[str]:
        return [body["prompt"] for body in self.fake.calls]

    def _answer(self, path: str, body: dict[str, Any]) -> Response | None:
        num_calls = len(self.prompts)
        if path == "/metrics":
            num_tokens = sum(len(prompt.split()) for prompt in self.prompts)
            page = METRICS.format(
                passes=num_calls,
                prompt_tokens=num_tokens,
                cached_tokens=num_tokens // 2 if self.fake.plugin else 0,
                output_tokens=2 * num_calls,
            )
            return PlainTextResponse(page)
        if path == "/reset_prefix_cache":
            self.num_emptied += 1
            return JSONResponse({"success": True})
        if path == "/tokenize":
            words = body["prompt"].split()
            ids = [self._tokens.setdefault(word, len(self._tokens)) for word in words]
            return JSONResponse({"tokens": ids})
        if path == "/v1/sgl/stats" and self.fake.plugin:
            steps = {"schedule_s": 0.5 * num_calls, "full_graph_passes": 7 * num_calls}
            return JSONResponse({"parts": {"radix": "on"}, **steps})
        if self.fails_from and path == "/v1/completions" and num_calls >= self.fails_from:
            error = {"error": {"message": "EngineDeadError"}}
            return JSONResponse(error, 500, {"retry-after-ms": "1"})
        return None


@pytest.fixture
def stock() -> Iterator[FakeVllm]:
    server = FakeVllm()
    yield server
    server.stop()


@pytest.fixture
def plugin() -> Iterator[FakeVllm]:
    server = FakeVllm(plugin=True)
    yield server
    server.stop()


# -- the whole command


def test_both_servers_get_the_same_requests_by_turns_from_an_empty_cache(
    stock: FakeVllm, plugin: FakeVllm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "result.json"
    sizes = ["--requests", "12", "--rounds", "2", "--concurrency", "3", "--json", str(file)]
    assert main(["no_sharing", "--stock-url", stock.url, "--sgl-url", plugin.url, *sizes]) == 0
    assert stock.num_emptied == plugin.num_emptied == 2
    num_warm_up = 3  # a quarter of the programs at most
    assert len(stock.prompts) == len(plugin.prompts) == 2 * (num_warm_up + 12)
    assert {*stock.prompts} == {*plugin.prompts}

    content = json.loads(file.read_text())
    assert content["requests"] == 12
    assert content["same_output"] == {"compared": 24, "equal": 24}
    stock_arm, sgl_arm = content["arms"]["stock"], content["arms"]["sgl"]
    assert stock_arm["forward_passes"] == sgl_arm["forward_passes"] == 12  # no warm-up
    assert stock_arm["cached_prompt_tokens"] == 0 < sgl_arm["cached_prompt_tokens"]
    assert (sgl_arm["schedule_s"], sgl_arm["full_graph_passes"]) == (6.0, 84)
    assert stock_arm["schedule_s"] is None
    assert 0 < stock_arm["server_cpu_s"] < 60  # these servers run in this process
    assert 0 < stock_arm["ttft_p50_s"] <= stock_arm["latency_p99_s"]
    for arm in (stock_arm, sgl_arm):
        assert arm.keys() >= {*ARM_KEYS} and len(arm["rounds"]) == 2
        for key in ("throughput_programs_s", "latency_p50_s", "ttft_p99_s"):
            assert arm[key] == statistics.median(one[key] for one in arm["rounds"])
    assert content["ratio"] == {
        "throughput": sgl_arm["throughput_programs_s"] / stock_arm["throughput_programs_s"],
        "latency_p50": stock_arm["latency_p50_s"] / sgl_arm["latency_p50_s"],
        "ttft_p99": stock_arm["ttft_p99_s"] / sgl_arm["ttft_p99_s"],
    }
    limits = content["limits"]
    assert limits["prompt_tokens"] == limits["unique_prompt_tokens"] == stock_arm["prompt_tokens"]
    assert content["arguments"]["concurrency"] == 3
    said = capsys.readouterr().out
    assert "same output: 24 of 24" in said
    assert "passes in a full CUDA graph" in said and "passes in no graph" not in said


def test_a_server_that_fails_is_named_with_the_reason(
    stock: FakeVllm, plugin: FakeVllm, capsys: pytest.CaptureFixture[str]
) -> None:
    plugin.fails_from = 5
    urls = ["--stock-url", stock.url, "--sgl-url", plugin.url]
    assert main(["no_sharing", *urls, "--requests", "9", "--concurrency", "2"]) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert f"vLLM with the plugin at {plugin.url} failed" in said
    assert "EngineDeadError" in said


# -- the client


@sgl.function
def twice(s: sgl.ProgramState, question: str) -> None:
    s += question + sgl.gen("first", max_tokens=2)
    s += " and" + sgl.gen("second", max_tokens=2)


def test_what_a_reply_left_in_the_cache_need_not_be_computed(stock: FakeVllm) -> None:
    run = run_programs(twice, [{"question": "a b c "}], stock.url, 1)
    assert [len(prompt.split()) for prompt in stock.prompts] == [3, 6]
    # The second prompt is the first, "3 words", which was decoded, and " and".
    assert unique_prompt_tokens(run, stock.url) == 3 + 1
