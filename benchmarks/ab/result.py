"""What was measured: figures of a round, medians over rounds, ratios, and the JSON.

Pure: no server, no clock. Times are in seconds. A ratio above 1 is better for the plugin, always.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import islice
from typing import Any

from benchmarks.ab.client import Run
from benchmarks.ab.plan import Plan
from benchmarks.ab.variants import Variant
from benchmarks.arms import ARMS, percentile, ratio
from sgl_vllm.server_process import Counters

# Sequences at once from which a pass costs more with each further one, roughly.
COMPUTE_BOUND_FROM_ON_CPU = 8
COMPUTE_BOUND_FROM_ON_GPU = 256
MAX_DIFFERENCES_SHOWN = 3
# A pass may decide nothing: one that ends in the middle of a prompt, or at the end of a sequence.
PASSES_PER_REQUEST = 1
CONTEXT_CHARACTERS = 60


@dataclass(frozen=True)
class Figures:
    """One round of one arm, or the median of several, figure by figure.

    Latency is of whole programs, from their start to their last answer; time to first token is of
    single requests, `num_requests` of them. Counts are the server's own; output tokens that were
    not forced are undecided. `score` is the mean of the programs', from 0 to 1; None if nothing is
    right or wrong. `server_cpu_s` is the processor time of all of the server's processes, which
    other programs on the machine disturb less than they do `wall_s`; None if the server runs on
    another machine. The last ones are what the plugin tells of the engine's steps, None on stock.
    """

    throughput_programs_s: float
    output_tokens_s: float
    latency_p50_s: float
    latency_p99_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    forward_passes: int
    prompt_tokens: int
    computed_prompt_tokens: int
    cached_prompt_tokens: int
    forced_tokens: int
    undecided_tokens: int
    output_tokens: int
    num_requests: int
    preemptions: int
    score: float | None
    wall_s: float
    client_cpu_s: float
    server_cpu_s: float | None
    schedule_s: float | None = None
    execute_s: float | None = None
    sample_s: float | None = None
    wait_s: float | None = None
    update_s: float | None = None
    full_graph_passes: int | None = None
    piecewise_graph_passes: int | None = None
    no_graph_passes: int | None = None

    @property
    def hit_rate(self) -> float:
        return self.cached_prompt_tokens / self.prompt_tokens

    @property
    def most_passes(self) -> int:
        """With a pass per undecided token, however few run at a time, there are no more."""
        return self.undecided_tokens + PASSES_PER_REQUEST * self.num_requests


@dataclass(frozen=True)
class Round:
    """One arm's turn: its figures, and what every program wrote, in the items' order."""

    figures: Figures
    texts: tuple[str, ...]


@dataclass(frozen=True)
class Difference:
    """Where one program's two texts part, with a little of what is around."""

    round_number: int
    item: int
    stock: str
    sgl: str


@dataclass(frozen=True)
class Limits:
    """What bounds any server on this workload.

    Attributes:
        unique_prompt_tokens: must be computed, whatever is cached and in whatever order.
        prompt_tokens, output_tokens: of all requests.
        undecided_tokens: output tokens that no grammar forces, as far as the plugin sees it.
        sequences_at_once: at most so many requests were under way.
        compute_bound: whether a further sequence in a pass makes it longer; if not, more of them
            at once is free speed that a comparison of caches does not show. None if the servers run
            elsewhere, on a machine that is not known here.
    """

    unique_prompt_tokens: int
    prompt_tokens: int
    output_tokens: int
    undecided_tokens: int
    sequences_at_once: int
    compute_bound: bool | None

    @property
    def best_hit_rate(self) -> float:
        return 1 - self.unique_prompt_tokens / self.prompt_tokens


RATIOS = {
    "throughput": ("throughput_programs_s", 1),
    "latency_p50": ("latency_p50_s", -1),
    "ttft_p99": ("ttft_p99_s", -1),
}
"""By name, the figure that a ratio is of, and which way is better."""


