"""Shows results of benchmarks.ab as a table, also in a page of the docs.

    python -m benchmarks.ab all --json results
    python -m benchmarks.report results
    python -m benchmarks.report results --readme README.md

Owns the command. Nothing is written unless everything that was asked for can be made.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.report import loading, tables


def main(argv: Sequence[str] | None = None) -> int:
    """The command: 0, or 1 with a line on stderr if the report could not be made."""
    arguments = _parser().parse_args(argv)
    page: Path | None = arguments.readme
    try:
        results = loading.load(arguments.results)
        if page is None:
            print(tables.markdown(results), end="")
        else:
            table = tables.markdown(results, f"--readme {_from_here(page)}")
            text = tables.into_readme(page.read_text(encoding="utf-8"), table)
            page.write_text(text, encoding="utf-8")
    except (ValueError, OSError) as error:
        print(f"benchmarks.report: {error}", file=sys.stderr)
        return 1
    for file in results.skipped:
        print(f"skipped: {file} is no result of benchmarks.ab", file=sys.stderr)
    return 0


def _from_here(path: Path) -> Path:
    """The path as it may be published: relative to the current folder, or the name alone."""
    here, path = Path.cwd(), path.resolve()
    return path.relative_to(here) if path.is_relative_to(here) else Path(path.name)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.report",
        description=__doc__.partition("\n\nOwns")[0] if __doc__ else None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Without --readme the table is printed, as Markdown.",
    )
    parser.add_argument(
        "results",
        nargs="+",
        type=Path,
        metavar="FOLDER_OR_FILE",
        help="JSON of benchmarks.ab; of a folder, all *.json",
    )
    parser.add_argument(
        "--readme",
        type=Path,
        metavar="FILE",
        help=f"put the table between {tables.BEGIN} and {tables.END}",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
