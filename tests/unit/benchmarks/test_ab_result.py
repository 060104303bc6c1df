"""`benchmarks.ab.result`: figures, medians, ratios, the JSON contract and the table."""

from __future__ import annotations

import json
from dataclasses import replace

from benchmarks.ab import result
from benchmarks.ab.result import Comparison, Figures, Limits, Round
from sgl_vllm.server_process import Counters

ARM_KEYS = {
    "throughput_programs_s",
    "output_tokens_s",
    "latency_p50_s",
    "latency_p99_s",
    "ttft_p50_s",
    "ttft_p99_s",
    "forward_passes",
    "prompt_tokens",
    "computed_prompt_tokens",
    "cached_prompt_tokens",
    "forced_tokens",
    "rounds",
}


def figures_of(wall_s: float, *, cached: int = 0) -> Figures:
    return result.figures(
        wall_s=wall_s,
        latencies_s=[wall_s / 2, wall_s],
        ttfts_s=[wall_s / 8, wall_s / 4],
        scores=[1.0, 0.0],
        counters=Counters(10, 100, cached, 20, 3, 0),
        client_cpu_s=0.5,
        server_cpu_s=wall_s,
    )


def comparison(**changes: object) -> Comparison:
    made = Comparison(
        workload="tight_cache",
        gain="Those with the same prefix run together.",
        model="demo",
        requests=2,
        stock=tuple(Round(figures_of(wall_s), ("one", "two")) for wall_s in (8.0, 6.0, 7.0)),
        sgl=tuple(
            Round(figures_of(wall_s, cached=50), ("one", "two")) for wall_s in (4.0, 3.0, 7.0)
        ),
        ablations=(),
        limits=Limits(
            unique_prompt_tokens=30,
            prompt_tokens=100,
            output_tokens=20,
            undecided_tokens=17,
            sequences_at_once=8,
            compute_bound=True,
        ),
        parts={"radix": "on", "schedule": "off (by option)"},
        server_args=("--max-num-seqs", "8"),
        started_here=True,
        structured=False,
        arguments={"rounds": 3},
        versions={"vllm": "0.32.0 (cpu)"},
        machine={"processor": "a", "cores": 2, "accelerator": None},
        date="2026-11-22",
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def test_the_json_is_that_of_the_contract() -> None:
    content = json.loads(comparison().to_json())
    assert content["workload"] == "tight_cache"
    assert content["model"] == "demo"
    assert content["requests"] == 2
    assert content["arms"].keys() == {"stock", "sgl"}
    for arm in content["arms"].values():
        assert arm.keys() >= ARM_KEYS
        assert len(arm["rounds"]) == 3
    assert content["arms"]["stock"]["throughput_programs_s"] == 2 / 7.0
    assert content["ratio"] == {"throughput": 1.75, "latency_p50": 1.75, "ttft_p99": 1.75}
    assert [one["throughput"] for one in content["ratio_of_rounds"]] == [2.0, 2.0, 1.0]
    assert content["same_output"] == {"compared": 6, "equal": 6}
    assert content["limits"]["unique_prompt_tokens"] == 30
    assert content["limits"]["best_hit_rate"] == 0.7
    assert content["limits"]["compute_bound"] is True
