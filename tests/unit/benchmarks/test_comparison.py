"""Two runs beside each other: numbers, table and JSON, from results made by hand."""

from __future__ import annotations

import json

import numpy as np
import pytest

from benchmarks.comparison import Comparison, Result
from benchmarks.cost_model import CostModel
from benchmarks.engine_settings import SGL, STOCK, EngineSettings
from benchmarks.traces import Call, Program, Reuse, Trace

CALL = Call(np.arange(100, dtype=np.int32), np.arange(10, dtype=np.int32))
TRACE = Trace("by hand", tuple(Program((CALL,)) for _ in range(3)))
REUSE = Reuse(prompt_tokens=300, must_compute_tokens=60, working_set_tokens=1600)
SETTINGS = EngineSettings(num_blocks=50, block_size=16, max_model_len=111)


def result(
    waits_s: dict[str, float],
    hit_rate: float = 0.5,
    ttft_p99_s: float = 2.0,
    times_s: tuple[float, ...] = (2.0, 8.0, 3.0),
) -> Result:
    return Result(
        hit_rate=hit_rate,
        ttft_mean_s=0.5,
        ttft_p50_s=0.25,
        ttft_p99_s=ttft_p99_s,
        ttft_p999_s=4.0,
        max_wait_s=max(waits_s.values()),
        max_passes=7,
        computed_prompt_tokens=150,
        cached_prompt_tokens=150,
        prompt_tokens=300,
        throughput_requests_s=10.0,
        requests=3,
        steps=40,
        preemptions=0,
        copied_blocks=0,
        step_cpu_us_mean=50.0,
        parts={},
        waits_s=waits_s,
        program_times_s=dict(enumerate(times_s)),
    )


def comparison(*arms: str, sgl_waits_s: dict[str, float] | None = None) -> Comparison:
    waits_s = sgl_waits_s or {"0.0": 3.5, "1.0": 0.5, "2.0": 0.25}
    results = {
        STOCK: result({"0.0": 1.0, "1.0": 5.0, "2.0": 0.0}),
        SGL: result(waits_s, 0.6, 1.0, (2.0, 4.0, 3.0)),
    }
    return Comparison(TRACE, REUSE, SETTINGS, {arm: results[arm] for arm in arms or results})


def test_the_most_extra_wait_is_of_one_call_not_of_the_longest_waits() -> None:
    assert comparison().max_extra_wait_s() == 2.5  # 3.5 s instead of 1; the longest: 3.5 to 5
    assert comparison(sgl_waits_s={"0.0": 0.5, "1.0": 0.5, "2.0": 0.0}).max_extra_wait_s() == 0
    assert "max_extra_wait_s" not in comparison(SGL).numbers(SGL)


def test_a_ratio_above_one_is_better_for_the_plugin_whichever_way_is_better() -> None:
    ratios = comparison().ratios()
    assert ratios["hit_rate"] == pytest.approx(1.2)
    assert ratios["ttft_p99_s"] == ratios["program_time_p90_s"] == pytest.approx(2.0)
    assert "max_passes" not in ratios
    assert comparison(STOCK).ratios() == {}


def test_the_document_has_both_arms_and_what_was_asked() -> None:
    document = comparison().as_document({"policy": "fcfs"}, CostModel())
    assert document["arguments"] == {"policy": "fcfs"}
    assert document["ratio"]["ttft_p99_s"] == pytest.approx(2.0)
    assert document["trace"]["new_prompt_tokens"] == 60
    json.dumps(document)
