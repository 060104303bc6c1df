"""Pages whose code is run: blocks of Markdown with what they say that they print, and notebooks.

Owns the reading and the running of blocks and cells. A block is a fence of ``python``; a fence of
``text`` right after it is what it prints.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import io
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_BLOCK = re.compile(
    r"^```python\n(?P<code>.*?)^```$"
    r"(?:\n\n^```text\n(?P<printed>.*?)^```$)?",
    re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True)
class Block:
    """A block of code, the line its page has it at, and what it is to print if the page says."""

    line: int
    code: str
    printed: str | None


def blocks_of(page: Path) -> Iterator[Block]:
    text = page.read_text()
    for match in _BLOCK.finditer(text):
        line = text.count("\n", 0, match.start("code"))
        yield Block(line, match["code"], match["printed"])


def printed_by(block: Block, namespace: dict[str, Any], file: Path) -> str:
    """What the block prints. Its code is written to `file` first: programs are read from there."""
    file.write_text(block.code)
    code = compile(block.code, str(file), "exec", dont_inherit=True)  # not our __future__ imports
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(code, namespace)
    return output.getvalue()


def cells_of(notebook: Path) -> list[str]:
    """The code of a notebook's cells, in order."""
    cells = json.loads(notebook.read_text())["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


async def shown_by(cell: str, namespace: dict[str, Any]) -> str:
    """What a notebook shows for the cell: what it prints, and the value of its last line.

    As there, an event loop runs, and a cell may await. A value is shown as HTML if it can be.
    """
    output = io.StringIO()
    value = None
    with contextlib.redirect_stdout(output):
        *statements, last = ast.parse(cell).body
        parts: list[ast.Module | ast.Expression] = [ast.Module(statements, [])]
        is_value = isinstance(last, ast.Expr)
        parts.append(
            ast.Expression(last.value) if isinstance(last, ast.Expr) else ast.Module([last], [])
        )
        for part in parts:
            mode = "eval" if isinstance(part, ast.Expression) else "exec"
            code = compile(part, "<cell>", mode, flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            value = eval(code, namespace)
            if inspect.iscoroutine(value):
                value = await value
    if is_value and value is not None:
        as_html = getattr(value, "_repr_html_", None)
        output.write(as_html() if as_html else repr(value))
    return output.getvalue()
