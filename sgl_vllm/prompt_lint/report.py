"""A lint report as text for a terminal, as JSON, and as a page.

Owns the wording. Prompts are untrusted: the text report prints what is safe to print, and the
page's template escapes all of it and has no script.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any  # Any: JSON

from sgl_vllm.commands.terminal import printable
from sgl_vllm.pages import rendered
from sgl_vllm.prompt_lint.lint import Finding, LintReport
from sgl_vllm.prompt_lint.prompts import Prompt

EXCERPT_CHARACTERS = 72


def as_json(report: LintReport) -> dict[str, Any]:
    """`prompt_tokens`, `computed_tokens` now and after all repairs, and one entry per finding."""
    return {
        "num_requests": len(report.now.num_tokens),
        "prompt_tokens": report.now.total,
        "computed_tokens": report.now.computed,
        "computed_tokens_repaired": report.repaired.computed,
        "findings": [
            {
                "place": finding.fault.place,
                "what": finding.fault.what,
                "advice": finding.fault.advice,
                "num_requests": finding.num_requests,
                "num_affected": finding.num_affected,
                "position": finding.position,
                "saved_tokens": finding.cost,
                "saved_tokens_alone": finding.saved_alone,
                "example_request": finding.example + 1,
            }
            for finding in report.findings
        ],
    }


def as_text(report: LintReport, unit: str = "tokens") -> str:
    """Lines for a terminal. `unit` names what was counted."""
    lines = [_summary(report, unit)]
    for number, finding in enumerate(report.findings, start=1):
        lines += [
            "",
            f"{number}. {printable(finding.fault.what)}.",
            f"   {_cost(finding, report, unit)}",
            f"   {finding.fault.advice}. ({_where(finding)})",
        ]
    return "\n".join(lines)


def _summary(report: LintReport, unit: str) -> str:
    outlook = (
        f"{_share(report.repaired.computed, report.now.total)} without the faults below."
        if report.findings
        else "No faults found."
    )
    return (
        f"{len(report.now.num_tokens):,} requests, {report.now.total:,} prompt {unit}. "
        f"{_share(report.now.computed, report.now.total)} have to be computed. {outlook}"
    )


def _cost(finding: Finding, report: LintReport, unit: str) -> str:
    per_request = finding.cost / max(finding.num_affected, 1)
    alone = (
        ""
        if finding.saved_alone == finding.saved_last
        else f", {finding.saved_alone:,} if nothing else is repaired"
    )
    return (
        f"From {unit[:-1]} {finding.position:,} on, it keeps {per_request:,.0f} {unit} of "
        f"{finding.num_affected:,} of {finding.num_requests:,} requests from being shared: "
        f"{finding.cost:,} {unit}, {_share(finding.cost, report.now.total)} of all{alone}."
    )


def _where(finding: Finding) -> str:
    return f"{printable(finding.fault.place)}, for example in request {finding.example + 1:,}"


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole else "0%"


# -- the page --------------------------------------------------------------------------------------

MEANINGS = {
    "cached": "read from the cache",
    "lost": "computed because of a fault",
    "new": "computed in any case",
}


def as_page(report: LintReport, prompts: Sequence[Prompt], unit: str = "tokens") -> str:
    """A page with a bar for all prompts, and for each finding a bar of one prompt that has it."""
    lost = report.now.computed - report.repaired.computed
    return rendered(
        "lint.html",
        meanings=MEANINGS,
        unit=unit,
        summary=_summary(report, unit),
        whole=_pieces(report.now.cached, lost, report.now.total),
        cards=[
            {
                "what": finding.fault.what,
                "pieces": _pieces_of_example(finding, report),
                "cost": _cost(finding, report, unit),
                "advice": finding.fault.advice,
                "where": _where(finding),
                "excerpt": _excerpt(finding, prompts),
            }
            for finding in report.findings
        ],
    )


def _pieces_of_example(finding: Finding, report: LintReport) -> dict[str, int]:
    total = report.now.num_tokens[finding.example]
    before = min(finding.position, total)
    per_request = finding.cost // max(finding.num_affected, 1)
    return _pieces(before, min(per_request, total - before), total)


def _pieces(cached: int, lost: int, total: int) -> dict[str, int]:
    return {"cached": cached, "lost": lost, "new": total - cached - lost}


def _excerpt(finding: Finding, prompts: Sequence[Prompt]) -> str:
    """What the example has at the place of the fault."""
    prompt = prompts[finding.example]
    texts = [p.text for p in prompt.parts if p.place.startswith(finding.fault.place)]
    text = printable(texts[0] if texts else "".join(part.text for part in prompt.parts))
    return text if len(text) <= EXCERPT_CHARACTERS else text[:EXCERPT_CHARACTERS] + "…"
