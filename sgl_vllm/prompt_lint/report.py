"""A lint report as text for a terminal, as JSON, and as a page.

Owns the wording and the page's style. Prompts are untrusted: the text report prints what is safe to
print, and the page escapes all of it and has no script.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from html import escape
from typing import Any  # Any: JSON

from sgl_vllm.commands.terminal import printable
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

PAGE = string.Template("""\
<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Prompt lint</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<style>
:root { color-scheme: light dark; --ink: #16191f; --soft: #5a6272; --line: #d9dde4; --page: #f4f5f7;
  --card: #fff; --cached: #0f766e; --lost: #c2410c; --new: #98a2b3; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8eaee; --soft: #9aa3b2; --line: #303744;
  --page: #101318; --card: #191d24; --cached: #2cc5b5; --lost: #f0803c; --new: #5c6675; } }
body { margin: 0 auto; max-width: 900px; padding: 24px 16px; background: var(--page);
  color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 22px; margin: 0 0 4px; } h2 { font-size: 16px; margin: 0 0 6px; }
p { margin: 6px 0; } .soft { color: var(--soft); }
section { background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  padding: 14px 16px; margin: 14px 0; }
.bar { display: flex; height: 22px; border-radius: 5px; overflow: hidden; margin: 6px 0;
  background: var(--line); }
.bar i { display: block; } .cached { background: var(--cached); } .new { background: var(--new); }
.lost { background: repeating-linear-gradient(135deg, var(--lost) 0 7px, transparent 7px 9px),
  var(--lost); }
.legend { display: flex; flex-wrap: wrap; gap: 4px 18px; } .legend i { display: inline-block;
  width: 12px; height: 12px; border-radius: 3px; margin-right: 6px; vertical-align: -1px; }
code { overflow-wrap: anywhere; }
</style></head><body>
<h1>Prompt lint</h1>
<p class="soft">$summary</p>
<section><h2>All requests</h2>
$bars
<p class="legend soft"><span><i class="cached"></i>read from the cache</span>
<span><i class="lost"></i>computed because of a fault</span>
<span><i class="new"></i>computed in any case</span></p></section>
$findings
</body></html>
""")


def as_page(report: LintReport, prompts: Sequence[Prompt], unit: str = "tokens") -> str:
    """A page with a bar for all prompts, and for each finding a bar of one prompt that has it."""
    total = report.now.total
    lost = report.now.computed - report.repaired.computed
    needed = total - report.now.cached - lost
    return PAGE.substitute(
        summary=escape(_summary(report, unit)),
        bars=_bar([("cached", report.now.cached), ("lost", lost), ("new", needed)], total, unit),
        findings="\n".join(_card(finding, report, prompts, unit) for finding in report.findings),
    )


def _card(finding: Finding, report: LintReport, prompts: Sequence[Prompt], unit: str) -> str:
    total = report.now.num_tokens[finding.example]
    per_request = finding.cost // max(finding.num_affected, 1)
    before = min(finding.position, total)
    lost = min(per_request, total - before)
    bar = _bar([("cached", before), ("lost", lost), ("new", total - before - lost)], total, unit)
    return (
        f"<section><h2>{escape(finding.fault.what)}</h2>{bar}"
        f"<p>{escape(_cost(finding, report, unit))}</p>"
        f"<p><b>{escape(finding.fault.advice)}.</b></p>"
        f'<p class="soft">{escape(_where(finding))}: '
        f"<code>{escape(_excerpt(finding, prompts))}</code></p></section>"
    )


def _bar(pieces: Sequence[tuple[str, int]], total: int, unit: str) -> str:
    label = f"{unit}: " + ", ".join(f"{count:,} {MEANINGS[name]}" for name, count in pieces)
    shares = "".join(
        f'<i class="{name}" style="width: {100 * count / total:.2f}%"></i>'
        for name, count in pieces
        if total
    )
    return f'<div class="bar" role="img" aria-label="{label}" title="{label}">{shares}</div>'


MEANINGS = {
    "cached": "read from the cache",
    "lost": "computed because of a fault",
    "new": "computed in any case",
}


def _excerpt(finding: Finding, prompts: Sequence[Prompt]) -> str:
    """What the example has at the place of the fault."""
    prompt = prompts[finding.example]
    texts = [p.text for p in prompt.parts if p.place.startswith(finding.fault.place)]
    text = printable(texts[0] if texts else "".join(part.text for part in prompt.parts))
    return text if len(text) <= EXCERPT_CHARACTERS else text[:EXCERPT_CHARACTERS] + "…"
