"""Writes the tables of docs/options.md from the declarations in sgl_vllm/config.py.

Owns the form of the tables and the markers between which they stand. The text around them is
written by hand. ``make options`` runs it; a test fails while the page is out of date.

    python tools/options.py [--check]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "options.md"
BEGIN = "<!-- Written by `make options` from sgl_vllm/config.py: do not edit. -->"
END = "<!-- End of what `make options` writes. -->"


def table_lines() -> Iterator[str]:
    """The tables, a heading and a table per part, in Markdown."""
    from sgl_vllm.config import OptionInfo, by_heading, default_text

    for heading, fields in by_heading():
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
            if info.old_name:
                text += f" Was called `{info.old_name}`, which still works in this version."
            if info.page:
                text += f" [More]({info.page})"
            yield f"| `{field.name}` | `{default_text(field)}` | {text} |"


def page_text(page: str) -> str:
    """The page with its tables written anew."""
    head, _, rest = page.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return "\n".join([f"{head}{BEGIN}", *table_lines(), "", f"{END}{tail}"])


def main() -> int:
    sys.path.insert(0, str(ROOT))
    parser = argparse.ArgumentParser(description="Write the tables of docs/options.md.")
    parser.add_argument("--check", action="store_true", help="only check that they are up to date")
    before = PAGE.read_text()
    after = page_text(before)
    if not parser.parse_args().check:
        PAGE.write_text(after)
        return 0
    if before != after:
        print("docs/options.md is out of date: run `make options`", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
