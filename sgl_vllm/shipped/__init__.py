"""Files of the repository that the wheel carries beside the code: benchmarks, examples, deployment.

Owns where they are: in this folder of an installed wheel (pyproject.toml maps them here), at the
root of a checkout. Does not own what is done with them (`commands/bench.py`,
`commands/examples.py`).
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

_HERE = Path(__file__).parent

_COMMENT = re.compile(r'^# (.+)|^ +"# (.+?)\\n"|"description": "(.+?)"', re.MULTILINE)
"""A comment at the beginning of a line, the heading of a notebook, or a value in JSON."""


def folder() -> Path:
    """The folder with `benchmarks/`, `deploy/` and `examples/`."""
    return _HERE if (_HERE / "examples").is_dir() else _HERE.parents[1]


def summary_of(file: Path) -> str:
    """The first line of a Python file's docstring; for other files, the first sentence of their
    comment, heading or description."""
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".py":
        return (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
    found = _COMMENT.search(text)
    sentence = str(found[found.lastindex or 0]) if found else ""
    return sentence.partition(". ")[0].rstrip(".:") + "."