@dataclass(frozen=True)
class Comparison:
    """The results of a plan: alternating rounds of its variants, by their names.

    `started_here` says whether the command started the servers, with the plan's settings.
    """

    plan: Plan
    rounds: Mapping[str, Sequence[Round]]
    limits: Limits
    parts: Mapping[str, str]
    started_here: bool
    versions: Mapping[str, str]
    machine: Mapping[str, Any]
    date: str

    @property
    def ablations(self) -> tuple[Variant, ...]:
        """The variants other than stock vLLM and the plugin as requested."""
        return self.plan.variants[len(ARMS) :]

    def median(self, variant: str) -> Figures:
        return median_figures([one.figures for one in self.rounds[variant]])

    @property
    def ratios(self) -> dict[str, float | None]:
        return _ratios(self.median("stock"), self.median("sgl"))

    @property
    def ratios_of_rounds(self) -> list[dict[str, float | None]]:
        """One for each pair of neighboring turns. Their spread tells how reliable medians are."""
        return [_ratios(stock.figures, sgl.figures) for stock, sgl in self._turns()]

    @property
    def same_output(self) -> dict[str, int]:
        pairs = list(self._pairs())
        equal = sum(stock == sgl for _, _, stock, sgl in pairs)
        return {"compared": len(pairs), "equal": equal}

    def differences(self) -> Iterator[Difference]:
        for round_number, item, stock, sgl in self._pairs():
            if stock != sgl:
                yield Difference(round_number, item, *where_they_part(stock, sgl))

    def _turns(self) -> Iterator[tuple[Round, Round]]:
        return zip(*(self.rounds[arm] for arm in ARMS), strict=True)

    def _pairs(self) -> Iterator[tuple[int, int, str, str]]:
        for number, (stock, sgl) in enumerate(self._turns(), start=1):
            for item, texts in enumerate(zip(stock.texts, sgl.texts, strict=True)):
                yield number, item, *texts

    def passes(self) -> dict[str, dict[str, Any]]:
        """Of each arm, its forward passes and the most that they should be; nothing if no grammar
        holds the output."""
        if not self.plan.workload.structured:
            return {}
        medians = {arm: self.median(arm) for arm in ARMS}
        return {
            arm: {
                "forward_passes": one.forward_passes,
                "most": one.most_passes,
                "within": one.forward_passes <= one.most_passes,
            }
            for arm, one in medians.items()
        }

    def to_json(self) -> str:
        plan = self.plan
        content = {
            "workload": plan.workload.name,
            "gain": plan.workload.gain,
            "date": self.date,
            "model": plan.model,
            "requests": len(plan.items),
            "arms": {
                arm: {
                    **asdict(self.median(arm)),
                    "rounds": [asdict(one.figures) for one in self.rounds[arm]],
                }
                for arm in ARMS
            },
            "ratio": self.ratios,
            "ratio_of_rounds": self.ratios_of_rounds,
            "same_output": self.same_output,
            "differences": [
                asdict(one) for one in islice(self.differences(), MAX_DIFFERENCES_SHOWN)
            ],
            "limits": {**asdict(self.limits), "best_hit_rate": self.limits.best_hit_rate},
            "score": {arm: self.median(arm).score for arm in ARMS},
            "ablations": [
                {
                    "name": one.name,
                    "title": one.title,
                    "figures": asdict(self.median(one.name)),
                    "throughput": self.median(one.name).throughput_programs_s
                    / self.median("sgl").throughput_programs_s,
                }
                for one in self.ablations
            ],
            "passes": self.passes(),
            "parts": dict(self.parts),
            "server_args": list(plan.settings.args),
            "started_here": self.started_here,
            "arguments": dict(plan.arguments),
            "versions": dict(self.versions),
            "machine": dict(self.machine),
        }
        return json.dumps(content, indent=2) + "\n"


# -- statistics


def _ratios(stock: Figures, sgl: Figures) -> dict[str, float | None]:
    return {
        name: ratio(getattr(stock, figure), getattr(sgl, figure), better)
        for name, (figure, better) in RATIOS.items()
    }


def median_figures(rounds: Sequence[Figures]) -> Figures:
    """Figure by figure. The median of counts is one that occurred, the lower of the middle two;
    that of a figure which some round does not have is None."""
    medians: dict[str, Any] = {}
    for field in fields(Figures):
        values = [getattr(one, field.name) for one in rounds]
        if None in values:
            medians[field.name] = None
            continue
        of_counts = all(isinstance(value, int) for value in values)
        medians[field.name] = (statistics.median_low if of_counts else statistics.median)(values)
    return Figures(**medians)


def figures(
    run: Run, counters: Counters, steps: Mapping[str, Any], server_cpu_s: float | None
) -> Figures:
    """A round's figures from what was timed and counted."""
    return Figures(
        throughput_programs_s=len(run.latencies_s) / run.wall_s,
        output_tokens_s=counters.output_tokens / run.wall_s,
        latency_p50_s=percentile(run.latencies_s, 50),
        latency_p99_s=percentile(run.latencies_s, 99),
        ttft_p50_s=percentile(run.ttfts_s, 50),
        ttft_p99_s=percentile(run.ttfts_s, 99),
        computed_prompt_tokens=counters.computed_prompt_tokens,
        undecided_tokens=counters.output_tokens - counters.forced_tokens,
        num_requests=len(run.ttfts_s),
        score=statistics.mean(run.scores) if run.scores else None,
        wall_s=run.wall_s,
        client_cpu_s=run.client_cpu_s,
        server_cpu_s=server_cpu_s,
        **asdict(counters),
        **steps,
    )


def is_compute_bound(sequences_at_once: int, *, on_cpu: bool) -> bool:
    """A rule of thumb: on a CPU of few cores from about 8 sequences, on a GPU from hundreds."""
    enough = COMPUTE_BOUND_FROM_ON_CPU if on_cpu else COMPUTE_BOUND_FROM_ON_GPU
    return sequences_at_once >= enough


def where_they_part(first: str, second: str) -> tuple[str, str]:
    """Both texts around the first character that differs; the texts are not equal."""
    at = next(
        (i for i, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1]),
        min(len(first), len(second)),
    )
    begin, end = max(0, at - CONTEXT_CHARACTERS), at + CONTEXT_CHARACTERS
    return first[begin:end], second[begin:end]
