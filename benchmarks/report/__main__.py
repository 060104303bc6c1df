"""Shows results of benchmarks.ab as a page, as a table, and in the README.

    python -m benchmarks.ab all --json results
    python -m benchmarks.report results --html report.html
    python -m benchmarks.report results --readme README.md

Owns the command. Nothing is written unless everything that was asked for can be made.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.report import loading, page, tables
from benchmarks.report.loading import ReportError


def main(argv: Sequence[str] | None = None) -> int:
    """The command: 0, or 1 with a line on stderr if the report could not be made."""
    arguments = _parser().parse_args(argv)
    try:
        results = loading.load(arguments.results)
        for file, text in _outputs(arguments, results).items():
            file.write_text(text, encoding="utf-8")
    except (ValueError, OSError) as error:
        print(f"benchmarks.report: {error}", file=sys.stderr)
        return 1
    for file in results.skipped:
        print(f"skipped: {file} is no result of benchmarks.ab", file=sys.stderr)
    if not (arguments.html or arguments.readme):
        print(tables.markdown(results), end="")
    return 0


def _outputs(arguments: argparse.Namespace, results: loading.Results) -> dict[Path, str]:
    """What is to be in which file; the page last."""
    outputs: dict[Path, str] = {}
    if arguments.readme:
        text = arguments.readme.read_text(encoding="utf-8")
        try:
            table = tables.markdown(results, f"--readme {_from_here(arguments.readme)}")
            outputs[arguments.readme] = tables.into_readme(text, table)
        except ReportError as error:
            raise ReportError(f"{arguments.readme}: {error}") from error
    if arguments.html:
        outputs[arguments.html] = page.page(results)
    return outputs


def _from_here(path: Path) -> Path:
    """The path as it may be published: relative to the current folder, or the name alone."""
    here, path = Path.cwd(), path.resolve()
    return path.relative_to(here) if path.is_relative_to(here) else Path(path.name)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.report",
        description=__doc__.partition("\n\nOwns")[0] if __doc__ else None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Without --html and --readme the table is printed, as Markdown.",
    )
    parser.add_argument(
        "results",
        nargs="+",
        type=Path,
        metavar="FOLDER_OR_FILE",
        help="JSON of benchmarks.ab; of a folder, all *.json",
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="the page, with plots")
    parser.add_argument(
        "--readme",
        type=Path,
        metavar="FILE",
        help=f"put the table between {tables.BEGIN} and {tables.END}",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
