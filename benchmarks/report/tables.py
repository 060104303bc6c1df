"""Tables of results: what a cell says, and the table as Markdown and in a README.

Owns the words. Pure: nothing is read or drawn. A ratio that its rounds do not bear out is said to
be none.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.arms import ARMS
from benchmarks.report.loading import ReportError, Result, Results, Spread, Verdict

BEGIN, END = "<!-- benchmarks:begin -->", "<!-- benchmarks:end -->"
MEASURED_BY = "python -m benchmarks.ab all --model MODEL --json DIR"
SHOWN_BY = "python -m benchmarks.report DIR"


@dataclass(frozen=True)
class Cell:
    """What is said, what is said in smaller letters after it, and how it is meant.

    `tone` is a `Verdict`'s value, or "" where nothing is judged.
    """

    text: str
    note: str = ""
    tone: str = ""


EMPTY = Cell("")
SPACE = "\u00a0"
"""At which no line ends."""


@dataclass(frozen=True)
class Column:
    """A heading, and a result's cell."""

    heading: str
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
    return Cell(text, note, spread.verdict.value)


def _both(
    said: Callable[[float | None], str],
    stock: float | None,
    sgl: float | None,
    *,
    note: str = "",
) -> Cell:
    """Both arms' numbers in words."""
    if stock is None and sgl is None:
        return EMPTY
    return Cell(f"{said(stock) or '?'} → {said(sgl) or '?'}", note)


# -- the table of all workloads


def _passes(one: Result) -> Cell:
    return _both(count, *(one.arms[arm].get("forward_passes") for arm in ARMS))


def _computed(one: Result) -> Cell:
    # The bound is that of the prompts that stock was sent: the other arm may send different ones.
    unique = "" if one.different_prompts else count(one.unique_prompt_tokens)
    both = (one.arms[arm].get("computed_prompt_tokens") for arm in ARMS)
    return _both(count, *both, note=f"at least{SPACE}{unique}" if unique else "")


def _score(one: Result) -> Cell:
    return _both(_three_decimals, *(one.score.get(arm) for arm in ARMS))


def _same_output(one: Result) -> Cell:
    if not one.same_compared:
        return EMPTY
    if one.same_equal == one.same_compared:
        return Cell("all", f"of {count(one.same_compared)}")
    return Cell(count(one.same_equal), f"of {count(one.same_compared)}")


COLUMNS = (
    Column("workload", lambda one: Cell(one.workload, one.variant)),
    Column("throughput", lambda one: ratio_cell(one.throughput)),
    Column("latency, p50", lambda one: ratio_cell(one.spreads.get("latency_p50"))),
    Column("first token, p99", lambda one: ratio_cell(one.spreads.get("ttft_p99"))),
    Column("forward passes", _passes),
    Column("prompt tokens computed", _computed),
    Column("same output", _same_output),
    Column("score", _score),
)


def table_of(results: Sequence[Result]) -> Table:
    cells = [[column.cell(one) for one in results] for column in COLUMNS]
    kept = [i for i, of_column in enumerate(cells) if any(cell != EMPTY for cell in of_column)]
    rows = zip(*(cells[i] for i in kept), strict=True)
    return Table(tuple(COLUMNS[i].heading for i in kept), tuple(rows))


# -- Markdown


def markdown(results: Results, option: str = "") -> str:
    """The table, and the caption, which says how the table was made: with this option of the
    command."""
    return f"{_markdown_table(table_of(results.results))}\n\n{caption(results, option)}\n"


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
