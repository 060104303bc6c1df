"""The picture of a grid of simulated runs: hit rate and tail of the time to first token.

Owns the drawing. matplotlib is needed to draw, not to import this module.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.comparison import Comparison
from benchmarks.drawing import STYLE, require_matplotlib
from tools.engine_harness.settings import SGL, STOCK

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SUFFIXES = (".png", ".svg")

# Okabe and Ito's colours, which people with any colour vision can tell apart; each policy has its
# mark too, and keeps both in every picture.
STYLES = {
    "lpm": ("#0072B2", "o"),
    "dfs-weight": ("#E69F00", "s"),
    "fcfs": ("#009E73", "^"),
    "random": ("#CC79A7", "D"),
}
STOCK_COLOUR = "#333333"
WIDTH_IN, HEIGHT_IN = 4.2, 2.9  # of one small picture


def check(file: Path) -> None:
    """Raises ValueError if `draw` could not write to such a file, for want of matplotlib or of a
    known ending."""
    if file.suffix not in SUFFIXES:
        raise ValueError(f"--plot writes {' or '.join(SUFFIXES)}, not {file.name!r}")
    require_matplotlib("--plot")


def draw(trace_name: str, comparisons: Sequence[Comparison], file: Path) -> None:
    """A column of two pictures for each load: hit rate above, p99 of the time to first token below,
    both over the size of the cache, with a line for stock and for each policy."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    loads = list(dict.fromkeys(one.combination.load for one in comparisons))
    with matplotlib.rc_context(STYLE):
        figure, axes = pyplot.subplots(
            2,
            len(loads),
            sharex=True,
            sharey="row",
            squeeze=False,
            figsize=(WIDTH_IN * len(loads), 2 * HEIGHT_IN),
            layout="constrained",
        )
        for index, load in enumerate(loads):
            here = [one for one in comparisons if one.combination.load == load]
            hit_rate, ttft = axes[0][index], axes[1][index]
            hit_rate.set_title(_rate(here[0]))
            _draw_lines(hit_rate, here, "hit_rate", 100)
            hit_rate.axhline(
                100 * here[0].reuse.best_hit_rate,
                color=STOCK_COLOUR,
                linestyle=(0, (4, 3)),
                linewidth=1,
                label="best possible",
            )
            _draw_lines(ttft, here, "ttft_p99_s", 1)
            ttft.set_yscale("log")
            ttft.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
            ttft.yaxis.set_minor_locator(ticker.NullLocator())
            ttft.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
            ttft.set_xlabel("cache size, % of the working set")
            _set_sizes(ttft, here)
        axes[0][0].set_ylabel("hit rate, % of prompt tokens")
        highest = axes[0][0].get_ylim()[1]
        axes[0][0].set_ylim(0, 1.03 * highest)
        axes[1][0].set_ylabel("time to first token, p99, s")
        handles, labels = axes[0][0].get_legend_handles_labels()
        figure.legend(
            handles,
            labels,
            loc="outside lower center",
            ncols=3 * len(loads),
            frameon=False,
            handlelength=1.8,
            columnspacing=1.2,
        )
        figure.suptitle(_title(trace_name, comparisons))
        metadata = {"Date": None} if file.suffix == ".svg" else None
        figure.savefig(file, dpi=120, facecolor="white", metadata=metadata)
        pyplot.close(figure)


def _draw_lines(axes: Axes, comparisons: Sequence[Comparison], name: str, times: float) -> None:
    """Stock's value and each policy's, over the cache size."""
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    if STOCK in comparisons[0].results:
        by_size = {
            100 * one.cache_share: times * getattr(one.results[STOCK], name) for one in comparisons
        }
        sizes = sorted(by_size)
        axes.plot(
            sizes,
            [by_size[size] for size in sizes],
            color=STOCK_COLOUR,
            linewidth=2.2,
            marker="x",
            label="stock vLLM",
        )
    policies = dict.fromkeys(one.combination.policy for one in comparisons)
    for policy in policies if SGL in comparisons[0].results else ():
        colour, mark = STYLES[policy]
        points = sorted(
            (100 * one.cache_share, times * getattr(one.results[SGL], name))
            for one in comparisons
            if one.combination.policy == policy
        )
        axes.plot(
            *zip(*points, strict=True),
            color=colour,
            marker=mark,
            markersize=5,
            linewidth=1.4,
            label=f"plugin, {policy}",
        )


def _set_sizes(axes: Axes, comparisons: Sequence[Comparison]) -> None:
    """A logarithmic axis with the sizes themselves as its ticks."""
    sizes = sorted({100 * one.cache_share for one in comparisons})
    axes.set_xscale("log")
    axes.set_xticks(sizes, [f"{size:.3g}" for size in sizes])
    axes.minorticks_off()
    margin = 1.2 if len(sizes) > 1 else math.e
    axes.set_xlim(sizes[0] / margin, sizes[-1] * margin)


def _rate(comparison: Comparison) -> str:
    """How fast was asked."""
    if comparison.combination.load is not None:
        return f"load {comparison.combination.load:g}"
    if comparison.concurrency is not None:
        return f"{comparison.concurrency} programs at a time"
    return "recorded arrivals"


def _title(trace_name: str, comparisons: Sequence[Comparison]) -> str:
    result = next(iter(comparisons[0].results.values()))
    return f"{trace_name}: {result.requests:,} calls"
