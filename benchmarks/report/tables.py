"""Tables of results: what a cell says, and the table as Markdown and in a README.

Owns the words. Pure: nothing is read or drawn. A ratio that its rounds do not bear out is said to
be none.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.ab.table import ROWS
from benchmarks.arms import ARMS
from benchmarks.report.loading import ReportError, Result, Results, Spread, Verdict

BEGIN, END = "<!-- benchmarks:begin -->", "<!-- benchmarks:end -->"
MEASURED_BY = "python -m benchmarks.ab all --model MODEL --json DIR"
SHOWN_BY = "python -m benchmarks.report DIR"


@dataclass(frozen=True)
class Cell:
    """What is said, what is said in smaller letters after it, and how it is meant.

    `tone` is a `Verdict`'s value, or "" where nothing is judged. `order` is the number that the
    page sorts by, None where there is none.
    """

    text: str
    note: str = ""
    tone: str = ""
    order: float | None = None


EMPTY = Cell("")
SPACE, NARROW = "\u00a0", "\u202f"
"""Spaces at which no line ends."""


@dataclass(frozen=True)
class Column:
    """A heading, whether the short table has it too, and a result's cell."""

    heading: str
    short: bool
    cell: Callable[[Result], Cell]


@dataclass(frozen=True)
class Table:
    """Headings, and a row for each result; columns that say nothing of any result are left out."""

    headings: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]


# -- numbers in words


def times(value: float) -> str:
    """A ratio, with more digits near 1, where they matter."""
    if value >= 10:
        return f"{value:.1f}"
    if 0.9995 < value < 1.0005 and value != 1:
        return f"{value:.4f}"
    return f"{value:.3f}" if 0.9 < value < 1.1 else f"{value:.2f}"


def span(spread: Spread) -> str:
    """From round to round; "" of a single round."""
    if spread.low is None or spread.high is None:
        return ""
    return SPACE.join((times(spread.low), "to", times(spread.high)))


def count(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}"


def percent(share: float | None) -> str:
    if share is None:
        return ""
    shown = 100 * share
    if 0 < shown < 0.1:
        return f"<0.1{NARROW}%"
    return f"{shown:.1f}{NARROW}%" if 0 < shown < 10 else f"{shown:.0f}{NARROW}%"


