"""The page of a report: one file with everything in it, which loads nothing.

Owns what stands where. The form is `page.html`; what comes from result files, texts of models among
it, is escaped there. The one script, `sort.js`, is named by its hash in the page's policy, so that
the browser runs no other.
"""

from __future__ import annotations

import base64
import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from benchmarks.report import plots, tables
from benchmarks.report.loading import Result, Results, Verdict
from benchmarks.report.plots import Plot
from benchmarks.report.tables import Table, count, percent

VERDICTS = (
    (Verdict.BETTER, "faster with the plugin"),
    (Verdict.NO_DIFFERENCE, "no difference"),
    (Verdict.WORSE, "slower with the plugin"),
    (Verdict.UNKNOWN, "of one round, so not judged"),
)


@dataclass(frozen=True)
class Section:
    """One workload's part of the page."""

    result: Result
    facts: tuple[str, ...]
    figures: Table
    ablations: Plot | None


@dataclass(frozen=True)
class Regression:
    """One of the shown results with ratios below 1 that its rounds bear out, by their headings."""

    number: int
    label: str
    ratios: Mapping[str, str]


def page(results: Results, home: str | None = None) -> str:
    """The whole document.

    Args:
        home: address of the documentation that the page is part of, for a link to it.
    """
    shown = results.results
    table = tables.full_table(shown) if shown else None
    script = (Path(__file__).parent / "sort.js").read_text(encoding="utf-8")
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html").render(
        home=home,
        script=script,
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        summary=_summary(shown),
        regressions=tuple(_regressions(shown, table)) if table else (),
        provenance=tables.provenance(results),
        table=table,
        plots=plots.overview(shown) if shown else (),
        sections=[
            Section(one, limits_of(one), tables.figures_table(one), plots.ablations(one))
            for one in shown
        ],
    )


def limits_of(one: Result) -> tuple[str, ...]:
    """What bounds any server on the workload, and how near to it both are, in sentences."""
    limits = one.limits
    said = [
        f"{count(limits.unique_prompt_tokens)} of {count(limits.prompt_tokens)} prompt tokens must "
        f"be computed, so that at best {percent(limits.best_hit_rate)} come from a cache."
    ]
    if one.different_prompts:
        said.append(
            "The two arms ask in different ways, with prompts of different lengths: their hit "
            "rates cannot be compared, the tokens that they compute can."
        )
    said.append(
        f"{count(limits.output_tokens)} output tokens, {count(limits.undecided_tokens)} of which "
        "no grammar forces."
    )
    bound = {
        None: "",
        True: ": bound by compute, so that a further one costs as much again",
        False: ": not bound by compute, so that a further one costs next to nothing",
    }[limits.compute_bound]
    noun = "request" if limits.sequences_at_once == 1 else "requests"
    said.append(f"Up to {count(limits.sequences_at_once)} {noun} at once{bound}.")
    return tuple(said)


def _summary(results: Sequence[Result]) -> tuple[tuple[int, str, str], ...]:
    """How many workloads came out how: number, words, verdict."""
    times = Counter(one.throughput.verdict for one in results)
    return tuple((times[one], words, one.value) for one, words in VERDICTS if times[one])


def _regressions(results: Sequence[Result], table: Table) -> Iterator[Regression]:
    """All that the table of all workloads calls worse."""
    for number, (one, row) in enumerate(zip(results, table.rows, strict=True), start=1):
        cells = zip(table.headings, row, strict=True)
        if worse := {head: cell.text for head, cell in cells if cell.tone == Verdict.WORSE}:
            yield Regression(number, one.label, worse)
