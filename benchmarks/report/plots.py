"""Pictures of results, as SVG for the inside of a page.

Owns the drawing. matplotlib is needed to draw, not to import this module. A picture is as wide as
a phone, and all of its colours are the page's: it is light or dark with it.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import StringIO
from typing import TYPE_CHECKING, Any

from benchmarks.drawing import STYLE
from benchmarks.medians import ARMS
from benchmarks.report.loading import Result, Verdict
from benchmarks.report.tables import count, percent, span, times

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH_IN = 4.3
ROW_IN = 0.52
MARGIN_IN = 0.62  # for the axis and the legend
BAR = 0.22  # of a row
PAIR = (0.02, 0.24)  # from a row's middle to those of its two bars
LABEL_ABOVE = 0.23
MOST_LABEL_CHARACTERS = 48

# matplotlib wants colours; in the SVG each becomes the page's variable of that name.
INK, SOFT, LINE, STOCK, SGL, WORSE, SURFACE = (f"#0000{number:02x}" for number in range(1, 8))
VARIABLES = dict(
    zip(
        (INK, SOFT, LINE, STOCK, SGL, WORSE, SURFACE),
        ("--ink", "--soft", "--line", "--stock", "--sgl", "--worse", "--surface"),
        strict=True,
    )
)
COLOURS = {"stock": STOCK, "sgl": SGL}
NAMES = {"stock": "stock vLLM", "sgl": "with the plugin"}
VERDICT_COLOURS = {
    Verdict.BETTER: SGL,
    Verdict.WORSE: WORSE,
    Verdict.NO_DIFFERENCE: STOCK,
    Verdict.UNKNOWN: STOCK,
}


@dataclass(frozen=True)
class Plot:
    """A picture with its title, what is to be said of it, and what it shows in words."""

    title: str
    caption: str
    description: str
    svg: str


def overview(results: Sequence[Result]) -> tuple[Plot, ...]:
    """The pictures of all workloads together; those that there are no numbers for are left out."""
    plots = [throughput(results)]
    of_counts = (
        (
            "Forward passes",
            "forward_passes",
            "Each as a share of stock's. Counted by the servers, and exact.",
        ),
        (
            "Prompt tokens computed",
            "computed_prompt_tokens",
            "Each as a share of stock's. The mark is what any server must compute.",
        ),
    )
    for title, name, text in of_counts:
        known = [one for one in results if all(one.arms[arm].get(name) for arm in ARMS)]
        if known:
            plots.append(shares(known, title, name, text))
    if known := [one for one in results if _has_hit_rates(one)]:
        plots.append(hit_rates(known))
    if known := [one for one in results if _has_tails(one)]:
        plots.append(tails(known))
    if known := [one for one in results if all(arm in one.near_limit for arm in ARMS)]:
        plots.append(near_limits(known))
    return tuple(plots)


def throughput(results: Sequence[Result]) -> Plot:
    """Bars from 1 to the ratio, on a logarithmic axis, with whiskers from round to round."""

    def draw(axes: Axes) -> None:
        axes.set_xscale("log")
        axes.axvline(1, color=INK, linewidth=1, zorder=2.5)
        ends = [1.0]
        for y, one in enumerate(results):
            spread = one.throughput
            colour = VERDICT_COLOURS[spread.verdict]
            solid = spread.verdict is not Verdict.UNKNOWN
            axes.barh(
                y,
                spread.ratio - 1,
                left=1,
                height=BAR,
                facecolor=colour if solid else "none",
                edgecolor=colour,
                linewidth=0.9,
            )
            if spread.low is not None and spread.high is not None:
                axes.plot([spread.low, spread.high], [y, y], color=INK, linewidth=1.1, zorder=4)
                for end in (spread.low, spread.high):
                    axes.plot([end, end], [y - 0.09, y + 0.09], color=INK, linewidth=1.1, zorder=4)
                ends += [spread.low, spread.high]
            ends.append(spread.ratio)
            no_difference = spread.verdict is Verdict.NO_DIFFERENCE
            said = spread.verdict.value if no_difference else times(spread.ratio)
            _value(axes, max(1, spread.ratio, spread.high or 0), y, said)
            _label(axes, y, one)
        low, high = min(ends), max(*ends, 1.1)
        axes.set_xlim(low / (high / low) ** 0.03, high * (high / low) ** 0.2)  # room for values
        _log_ticks(axes, "{:g}×")
        axes.set_xlabel("programs/s, with the plugin / stock", color=SOFT)

    described = "; ".join(f"{one.label} {times(one.throughput.ratio)}" for one in results)
    return Plot(
        "Throughput",
        "Right of the line the plugin is faster. The thin line reaches from the least to the "
        "greatest of single rounds; grey is no difference, hollow a single round.",
        f"Throughput with the plugin as a multiple of stock's: {described}",
        _svg("throughput", len(results), draw),
    )


def shares(results: Sequence[Result], title: str, name: str, text: str) -> Plot:
    """Both arms' counts, stock's as 100 %."""

    def whole(one: Result) -> float:
        return one.arms["stock"].get(name) or 1

    def least(one: Result) -> float | None:
        tokens = one.limits.unique_prompt_tokens
        return None if tokens is None else tokens / whole(one)

    return _pairs_of_bars(
        results,
        title,
        text,
        lambda one, arm: (one.arms[arm].get(name) or 0) / whole(one),
        lambda one, arm: count(one.arms[arm].get(name) or 0),
        ("least possible", least) if name == "computed_prompt_tokens" else None,
    )


def hit_rates(results: Sequence[Result]) -> Plot:
    """Cached / all prompt tokens of both arms, and the best that any cache could do."""

    def rate(one: Result, arm: str) -> float:
        return one.arms[arm].hit_rate or 0

    return _pairs_of_bars(
        results,
        "Prompt tokens from the cache",
        "The share of all prompt tokens. The mark is what a cache of any size could give.",
        rate,
        lambda one, arm: percent(rate(one, arm)),
        ("best possible", lambda one: one.limits.best_hit_rate),
    )


def near_limits(results: Sequence[Result]) -> Plot:
    """How much of the limit's speed both arms have."""
    return _pairs_of_bars(
        results,
        "How near to the limit",
        "100 % is the time that the tokens which any server must compute and decide would take, "
        "at the rates of stock on this machine.",
        lambda one, arm: one.near_limit[arm],
        lambda one, arm: percent(one.near_limit[arm]),
    )


