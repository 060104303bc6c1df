"""Results in the form of benchmarks.ab's JSON, for tests of the report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RECORDED = Path(__file__).parents[1] / "benchmarks/results/cpu/multi_chain-ablations.json"
HOSTILE = (
    '<script>document.title = "taken"</script><img src=x onerror="document.title=1"> | $x_1$ &'
)


def result(
    workload: str = "rag",
    model: str = "demo",
    ratio: float = 2.0,
    apart: float = 0.01,
    concurrency: int = 8,
) -> dict[str, Any]:
    """A recorded result with three other rounds: their ratios lie within `apart`, a share, of
    `ratio`, and half the passes and tokens are computed."""
    content: dict[str, Any] = json.loads(RECORDED.read_text())
    stock = {**content["arms"]["stock"], "forward_passes": 1000, "computed_prompt_tokens": 6000}
    del stock["rounds"]

    def sgl(ratio: float) -> dict[str, Any]:
        times = {key: stock[key] / ratio for key in stock if key.endswith("_s") and "p" in key}
        throughput = stock["throughput_programs_s"] * ratio
        counts = {"forward_passes": 500, "computed_prompt_tokens": 3000}
        return {**stock, **times, **counts, "throughput_programs_s": throughput}

    def ratios(ratio: float) -> dict[str, float]:
        return dict.fromkeys(("throughput", "latency_p50", "ttft_p99"), ratio)

    of_rounds = [ratio, ratio * (1 - apart), ratio * (1 + apart)]
    return content | {
        "workload": workload,
        "model": model,
        "arms": {
            "stock": {**stock, "rounds": [stock] * 3},
            "sgl": {**sgl(ratio), "rounds": [sgl(one) for one in of_rounds]},
        },
        "ratio": ratios(ratio),
        "ratio_of_rounds": [ratios(one) for one in of_rounds],
        "differences": [{"round_number": 1, "item": 3, "stock": "a cat", "sgl": "a dog"}],
        "arguments": {"workload": workload, "model": model, "concurrency": concurrency},
    }


def write(folder: Path, name: str, content: dict[str, Any]) -> Path:
    file = folder / f"{name}.json"
    file.write_text(json.dumps(content))
    return file
