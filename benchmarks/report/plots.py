"""Pictures of results, as the bars that `page.html` draws.

Owns what is drawn: each picture is rows of bars, whose ends are shares of the picture's width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.arms import ARMS
from benchmarks.report.loading import Result, Verdict
from benchmarks.report.tables import count, span, times

MOST_LABEL_CHARACTERS = 48
NAMES = {"stock": "stock vLLM", "sgl": "with the plugin"}
TONES = {Verdict.BETTER: "sgl", Verdict.WORSE: "worse"}


@dataclass(frozen=True)
class Bar:
    """From `start` to `end`, with what is said after it; `tone` is the name of its color."""

    start: float
    end: float
    said: str
    tone: str


@dataclass(frozen=True)
class Row:
    """Bars under a label. `mark` is where the possible ends, `rounds` from where to where single
    rounds went."""

    label: str
    bars: tuple[Bar, ...]
    mark: float | None = None
    rounds: tuple[float, float] | None = None


@dataclass(frozen=True)
class Plot:
    """A picture with its title, what is to be said of it, and what it shows in words.

    `line` is where a line crosses all rows, `legend` what the arms' colors are explained with: the
    name of the marks, "" for the arms alone, None for nothing.
    """

    title: str
    caption: str
    description: str
    rows: tuple[Row, ...]
    line: float | None = None
    legend: str | None = None


def overview(results: Sequence[Result]) -> tuple[Plot, ...]:
    """The pictures of all workloads together; those that there are no numbers for are left out."""
    plots = [throughput(results)]
    for title, name, text in (
        ("Forward passes", "forward_passes", "Each as a share of stock's. Counted by the servers."),
        (
            "Prompt tokens computed",
            "computed_prompt_tokens",
            "Each as a share of stock's. The mark is what any server must compute.",
        ),
    ):
        if known := [one for one in results if all(one.arms[arm].get(name) for arm in ARMS)]:
            plots.append(shares_of_stock(known, title, name, text))
    if known := [one for one in results if _has_tails(one)]:
        plots.append(tails(known))
    return tuple(plots)


def throughput(results: Sequence[Result]) -> Plot:
    """Ratios on a logarithmic scale, with the span of single rounds."""
    spreads = [one.throughput for one in results]
    ends = [end for one in spreads for end in (one.ratio, one.low, one.high) if end is not None]
    place = _logarithmic(min(1.0, *ends), max(1.1, *ends))
    rows = []
    for one, spread in zip(results, spreads, strict=True):
        no_difference = spread.verdict is Verdict.NO_DIFFERENCE
        said = spread.verdict.value if no_difference else times(spread.ratio)
        start, end = sorted((place(1), place(spread.ratio)))
        is_known = spread.low is not None and spread.high is not None
        rounds = (place(spread.low or 1), place(spread.high or 1)) if is_known else None
        bar = Bar(start, end, said, TONES.get(spread.verdict, "stock"))
        rows.append(Row(_cut(one.label), (bar,), rounds=rounds))
    described = "; ".join(f"{one.label} {times(one.throughput.ratio)}" for one in results)
    return Plot(
        "Throughput",
        "Programs/s, with the plugin / stock. Right of the line the plugin is faster. The line "
        "across a bar reaches from the least to the greatest of single rounds; gray is no "
        "difference, or a single round.",
        f"Throughput with the plugin as a multiple of stock's: {described}",
        tuple(rows),
        line=place(1),
    )


def shares_of_stock(results: Sequence[Result], title: str, name: str, text: str) -> Plot:
    """Both arms' counts, stock's as 100 %, with a mark at the least that is possible."""

    def counted(one: Result, arm: str) -> float:
        return one.arms[arm].get(name) or 0

    has_mark = name == "computed_prompt_tokens"
    most = max([1.0, *(counted(one, "sgl") / counted(one, "stock") for one in results)])
    rows, described = [], []
    for one in results:
        whole = counted(one, "stock") * most
        said = {arm: count(counted(one, arm)) for arm in ARMS}
        bars = tuple(Bar(0, counted(one, arm) / whole, said[arm], arm) for arm in ARMS)
        least = one.limits.unique_prompt_tokens
        rows.append(Row(_cut(one.label), bars, least / whole if has_mark else None))
        described.append(f"{one.label} {' to '.join(said.values())}")
    description = f"{title}, stock to plugin: {'; '.join(described)}"
    return Plot(title, text, description, tuple(rows), legend="least possible" if has_mark else "")


def tails(results: Sequence[Result]) -> Plot:
    """From p50 to p99 of the time to first token, a bar for each arm."""

    def ends(one: Result, arm: str) -> tuple[float, float]:
        p50, p99 = (one.arms[arm].get(f"ttft_{tail}_s") or 0 for tail in ("p50", "p99"))
        return p50, p99

    seconds = [end for one in results for arm in ARMS for end in ends(one, arm)]
    place = _logarithmic(min(seconds) / 1.25, max(seconds) * 1.25)

    def bar(one: Result, arm: str) -> Bar:
        p50, p99 = ends(one, arm)
        return Bar(place(p50), place(p99), f"{p50:.3g} to {p99:.3g} s", arm)

    rows = [Row(_cut(one.label), tuple(bar(one, arm) for arm in ARMS)) for one in results]
    described = "; ".join(
        f"{one.label} p99 " + " to ".join(f"{ends(one, arm)[1]:.3g} s" for arm in ARMS)
        for one in results
    )
    return Plot(
        "Time to first token",
        "From p50 to p99 of single requests, with the wait in the queue, on a logarithmic scale. "
        "Seconds of this machine: only the two of one workload can be compared.",
        f"Time to first token, stock to plugin: {described}",
        tuple(rows),
        legend="",
    )


def ablations(one: Result) -> Plot | None:
    """Throughput without parts of the plugin, the full one as 1; None if nothing was left out."""
    if not one.ablations:
        return None
    bars = [
        ("full", 1.0, "sgl"),
        *((part.title, part.throughput, "soft") for part in one.ablations),
    ]
    bars.append((NAMES["stock"], 1 / one.throughput.ratio, "stock"))
    most = max(value for _, value, _ in bars)
    apart = span(one.throughput)
    return Plot(
        "What each part gives",
        "Throughput without a part of it, as a share of the full plugin's"
        + (
            f". How far rounds are apart says what small steps mean: here from {apart} times stock."
            if apart
            else "; single rounds."
        ),
        "Throughput by what is on, as shares of the full plugin's: "
        + "; ".join(f"{title} {value:.2f}" for title, value, _ in bars),
        tuple(
            Row(_cut(title), (Bar(0, value / most, f"{value:.2f}", tone),))
            for title, value, tone in bars
        ),
        line=1 / most,
    )


def _logarithmic(low: float, high: float) -> Callable[[float], float]:
    """From 0 at `low` to 1 at `high`."""
    return lambda value: math.log(value / low) / math.log(high / low)


def _has_tails(one: Result) -> bool:
    return all(one.arms[arm].get(f"ttft_{tail}_s") for arm in ARMS for tail in ("p50", "p99"))


def _cut(text: str) -> str:
    if len(text) <= MOST_LABEL_CHARACTERS:
        return text
    return f"{text[: MOST_LABEL_CHARACTERS - 1]}…"