def _pairs_of_bars(
    results: Sequence[Result],
    title: str,
    text: str,
    share: Callable[[Result, str], float],
    said: Callable[[Result, str], str],
    mark: tuple[str, Callable[[Result], float | None]] | None = None,
) -> Plot:
    """Both arms' shares with what is said of them, and a mark, with its name, where it is known."""

    def marked(one: Result) -> float | None:
        return mark[1](one) if mark else None

    def draw(axes: Axes) -> None:
        most = 1.0
        for y, one in enumerate(results):
            for arm, offset in zip(ARMS, PAIR, strict=True):
                value = share(one, arm)
                axes.barh(y + offset, value, height=BAR, color=COLOURS[arm])
                _value(axes, value, y + offset, said(one, arm))
                most = max(most, value)
            if (at := marked(one)) is not None:
                _mark(axes, at, y)
            _label(axes, y, one)
        axes.set_xlim(0, most * 1.17)  # room for values
        axes.xaxis.set_major_formatter(lambda value, _: percent(value) if value <= most else "")
        _legend(axes, mark[0] if mark else None)

    described = "; ".join(
        f"{one.label} {' to '.join(said(one, arm) for arm in ARMS)}"
        + (f", {mark[0]} {percent(marked(one)) or 'not known'}" if mark else "")
        for one in results
    )
    svg = _svg(title, len(results), draw, room=0.3)
    return Plot(title, text, f"{title}, stock to plugin: {described}", svg)


