"""Draws docs/demo.svg: a terminal with what `sgl-vllm demo` printed in the run of docs/demo.json.

Owns the recorded run, and which of the printed sections are shown. Does not own the text: the
command's own functions print the run. ``make pictures`` draws it again; ``--run`` first runs the
demo on this machine, which takes a minute or two, and records it.

    python -m tools.recording [--check | --run]
"""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Sequence

from pydantic import TypeAdapter
from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

from sgl_vllm.commands import demo
from sgl_vllm.commands.demo import Comparison
from sgl_vllm.server_process import sigterm_as_interrupt
from tools.generated import ROOT, write_or_check

RUN = ROOT / "docs" / "demo.json"
PICTURE = ROOT / "docs" / "demo.svg"
COMMAND = "$ sgl-vllm demo"
_COLUMNS = 84
_RUN_TYPE = TypeAdapter(Comparison)
_RULE = "─"
# rich's format loads a font from elsewhere, which a picture may not.
_FORMAT = (ROOT / "tools" / "terminal.svg").read_text()
# Readable on the background, also where rich dims the text.
_COLORS = "191d24 ff7a70 4ac882 f0a03c 82aaff c99bff 2cc5b5 e8eaee"
_NORMAL = [(red, green, blue) for red, green, blue in map(bytes.fromhex, _COLORS.split())]
_THEME = TerminalTheme(background=_NORMAL[0], foreground=_NORMAL[-1], normal=_NORMAL)


def recorded() -> Comparison:
    return _RUN_TYPE.validate_json(RUN.read_bytes())


def record() -> None:
    """Runs the demo, which prints what it does, and replaces the recorded run."""
    with sigterm_as_interrupt():
        run = demo.compare(Console(stderr=True), as_json=False)
    RUN.write_bytes(_RUN_TYPE.dump_json(run, indent=1) + b"\n")


def _terminal() -> Console:
    return Console(width=_COLUMNS, record=True, file=io.StringIO(), force_terminal=True,
                   color_system="standard", highlight=False)  # fmt: skip


def printed(run: Comparison) -> list[Text]:
    """The lines that the demo prints in a terminal."""
    console = _terminal()
    demo.show(run, console)
    return list(Text.from_ansi(console.export_text(styles=True)).split("\n"))


def shown(lines: Sequence[Text]) -> list[Text]:
    """The command, the first section, how many lines are left out, and the last section."""
    rules = [number for number, line in enumerate(lines) if line.plain.startswith(_RULE)]
    end_of_first, last = rules[1], rules[-1]
    cut = Text(f"... {last - end_of_first} more lines ...", style="dim")
    return [Text(COMMAND), *lines[:end_of_first], cut, *lines[last:]]


def picture(run: Comparison) -> str:
    """The terminal as SVG. It is dark on light pages too, as terminals are."""
    console = _terminal()
    console.print(Text("\n").join(shown(printed(run))))
    return console.export_svg(title="sgl-vllm demo", theme=_THEME, code_format=_FORMAT)


def main() -> int:
    parser = argparse.ArgumentParser(description="Draw what the demo printed.")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--check", action="store_true", help="only check that it is up to date")
    how.add_argument("--run", action="store_true", help="run the demo, and record it")
    options = parser.parse_args()
    if options.run:
        record()
    return write_or_check(PICTURE, picture(recorded()), "make pictures", check=options.check)


if __name__ == "__main__":
    sys.exit(main())
