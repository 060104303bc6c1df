"""A lint report as text for a terminal, and as JSON. Prompts are untrusted."""

from __future__ import annotations

from typing import Any  # Any: JSON

from sgl_vllm.commands.terminal import printable
from sgl_vllm.prompt_lint.lint import Finding, LintReport


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
            f"   {finding.fault.advice}. ({printable(finding.fault.place)}, for example in request "
            f"{finding.example + 1:,})",
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
    return (
        f"From {unit[:-1]} {finding.position:,} on, it keeps {per_request:,.0f} {unit} of "
        f"{finding.num_affected:,} of {finding.num_requests:,} requests from being shared: "
        f"{finding.cost:,} {unit}, {_share(finding.cost, report.now.total)} of all."
    )


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole else "0%"
