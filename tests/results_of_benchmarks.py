"""Results in the form of benchmarks.ab's JSON, for tests of the report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

HOSTILE = (
    '<script>document.title = "taken"</script><img src=x onerror="document.title=1"> | $x_1$ &'
)

_FIGURES = {
    "throughput_programs_s": 10.0,
    "output_tokens_s": 100.0,
    "latency_p50_s": 1.0,
    "latency_p99_s": 2.0,
    "ttft_p50_s": 0.2,
    "ttft_p99_s": 0.8,
    "forward_passes": 1000,
    "prompt_tokens": 8000,
    "computed_prompt_tokens": 6000,
    "cached_prompt_tokens": 2000,
    "forced_tokens": 0,
    "undecided_tokens": 640,
    "output_tokens": 640,
    "num_requests": 64,
    "preemptions": 0,
    "wall_s": 6.4,
    "client_cpu_s": 0.5,
    "server_cpu_s": 12.0,
}


def _sgl_figures(ratio: float) -> dict[str, Any]:
    return {
        **_FIGURES,
        "throughput_programs_s": 10.0 * ratio,
        "latency_p50_s": _FIGURES["latency_p50_s"] / ratio,
        "ttft_p50_s": _FIGURES["ttft_p50_s"] / ratio,
        "ttft_p99_s": _FIGURES["ttft_p99_s"] / ratio,
        "forward_passes": 500,
        "computed_prompt_tokens": 3000,
        "cached_prompt_tokens": 5000,
        "wall_s": _FIGURES["wall_s"] / ratio,
    }


def result(
    workload: str = "rag",
    model: str = "demo",
    ratio: float = 2.0,
    apart: float = 0.01,
    concurrency: int = 8,
) -> dict[str, Any]:
    """Three rounds with every key; their ratios lie within `apart`, a share, of `ratio`."""
    of_rounds = [ratio, ratio * (1 - apart), ratio * (1 + apart)]
    return {
        "workload": workload,
        "model": model,
        "requests": 64,
        "arms": {
            "stock": {**_FIGURES, "rounds": [dict(_FIGURES) for _ in of_rounds]},
            "sgl": {**_sgl_figures(ratio), "rounds": [_sgl_figures(one) for one in of_rounds]},
        },
        "ratio": dict.fromkeys(("throughput", "latency_p50", "ttft_p99"), ratio),
        "gain": "Documents come first, and are the same for many questions.",
        "ratio_of_rounds": [
            dict.fromkeys(("throughput", "latency_p50", "ttft_p99"), one) for one in of_rounds
        ],
        "same_output": {"compared": 192, "equal": 190},
        "differences": [{"round_number": 1, "item": 3, "stock": "a cat", "sgl": "a dog"}],
        "limits": {
            "unique_prompt_tokens": 2500,
            "prompt_tokens": 8000,
            "output_tokens": 640,
            "undecided_tokens": 600,
            "sequences_at_once": concurrency,
            "compute_bound": concurrency >= 8,
            "best_hit_rate": 0.6875,
        },
        "score": {"stock": 0.5, "sgl": 0.51},
        "ablations": [
            {"name": "no_cache", "title": "no prefix cache", "figures": {}, "throughput": 0.4},
            {"name": "fcfs", "title": "first come, first served", "throughput": 0.9},
        ],
        "parts": {"radix": "on", "schedule": "on"},
        "server_args": ["--max-model-len", "4096"],
        "started_here": True,
        "arguments": {"workload": workload, "model": model, "concurrency": concurrency},
        "machine": {"processor": "a processor", "cores": 2, "accelerator": None},
        "date": "2026-11-22T03:00:00",
        "versions": {"vllm": "0.32.0 (cpu)", "sgl_vllm": "0.1.0"},
    }


def write(folder: Path, name: str, content: dict[str, Any]) -> Path:
    file = folder / f"{name}.json"
    file.write_text(json.dumps(content))
    return file
