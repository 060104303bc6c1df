"""Draws docs/speedups.svg, the README's chart, from recorded results of `benchmarks.ab`.

Owns how results are shown. `chart.toml` says which, and in which words; the numbers are those of
the files in benchmarks/results/cpu. ``make pictures`` runs it.

    python -m tools.chart [--check]
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator
from html import escape
from math import log
from string import Template

from benchmarks.report import loading
from benchmarks.report.loading import Result, Verdict
from tools.generated import ROOT, main_writing

RESULTS = ROOT / "benchmarks" / "results" / "cpu"
CHART = ROOT / "docs" / "speedups.svg"
TEMPLATE = Template((ROOT / "tools" / "chart.svg").read_text())

ROWS = tomllib.loads((ROOT / "tools" / "chart.toml").read_text())
"""By what gains, the files of results, and what is said of each."""

MODELS = {"demo": "demo, 4M", "shape:33m": "33M"}

_WIDTH, _ROW_HEIGHT, _TOP, _BOTTOM = 830, 19, 62, 85
_LABELS, _MODELS, _BARS = 26, 376, 448  # where each column begins
_BARS_END, _LARGEST = 724, 6.0  # where the axis ends, and at which ratio
_AXIS = (1, 2, 3, 4, 5)

_KINDS = {Verdict.BETTER: "better", Verdict.WORSE: "worse"}


def chart() -> str:
    """The chart as SVG, light or dark as the reader's system prefers."""
    results = {one.file.stem: one for one in loading.load([RESULTS]).results}
    shown = [results[file] for rows in ROWS.values() for file in rows]
    height = _TOP + _ROW_HEIGHT * (len(shown) + len(ROWS)) + _BOTTOM
    title = "Throughput of vLLM with the plugin, as a multiple of stock vLLM's"
    body = [_text(16, 28, title, "title"), *_grid(height), *_rows(results), *_notes(shown, height)]
    return TEMPLATE.substitute(
        width=_WIDTH,
        height=height,
        inner_width=_WIDTH - 1,
        inner_height=height - 1,
        title=title,
        body="\n".join(body),
    )


def _x(ratio: float) -> float:
    """On a logarithmic axis, so that half and twice as fast are equally far from 1."""
    return _BARS + (_BARS_END - _BARS) * log(ratio) / log(_LARGEST)


def _text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    kind = f' class="{kind}"' if kind else ""
    anchor = "" if anchor == "start" else f' text-anchor="{anchor}"'
    return f'<text{kind} x="{x:.1f}" y="{y:.1f}"{anchor}>{escape(words)}</text>'


def _grid(height: float) -> Iterator[str]:
    for ratio in _AXIS:
        x, bottom = _x(ratio), height - _BOTTOM + 6
        yield f'<path class="grid" d="M{x:.1f} {_TOP - 6}V{bottom}"/>'
        yield _text(x, _TOP - 12, f"{ratio}x", "soft", "middle")


def _rows(results: dict[str, Result]) -> Iterator[str]:
    y = _TOP
    for part, rows in ROWS.items():
        yield _text(16, y + 14, part, "part")
        y += _ROW_HEIGHT
        for file, words in rows.items():
            yield from _row(results[file], words, y)
            y += _ROW_HEIGHT


def _row(result: Result, words: str, y: float) -> Iterator[str]:
    spread = result.throughput
    low, high = spread.low or spread.ratio, spread.high or spread.ratio
    left, right = sorted((_x(1), _x(spread.ratio)))
    bar = f'x="{left:.1f}" y="{y + 4}" width="{max(right - left, 1):.1f}" height="11"'
    verdict = in_words(spread.ratio)
    if spread.verdict not in _KINDS:
        verdict = f"{spread.verdict} ({verdict})"
    yield _text(_LABELS, y + 14, words)
    yield _text(_MODELS, y + 14, MODELS[result.model], "soft")
    yield f'<rect class="{_KINDS.get(spread.verdict, "none")}" {bar}/>'
    yield f'<path class="rounds" d="M{_x(low):.1f} {y + 9.5}H{_x(high):.1f}"/>'
    yield _text(_x(high) + 8, y + 14, verdict, "value" if spread.verdict in _KINDS else "soft")


def in_words(ratio: float) -> str:
    return f"{ratio:.1f}x" if ratio >= 10 else f"{ratio:.2f}x"


def _notes(shown: list[Result], height: float) -> Iterator[str]:
    """What was measured where, in the words of the files."""

    def each(values: Iterator[str]) -> str:
        return ", ".join(dict.fromkeys(values))

    machines = each(one.machine for one in shown)
    versions = each(one.versions["vllm"] for one in shown)
    days = sorted({one.date[:10] for one in shown})
    rounds = each(str(one.num_rounds) for one in shown)
    notes = (
        f"Measured on {machines}.",
        f"vLLM {versions}, {days[0]} to {days[-1]}. Not measured on a GPU.",
        f"Medians of {rounds} alternating rounds; the line goes from the lowest to the highest "
        "round. 4M, 33M: parameters of the model.",
    )
    for line, words in enumerate(notes):
        yield _text(16, height - _BOTTOM + 32 + line * _ROW_HEIGHT, words, "soft")


if __name__ == "__main__":
    sys.exit(main_writing("make pictures", lambda: {CHART: chart()}))