def _three_decimals(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def ratio_cell(spread: Spread | None) -> Cell:
    if spread is None:
        return EMPTY
    text, note = times(spread.ratio), span(spread)
    if spread.ratio == spread.low == spread.high == 1:
        text, note = "equal", ""
    elif spread.verdict is Verdict.UNKNOWN:
        note = "one round"
    elif spread.verdict is Verdict.NO_DIFFERENCE:
        text, note = spread.verdict.value, f"{text}, {note}"
    return Cell(text, note, spread.verdict.value, spread.ratio)


def _both(
    said: Callable[[float | None], str],
    stock: float | None,
    sgl: float | None,
    *,
    note: str = "",
) -> Cell:
    """Both arms' numbers in words; the order is that of the numbers with the plugin."""
    if stock is None and sgl is None:
        return EMPTY
    return Cell(f"{said(stock) or '?'} → {said(sgl) or '?'}", note, order=sgl)


# -- the table of all workloads


def _passes(one: Result) -> Cell:
    return _both(count, *(one.arms[arm].get("forward_passes") for arm in ARMS))


def _computed(one: Result) -> Cell:
    # The bound is that of the prompts that stock was sent: the other arm may send different ones.
    unique = "" if one.different_prompts else count(one.limits.unique_prompt_tokens)
    both = (one.arms[arm].get("computed_prompt_tokens") for arm in ARMS)
    return _both(count, *both, note=f"at least{SPACE}{unique}" if unique else "")


def _hit_rate(one: Result) -> Cell:
    if one.different_prompts:
        return Cell("different prompts")
    best = percent(one.limits.best_hit_rate)
    return _both(
        percent,
        *(one.arms[arm].hit_rate for arm in ARMS),
        note=f"at best{SPACE}{best}" if best else "",
    )


def _score(one: Result) -> Cell:
    return _both(_three_decimals, *(one.score.get(arm) for arm in ARMS))


def _same_output(one: Result) -> Cell:
    if not one.same_compared:
        return EMPTY
    if one.same_equal == one.same_compared:
        return Cell("all", f"of {count(one.same_compared)}", order=1)
    share = one.same_equal / one.same_compared
    return Cell(count(one.same_equal), f"of {count(one.same_compared)}", order=share)


COLUMNS = (
    Column("workload", True, lambda one: Cell(one.workload, one.variant)),
    Column("throughput", True, lambda one: ratio_cell(one.throughput)),
    Column("latency, p50", True, lambda one: ratio_cell(one.spreads.get("latency_p50"))),
    Column("first token, p50", False, lambda one: ratio_cell(one.spread_of("ttft_p50_s", -1))),
    Column("first token, p99", True, lambda one: ratio_cell(one.spreads.get("ttft_p99"))),
    Column("forward passes", True, _passes),
    Column("prompt tokens computed", True, _computed),
    Column("hit rate", False, _hit_rate),
    Column("same output", True, _same_output),
    Column("score", True, _score),
)


def short_table(results: Sequence[Result]) -> Table:
    return _table(results, [one for one in COLUMNS if one.short])


def full_table(results: Sequence[Result]) -> Table:
    return _table(results, COLUMNS)


def _table(results: Sequence[Result], columns: Sequence[Column]) -> Table:
    cells = [[column.cell(one) for one in results] for column in columns]
    kept = [i for i, of_column in enumerate(cells) if any(cell != EMPTY for cell in of_column)]
    rows = zip(*(cells[i] for i in kept), strict=True)
    return Table(tuple(columns[i].heading for i in kept), tuple(rows))


# -- tables of one result, and of vLLM's load generator


def figures_table(one: Result) -> Table:
    """All figures of both arms, medians, with their ratios where one of them is better."""
    rows = []
    above = ""
    for name, label, form, better in ROWS:
        if label.startswith("p99"):  # of the row above
            label = f"{above}, {label}"
        above = label.partition(", p50")[0]
        stock, sgl = (one.arms[arm].get(name) for arm in ARMS)
        if stock is None or sgl is None:
            continue
        shown = [Cell(format(_as(form, value), form)) for value in (stock, sgl)]
        rows.append((Cell(label), *shown, ratio_cell(one.spread_of(name, better))))
    return Table(("", *ARMS, "ratio"), tuple(rows))


def _as(form: str, value: float) -> float:
    return round(value) if form.endswith("d") else value


# -- Markdown


def markdown(results: Results, option: str = "") -> str:
    """The short table and vLLM's own figures, as far as there are some, and the caption, which says
    how the table was made: with this option of the command."""
    parts = []
    if results.results:
        parts += [_markdown_table(short_table(results.results)), caption(results, option)]
    return "\n\n".join(parts) + "\n"


def caption(results: Results, option: str) -> str:
    """How to read the table, and what made it, in Markdown."""
    some_unknown = any(one.throughput.verdict is Verdict.UNKNOWN for one in results.results)
    reading = (
        "Stock vLLM → vLLM with the plugin. A ratio above 1 is better for the plugin. Ratios are "
        "medians over the rounds, with the lowest and the highest round in parentheses. *No "
        "difference*: the rounds are as far apart as the ratio is from 1."
    )
    if some_unknown:
        reading += " *One round*: the spread is not known."
    made = f"Made by `{MEASURED_BY}` and `{f'{SHOWN_BY} {option}'.strip()}`"
    facts = [made, *provenance(results)]
    return f"{reading}\n\n" + "; ".join(facts) + "."


def provenance(results: Results) -> tuple[str, ...]:
    """Models, machines, dates and versions, each in words, as far as the files say."""
    facts = (
        ("model", results.values("model")),
        ("", results.values("machine")),
        ("", tuple(dict.fromkeys(date[:10] for date in sorted(results.values("date"))))),
        ("", results.versions()),
    )
    return tuple(
        f"{name} {', '.join(map(_markdown_text, values))}".strip()
        for name, values in facts
        if values
    )


def _markdown_table(table: Table) -> str:
    def line(cells: Sequence[str]) -> str:
        return f"| {' | '.join(cells)} |"

    rows = [line([_markdown_cell(cell) for cell in row]) for row in table.rows]
    alignments = ["---", *["---:"] * (len(table.headings) - 1)]
    return "\n".join([line(table.headings), line(alignments), *rows])


def _markdown_cell(cell: Cell) -> str:
    text = _markdown_text(cell.text)
    if cell.tone in (Verdict.BETTER, Verdict.WORSE):
        text = f"**{text}**"
    return f"{text} ({_markdown_text(cell.note)})" if cell.note else text


def _markdown_text(text: str) -> str:
    """The text as such, whatever marks it contains, on one line."""
    escaped = re.sub(r"([\\`*\[\]|])", r"\\\1", " ".join(text.split()))
    escaped = escaped.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    # Between letters an underscore is no mark.
    return re.sub(r"(?<!\w)_|_(?!\w)", r"\\_", escaped)


def into_readme(text: str, table: str) -> str:
    """The README's text with the table between its markers. ReportError if they are not there, once
    each and in order."""
    for marker in (BEGIN, END):
        if text.count(marker) != 1:
            times_found = text.count(marker) or "not"
            raise ReportError(
                f"the line {marker} is {times_found} there: the table goes between one "
                f"{BEGIN} and one {END}"
            )
    before, _, rest = text.partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        raise ReportError(f"{END} comes before {BEGIN}")
    return f"{before}{BEGIN}\n\n{table.strip()}\n\n{END}{after}"