def tails(results: Sequence[Result]) -> Plot:
    """From p50 to p99 of the time to first token, a line for each arm."""

    def draw(axes: Axes) -> None:
        axes.set_xscale("log")
        ends = []
        for y, one in enumerate(results):
            for arm, offset in zip(ARMS, PAIR, strict=True):
                at = y + offset
                p50, p99 = (one.arms[arm].get(f"ttft_{tail}_s") or 0 for tail in ("p50", "p99"))
                axes.plot([p50, p99], [at, at], color=COLOURS[arm], linewidth=2.2)
                axes.plot(p50, at, "o", color=COLOURS[arm], markersize=5)
                axes.plot(p99, at, "|", color=COLOURS[arm], markersize=8, markeredgewidth=2.2)
                ends += [p50, p99]
            _label(axes, y, one)
        axes.set_xlim(min(ends) / 1.25, max(ends) * 1.25)
        _log_ticks(axes, "{:g}")
        axes.set_xlabel("seconds", color=SOFT)
        _legend(axes, None)

    described = "; ".join(
        f"{one.label} p99 "
        + " to ".join(f"{one.arms[arm].get('ttft_p99_s'):.3g} s" for arm in ARMS)
        for one in results
    )
    return Plot(
        "Time to first token",
        "From p50, the dot, to p99, the end; of single requests, with the wait in the queue. "
        "Seconds of this machine: only the two of one workload can be compared.",
        f"Time to first token, stock to plugin: {described}",
        _svg("tails", len(results), draw, room=0.45),
    )


def ablations(one: Result) -> Plot | None:
    """Throughput without parts of the plugin, the full one as 1; None if nothing was left out."""
    if not one.ablations:
        return None
    bars = [("full", 1.0, SGL)]
    bars += [(ablation.title, ablation.throughput, SOFT) for ablation in one.ablations]
    bars.append((NAMES["stock"], 1 / one.throughput.ratio, STOCK))

    def draw(axes: Axes) -> None:
        for y, (title, value, colour) in enumerate(bars):
            axes.barh(y, value, height=BAR, color=colour)
            _value(axes, value, y, f"{value:.2f}")
            axes.text(
                0, y - LABEL_ABOVE, _cut(title), transform=axes.get_yaxis_transform(), color=INK
            )
        axes.axvline(1, color=LINE, linewidth=1, zorder=0)
        axes.set_xlim(0, 1.14 * max(value for _, value, _ in bars))
        axes.set_xlabel("programs/s, full = 1", color=SOFT)

    described = "; ".join(f"{title} {value:.2f}" for title, value, _ in bars)
    return Plot(
        "What each part gives",
        "Throughput without a part of it, as a share of the full plugin's. How far rounds are "
        f"apart says what small steps mean: here from {span(one.throughput)} times stock."
        if span(one.throughput)
        else "Throughput without a part of it, as a share of the full plugin's; single rounds.",
        f"Throughput by what is on, as shares of the full plugin's: {described}",
        _svg(f"ablations of {one.label}", len(bars), draw, room=0.1),
    )


# -- pieces


def _has_hit_rates(one: Result) -> bool:
    rates = [one.arms[arm].hit_rate for arm in ARMS]
    best = one.limits.best_hit_rate
    return not one.different_prompts and None not in rates and any([*rates, best])


def _has_tails(one: Result) -> bool:
    return all(one.arms[arm].get(f"ttft_{tail}_s") for arm in ARMS for tail in ("p50", "p99"))


def _label(axes: Axes, y: float, one: Result) -> None:
    """A row's name above it, so that bars have the whole width."""
    transform = axes.get_yaxis_transform()
    axes.text(0, y - LABEL_ABOVE, _cut(one.label), transform=transform, color=INK)


