"""Pages whose code is run: blocks of Markdown, and what they say that they print.

Owns the reading and the running of blocks. A block is a fence of ``python``; a fence of ``text``
right after it is what it prints. A comment ``<!-- needs a.dotted.name -->`` before it leaves it
out where that name does not exist.
"""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sgl_vllm as sgl

_BLOCK = re.compile(
    r"(?:^<!-- needs (?P<needs>\S+) -->\n)?^```python\n(?P<code>.*?)^```$"
    r"(?:\n\n^```text\n(?P<printed>.*?)^```$)?",
    re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True)
class Block:
    """A block of code, the line its page has it at, and what it is to print if the page says."""

    line: int
    code: str
    printed: str | None
    needs: str | None

    @property
    def can_run(self) -> bool:
        found: Any = {"sgl": sgl}
        for i, name in enumerate(self.needs.split(".") if self.needs else ()):
            found = found.get(name) if i == 0 else getattr(found, name, None)
            if found is None:
                return False
        return True


def blocks_of(page: Path) -> Iterator[Block]:
    text = page.read_text()
    for match in _BLOCK.finditer(text):
        line = text.count("\n", 0, match.start("code"))
        yield Block(line, match["code"], match["printed"], match["needs"])


def printed_by(block: Block, namespace: dict[str, Any], file: Path) -> str:
    """What the block prints. Its code is written to `file` first: programs are read from there."""
    file.write_text(block.code)
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(compile(block.code, str(file), "exec"), namespace)
    return output.getvalue()
