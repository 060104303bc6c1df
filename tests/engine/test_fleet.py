"""The light model of a worker, held against vLLM's real scheduler on the same requests."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from benchmarks import simulate, traces
from benchmarks.cost_model import CostModel
from benchmarks.fleet import FleetRun
from benchmarks.simulate_grid import Run
from tools.engine_harness.settings import STOCK, EngineSettings


@pytest.mark.parametrize(
    ("name", "num_calls", "cache_fraction", "block_size", "off"),
    [("long_chat", 150, 0.5, 128, 0.02), ("chat", 300, 0.3, 16, 0.15)],
)
def test_one_worker_does_as_the_real_scheduler(
    name: str, num_calls: int, cache_fraction: float, block_size: int, off: float
) -> None:
    trace = traces.generate(name, num_calls)
    reuse, cost = traces.reuse(trace), CostModel()
    settings = EngineSettings(
        num_blocks=int(cache_fraction * reuse.working_set_tokens) // block_size,
        block_size=block_size,
        max_model_len=trace.max_call_tokens + 1,
        async_scheduling=False,
    )
    span_s = simulate.least_time_s(trace, reuse, cost, settings) / 0.8
    real = Run(STOCK, settings, cost, span_s).carry_out(trace, lambda: None)
    light = FleetRun("round-robin", 1, settings, cost, span_s).carry_out(trace, lambda: None)
    assert light.requests == real.requests
    assert light.prompt_tokens == real.prompt_tokens
    assert light.hit_rate == pytest.approx(real.hit_rate, abs=0.01)
    assert light.ttft_p50_s == pytest.approx(real.ttft_p50_s, rel=off)
    assert light.ttft_p99_s == pytest.approx(real.ttft_p99_s, rel=off)
