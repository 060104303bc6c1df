"""Writes the table of metrics in docs/operations.md from the counters that the parts declare.

Owns the form of the table and the markers between which it stands. The text around it is written by
hand. ``make counters`` runs it; a test fails while the page is out of date.

    python tools/counters.py [--check]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "operations.md"
BEGIN = "<!-- Written by `make counters` from the counters in sgl_vllm: do not edit. -->"
END = "<!-- End of what `make counters` writes. -->"


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
        if declared.old_metric:
            help = f"Deprecated: use {metric}. Removed in the next version."
            yield f"`{declared.old_metric}`", declared.kind, declared.unit, key, help


def _key(section: str, key: str) -> str:
    return f"`{section}.{key}`" if section else f"`{key}`"


def table_lines() -> Iterator[str]:
    """The table in Markdown."""
    yield "| metric | type | unit | key in the stats | meaning |"
    yield "|---|---|---|---|---|"
    for row in rows():
        yield f"| {' | '.join(row)} |"


def page_text(page: str) -> str:
    """The page with its table written anew."""
    head, _, rest = page.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return "\n".join([f"{head}{BEGIN}\n", *table_lines(), "", f"{END}{tail}"])


def main() -> int:
    sys.path.insert(0, str(ROOT))
    parser = argparse.ArgumentParser(description="Write the table of metrics in docs/operations.md")
    parser.add_argument("--check", action="store_true", help="only check that it is up to date")
    before = PAGE.read_text()
    after = page_text(before)
    if not parser.parse_args().check:
        PAGE.write_text(after)
        return 0
    if before != after:
        print("docs/operations.md is out of date: run `make counters`", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
