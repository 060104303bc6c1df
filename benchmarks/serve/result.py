"""What `vllm bench serve` wrote and the server counted: joined, medians, ratios, JSON, the table.

Pure: no server, no clock. Times are in seconds. A ratio above 1 is better for the plugin, always.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from benchmarks import medians
from benchmarks.medians import ByTurns, Row, counted, figures_table
from sgl_vllm.server_process import Counters

MS_PER_S = 1000.0


@dataclass(frozen=True)
class Figures:
    """One round of one arm, or the median of several, figure by figure.

    Up to `output_tokens_sent` they are what `vllm bench serve` says: tpot is the time per output
    token after the first, latency that of a request. From `forward_passes` on they are what the
    server counted meanwhile. vLLM's count of prompt tokens is its own tokenizer's.
    """

    completed: int
    failed: int
    wall_s: float
    throughput_requests_s: float
    output_tokens_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    tpot_p50_s: float
    tpot_p99_s: float
    latency_p50_s: float
    latency_p99_s: float
    prompt_tokens_sent: int
    output_tokens_sent: int
    forward_passes: int
    prompt_tokens: int
    computed_prompt_tokens: int
    cached_prompt_tokens: int
    output_tokens: int
    forced_tokens: int
    preemptions: int


@dataclass(frozen=True)
class Round(medians.Round[Figures]):
    """One arm's turn with one dataset; `said` is what `vllm bench serve` saved, word for word."""

    said: Mapping[str, Any]


@dataclass(frozen=True)
class DatasetResult(ByTurns[Figures]):
    """Alternating rounds of both arms with one dataset: `stock[i]` ran just before `sgl[i]`.

    `command` is `vllm bench serve` as it was called, without what says where.
    """

    RATIOS: ClassVar = {
        "throughput": ("throughput_requests_s", 1),
        "ttft_p99": ("ttft_p99_s", -1),
        "tpot_p50": ("tpot_p50_s", -1),
    }
    name: str
    num_prompts: int
    command: tuple[str, ...]
    stock: tuple[Round, ...]
    sgl: tuple[Round, ...]

    def to_mapping(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "num_prompts": self.num_prompts,
            "command": " ".join(self.command),
            "arms": {
                arm: {
                    **asdict(self.median(arm)),
                    "rounds": [
                        {**asdict(one.figures), "vllm_bench_serve": dict(one.said)}
                        for one in rounds
                    ],
                }
                for arm, rounds in (("stock", self.stock), ("sgl", self.sgl))
            },
            "ratio": self.ratios,
            "ratio_of_rounds": self.ratios_of_rounds,
        }


@dataclass(frozen=True)
class Comparison:
    """All datasets; `parts` are the plugin's, each "on" or why it is off."""

    model: str
    datasets: tuple[DatasetResult, ...]
    parts: Mapping[str, str]
    server_args: tuple[str, ...]
    versions: Mapping[str, str]

    def to_json(self) -> str:
        content = {
            "benchmark": "vllm bench serve",
            "model": self.model,
            "versions": dict(self.versions),
            "server_args": list(self.server_args),
            "parts": dict(self.parts),
            "command": {one.name: " ".join(one.command) for one in self.datasets},
            "datasets": [one.to_mapping() for one in self.datasets],
        }
        return json.dumps(content, indent=2) + "\n"


# -- statistics


def joined(said: Mapping[str, Any], counters: Counters) -> Figures:
    """Both accounts of one round."""

    def seconds(name: str) -> float:
        return float(said[f"{name}_ms"]) / MS_PER_S

    return Figures(
        completed=said["completed"],
        failed=said["failed"],
        wall_s=said["duration"],
        throughput_requests_s=said["request_throughput"],
        output_tokens_s=said["output_throughput"],
        ttft_p50_s=seconds("p50_ttft"),
        ttft_p99_s=seconds("p99_ttft"),
        tpot_p50_s=seconds("p50_tpot"),
        tpot_p99_s=seconds("p99_tpot"),
        latency_p50_s=seconds("p50_e2el"),
        latency_p99_s=seconds("p99_e2el"),
        prompt_tokens_sent=said["total_input_tokens"],
        output_tokens_sent=said["total_output_tokens"],
        **counted(counters),
    )


# -- showing

ROWS: tuple[Row, ...] = (
    ("completed", "requests completed", ",d", 0),
    ("throughput_requests_s", "requests/s", ".2f", 1),
    ("output_tokens_s", "output tokens/s", ".1f", 1),
    ("ttft_p50_s", "time to first token, p50, s", ".3f", -1),
    ("ttft_p99_s", "p99, s", ".3f", -1),
    ("tpot_p50_s", "time per further token, p50, s", ".4f", -1),
    ("latency_p99_s", "latency of a request, p99, s", ".3f", -1),
    ("forward_passes", "forward passes", ",d", -1),
    ("computed_prompt_tokens", "prompt tokens computed", ",d", -1),
    ("cached_prompt_tokens", "prompt tokens from the cache", ",d", 1),
)


def show(comparison: Comparison, console: Console) -> None:
    """The tables for people."""
    heading = (
        f"vllm bench serve on {comparison.model}\n"
        f"server flags: {' '.join(comparison.server_args) or 'none'}\n"
        "plugin: " + "; ".join(f"{part} {state}" for part, state in comparison.parts.items())
    )
    console.print(Text(heading))
    for one in comparison.datasets:
        console.print(Group(*_of_dataset(one)))
    console.print(Text("\nA ratio above 1 is better for the plugin.", "dim"))


def _of_dataset(one: DatasetResult) -> tuple[Text, Table, Text]:
    num_rounds = len(one.stock)
    medians = "1 round" if num_rounds == 1 else f"{num_rounds} rounds, medians"
    spread = one.spread("throughput")
    by_round = f"ratio of requests/s, round by round: {spread}" if spread else ""
    return (
        Text(f"\n{one.name}: {one.num_prompts} prompts, {medians}", "bold"),
        figures_table(ROWS, one.median("stock"), one.median("sgl")),
        Text(by_round),
    )
