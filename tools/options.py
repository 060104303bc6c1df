"""Writes the tables of docs/options.md from the declarations in sgl_vllm/config.py.

Owns the form of the tables. ``make options`` runs it; a test fails while the page is out of date.

    python -m tools.options [--check]
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from tools.generated import ROOT, GeneratedSection


def table_lines() -> Iterator[str]:
    """The tables, a heading and a table per part, in Markdown."""
    from sgl_vllm.config import by_heading
    from sgl_vllm.flags import default_text
    from sgl_vllm.option import OptionInfo

    for heading, fields in by_heading().items():
        yield f"\n## {heading}\n"
        yield "| option | default | |"
        yield "|---|---|---|"
        for field in fields:
            info = OptionInfo.of(field)
            text = info.help
            if info.choices is not None:
                named = (
                    f"`{name}`: {description}" if description else f"`{name}`"
                    for name, description in info.choices().items()
                )
                text += "<br>" + "<br>".join(named)
            if info.page:
                text += f" [More]({info.page})"
            yield f"| `{field.name}` | `{default_text(field)}` | {text} |"


SECTION = GeneratedSection(
    page=ROOT / "docs" / "options.md",
    command="make options",
    source="sgl_vllm/config.py",
    lines=table_lines,
)

if __name__ == "__main__":
    sys.exit(SECTION.main())
