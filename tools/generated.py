"""A part of a page, or a whole file, that is written from declarations in the code or from records.

Owns the markers between which a part stands, how it is put into its page, and the command that
writes or checks it. The text around it is written by hand.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class GeneratedSection:
    """One such part.

    Attributes:
        page: the file that it is in.
        command: what writes it, such as "make options".
        source: what it is written from, for the marker.
        lines: its lines of Markdown, as the code declares them now.
    """

    page: Path
    command: str
    source: str
    lines: Callable[[], Iterator[str]]

    @property
    def begin(self) -> str:
        return f"<!-- Written by `{self.command}` from {self.source}: do not edit. -->"

    @property
    def end(self) -> str:
        return f"<!-- End of what `{self.command}` writes. -->"

    def written_into(self, page: str) -> str:
        """The text of the page with this part written anew."""
        head, _, rest = page.partition(self.begin)
        _, _, tail = rest.partition(self.end)
        return "\n".join([f"{head}{self.begin}", *self.lines(), "", f"{self.end}{tail}"])

    def main(self) -> int:
        """As `main_writing`."""
        return main_writing(
            self.command, lambda: {self.page: self.written_into(self.page.read_text())}
        )


def main_writing(command: str, texts: Callable[[], Mapping[Path, str]]) -> int:
    """Write the files, or with ``--check`` only compare. The exit status is 1 if one differs."""
    parser = argparse.ArgumentParser(description=f"Does what `{command}` does.")
    parser.add_argument("--check", action="store_true", help="only check that it is up to date")
    check = parser.parse_args().check
    return max(write_or_check(path, text, command, check=check) for path, text in texts().items())


def write_or_check(path: Path, text: str, command: str, *, check: bool) -> int:
    """Write the file, or only compare. The exit status is 1, with a message, if it differs."""
    if not check:
        path.write_text(text)
    elif not path.is_file() or path.read_text() != text:
        print(f"{path.relative_to(ROOT)} is out of date: run `{command}`", file=sys.stderr)
        return 1
    return 0
