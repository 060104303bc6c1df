"""Writes the table of metrics in docs/operations.md from the counters that the parts declare.

Owns the form of the table. ``make counters`` runs it; a test fails while the page is out of date.

    python -m tools.counters [--check]
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from tools.generated import ROOT, GeneratedSection


def rows() -> Iterator[tuple[str, str, str, str, str]]:
    """Metric, type, unit, key in `/v1/sgl/stats`, and meaning of every declared number."""
    from sgl_vllm.counters import Kind
    from sgl_vllm.scheduler.stats import declared_counters

    yield (
        "`part_on{part}`",
        "gauge",
        "0 or 1",
        "`parts`",
        "Whether a part is on. `parts` has the reason if it is off.",
    )
    sums: dict[str | None, str] = {}
    counters = list(declared_counters())
    for section, declared in counters:
        if declared.kind is Kind.TIMER_SUM:
            sums[declared.metric] = _key(section, declared.key)
    for section, declared in counters:
        if declared.kind in (Kind.TIMER_SUM, Kind.INFO):
            continue
        key = _key(section, declared.key)
        if declared.kind is Kind.TIMER_COUNT:
            key += f", {sums[declared.metric]}"
        labels = ",".join(f'{name}="{value}"' for name, value in declared.labels)
        metric = f"`{declared.metric}{{{labels}}}`" if labels else f"`{declared.metric}`"
        shown = metric if declared.metric else "only in the stats"
        yield shown, declared.kind.metric_type, declared.unit, key, declared.help


def _key(section: str, key: str) -> str:
    return f"`{section}.{key}`" if section else f"`{key}`"


def table_lines() -> Iterator[str]:
    """The table in Markdown."""
    yield ""
    yield "| metric | type | unit | key in the stats | meaning |"
    yield "|---|---|---|---|---|"
    for row in rows():
        yield f"| {' | '.join(row)} |"


SECTION = GeneratedSection(
    page=ROOT / "docs" / "operations.md",
    command="make counters",
    source="the counters in sgl_vllm",
    lines=table_lines,
)

if __name__ == "__main__":
    sys.exit(SECTION.main())
