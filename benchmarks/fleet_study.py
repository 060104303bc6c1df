"""What policies of a router came to with each number of workers: table, JSON, picture.

Owns these three; runs nothing. matplotlib is needed to draw, not to import this module.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.cost_model import CostModel
from benchmarks.drawing import STYLE
from benchmarks.fleet import FleetResult
from benchmarks.simulate_report import asked, versions
from benchmarks.traces import Reuse, Trace
from tools.engine_harness.settings import EngineSettings

# Of a result: its name, the column's words, width and format.
COLUMNS: tuple[tuple[str, str, int, str], ...] = (
    ("hit_rate", "hit rate", 10, ".4f"),
    ("cached_prompt_tokens", "cached tokens", 16, ",d"),
    ("ttft_p50_s", "TTFT p50, s", 13, ".3f"),
    ("ttft_p99_s", "p99, s", 9, ".3f"),
    ("imbalance", "load max/mean", 15, ".3f"),
    ("work_imbalance", "work max/mean", 15, ".3f"),
)

# Pictures: what is drawn, the axis, and the factor.
PICTURES = (
    ("hit_rate", "hit rate, % of prompt tokens", 100.0),
    ("ttft_p99_s", "time to first token, p99, s", 1.0),
    ("imbalance", "load, most loaded worker / mean", 1.0),
)
# Okabe and Ito's colours, as in simulate_plot.
STYLES = {
    "cost": ("#0072B2", "o"),
    "prefix-affinity": ("#E69F00", "s"),
    "least-loaded": ("#009E73", "^"),
    "round-robin": ("#CC79A7", "D"),
}
WIDTH_IN, HEIGHT_IN = 3.6, 3.1  # of one small picture


@dataclass(frozen=True, slots=True)
class Study:
    """Results of one trace, workers of one kind, and one load; by number of workers, then policy.

    `reuse` is of one copy of the trace, `span_s` the time over which each copy arrives.
    """

    trace: Trace
    reuse: Reuse
    settings: EngineSettings
    cost: CostModel
    span_s: float
    results: Sequence[FleetResult]

    def table(self) -> str:
        lines = [
            asked(self.trace, self.reuse) + ", for each worker",
            f"cache: {self.settings.cache_tokens:,} tokens a worker "
            f"({self.settings.cache_tokens / self.reuse.working_set_tokens:.2f} of its working "
            f"set), in blocks of {self.settings.block_size}; arrivals over {self.span_s:,.0f} s; "
            f"best possible hit rate {self.reuse.best_hit_rate:.4f}",
            "",
            f"{'workers':>8}  {'policy':16}"
            + "".join(f"{words:>{width}}" for _, words, width, _ in COLUMNS),
        ]
        before = None
        for one in self.results:
            if before not in (None, one.num_workers):
                lines.append("")
            before = one.num_workers
            cells = (f"{getattr(one, name):>{width}{form}}" for name, _, width, form in COLUMNS)
            lines.append(f"{one.num_workers:>8}  {one.policy:16}" + "".join(cells))
        return "\n".join(lines)

    def as_document(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """All numbers, and what it takes to get them again."""
        return {
            "versions": versions(),
            "arguments": dict(arguments),
            "worker": dataclasses.asdict(self.settings),
            "cost_model": dataclasses.asdict(self.cost),
            "span_s": self.span_s,
            "reuse": {
                **dataclasses.asdict(self.reuse),
                "best_hit_rate": self.reuse.best_hit_rate,
            },
            "results": [dataclasses.asdict(one) for one in self.results],
        }

    def draw(self, file: Path) -> None:
        """A small picture for each of `PICTURES`, over the number of workers, a line a policy."""
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        sizes = sorted({one.num_workers for one in self.results})
        policies = dict.fromkeys(one.policy for one in self.results)
        with matplotlib.rc_context(STYLE):
            figure, all_axes = pyplot.subplots(
                1,
                len(PICTURES),
                figsize=(WIDTH_IN * len(PICTURES), HEIGHT_IN),
                layout="constrained",
            )
            for axes, (name, label, times) in zip(all_axes, PICTURES, strict=True):
                axes.grid(axis="y", color="#dddddd", linewidth=0.6)
                for policy in policies:
                    colour, mark = STYLES[policy]
                    points = [one for one in self.results if one.policy == policy]
                    axes.plot(
                        [one.num_workers for one in points],
                        [times * getattr(one, name) for one in points],
                        color=colour,
                        marker=mark,
                        markersize=5,
                        linewidth=1.4,
                        label=policy,
                    )
                axes.set_xscale("log", base=2)
                axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
                axes.minorticks_off()
                axes.set_ylim(bottom=0)
                axes.set_xlabel("workers")
                axes.set_ylabel(label)
            handles, labels = all_axes[0].get_legend_handles_labels()
            figure.legend(
                handles, labels, loc="outside lower center", ncols=len(policies), frameon=False
            )
            figure.suptitle(f"{self.trace.name}: {self.trace.num_calls:,} calls a worker")
            metadata = {"Date": None} if file.suffix == ".svg" else None
            figure.savefig(file, dpi=120, facecolor="white", metadata=metadata)
            pyplot.close(figure)
