"""Tables of results: what a cell says, and the table as Markdown and in a README.

Owns the words. Pure: nothing is read or drawn. A ratio that its rounds do not bear out is said to
be none.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from benchmarks.arms import ARMS
from benchmarks.report.loading import ReportError, Result, Results, Spread, Verdict

BEGIN, END = "<!-- benchmarks:begin -->", "<!-- benchmarks:end -->"
MEASURED_BY = "python -m benchmarks.ab all --model MODEL --json DIR"
SHOWN_BY = "python -m benchmarks.report DIR"


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
    return f"{times(spread.low)} to {times(spread.high)}"


def count(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}"


def ratio_cell(spread: Spread | None) -> str:
    if spread is None:
        return ""
    text, note, verdict = times(spread.ratio), span(spread), spread.verdict
    if spread.ratio == spread.low == spread.high == 1:
        text, note = "equal", ""
    elif verdict is Verdict.UNKNOWN:
        note = "one round"
    elif verdict is Verdict.NO_DIFFERENCE:
        text, note = verdict.value, f"{text}, {note}"
    is_clear = verdict in (Verdict.BETTER, Verdict.WORSE)
    return _cell(f"**{text}**" if is_clear else text, note)


def _cell(text: str, note: str = "") -> str:
    return f"{text} ({note})" if note else text


def _both(one: Result, name: str, note: str = "") -> str:
    """Both arms' numbers."""
    stock, sgl = (count(one.arms[arm].get(name)) for arm in ARMS)
    return _cell(f"{stock or '?'} → {sgl or '?'}", note) if stock or sgl else ""


# -- the table of all workloads


def _computed(one: Result) -> str:
    # The bound is that of the prompts that stock was sent: the other arm may send different ones.
    unique = "" if one.different_prompts else f"at least {count(one.unique_prompt_tokens)}"
    return _both(one, "computed_prompt_tokens", unique)


def _score(one: Result) -> str:
    stock, sgl = (f"{one.score[arm]:.3f}" if arm in one.score else "?" for arm in ARMS)
    return f"{stock} → {sgl}" if one.score else ""


def _same_output(one: Result) -> str:
    if not one.same_compared:
        return ""
    equal = "all" if one.same_equal == one.same_compared else count(one.same_equal)
    return _cell(equal, f"of {count(one.same_compared)}")


COLUMNS: dict[str, Callable[[Result], str]] = {
    "workload": lambda one: _cell(*map(_markdown_text, (one.workload, one.variant))),
    "throughput": lambda one: ratio_cell(one.throughput),
    "latency, p50": lambda one: ratio_cell(one.spreads.get("latency_p50")),
    "first token, p99": lambda one: ratio_cell(one.spreads.get("ttft_p99")),
    "forward passes": lambda one: _both(one, "forward_passes"),
    "prompt tokens computed": _computed,
    "same output": _same_output,
    "score": _score,
}
"""By heading, what is said of a result, in Markdown."""


def _table(results: Sequence[Result]) -> str:
    """Columns that say nothing of any result are left out."""
    columns = {heading: [cell(one) for one in results] for heading, cell in COLUMNS.items()}
    shown = {heading: cells for heading, cells in columns.items() if any(cells)}
    alignments = ["---", *["---:"] * (len(shown) - 1)]
    lines = [[*shown], alignments, *zip(*shown.values(), strict=True)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


# -- Markdown


def markdown(results: Results, option: str = "") -> str:
    """The table, and the caption, which says how the table was made: with this option of the
    command."""
    return f"{_table(results.results)}\n\n{caption(results, option)}\n"


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