def _cut(text: str) -> str:
    if len(text) <= MOST_LABEL_CHARACTERS:
        return text
    return f"{text[: MOST_LABEL_CHARACTERS - 1]}…"


def _value(axes: Axes, x: float, y: float, text: str) -> None:
    axes.annotate(
        text,
        (x, y),
        xytext=(4, 0),
        textcoords="offset points",
        va="center_baseline",
        color=SOFT,
        fontsize=8.5,
    )


def _mark(axes: Axes, x: float, y: float) -> None:
    axes.plot([x, x], [y - 0.12, y + 0.38], color=INK, linewidth=1.6, zorder=4)


def _legend(axes: Axes, mark: str | None) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Patch | Line2D] = [Patch(color=COLOURS[arm], label=NAMES[arm]) for arm in ARMS]
    if mark:
        line = {"color": INK, "linestyle": "none", "marker": "|"}
        handles.append(
            Line2D([], [], **line, markersize=9, markeredgewidth=1.6, label=mark)  # type: ignore[arg-type]
        )
    axes.figure.legend(
        handles=handles,
        loc="outside lower left",
        ncols=3,
        frameon=False,
        labelcolor=INK,
        handlelength=1.1,
        columnspacing=1.4,
        borderpad=0.1,
    )


def _log_ticks(axes: Axes, form: str) -> None:
    """A few round numbers, as many as fit."""
    from matplotlib import ticker

    low, high = axes.get_xlim()
    steps: tuple[float, ...] = (1, 2, 5) if high / low < 200 else (1,)
    if high / low < 4:
        steps = (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8, 9)
    if high / low < 1.5:
        axes.xaxis.set_major_locator(ticker.MaxNLocator(5))
    else:
        axes.xaxis.set_major_locator(ticker.LogLocator(subs=steps))
    axes.xaxis.set_minor_locator(ticker.NullLocator())
    axes.xaxis.set_major_formatter(lambda value, _: form.format(round(value, 6)))


def _svg(name: str, num_rows: int, draw: Callable[[Axes], None], room: float = 0.0) -> str:
    """The picture's `<svg>` element, `room` inches higher than its rows and axis need."""
    import matplotlib

    logging.getLogger("matplotlib").setLevel(logging.WARNING)  # not that it has looked for fonts
    matplotlib.use("Agg")
    from matplotlib import pyplot

    style: Any = {
        **STYLE,
        "font.family": "DejaVu Sans",  # comes with matplotlib: the layout is the same everywhere
        "font.size": 9.5,
        "text.parse_math": False,
        "text.color": INK,
        "axes.edgecolor": LINE,
        "axes.labelcolor": SOFT,
        "axes.spines.left": False,
        "xtick.color": LINE,
        "xtick.labelcolor": SOFT,
        "svg.hashsalt": name,  # names inside of a picture, which share a page with others'
    }
    with matplotlib.rc_context(style):
        height = ROW_IN * num_rows + MARGIN_IN + room
        figure, axes = pyplot.subplots(figsize=(WIDTH_IN, height), layout="constrained")
        try:
            axes.set_ylim(num_rows - 0.45, -0.55)
            axes.set_yticks([])
            axes.grid(axis="x", color=LINE, linewidth=0.6)
            axes.set_axisbelow(True)
            draw(axes)
            file = StringIO()
            nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
            figure.savefig(file, format="svg", transparent=True, metadata=nothing)
        finally:
            pyplot.close(figure)
    return _for_a_page(file.getvalue())


def _for_a_page(svg: str) -> str:
    """Only the element, as wide as there is room, in the page's colours and font."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)
    # Its size is the style's; the name in words is on the element around it.
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r'\1 aria-hidden="true"', svg, count=1)
    svg = svg.replace("'DejaVu Sans'", "var(--font)")
    return re.sub(
        "|".join(VARIABLES), lambda match: f"var({VARIABLES[match.group()]})", svg
    ).strip()
