"""Files of the repository that the wheel carries beside the code: benchmarks, examples, deployment.

Owns where they are: in this folder of an installed wheel (pyproject.toml maps them here), at the
root of a checkout. Does not own what is done with them (`commands/bench.py`,
`commands/examples.py`).
"""

from __future__ import annotations

import ast
from pathlib import Path

_HERE = Path(__file__).parent


def folder() -> Path:
    """The folder with `benchmarks/`, `deploy/` and `examples/`."""
    return _HERE if (_HERE / "examples").is_dir() else _HERE.parents[1]


def summary_of(file: Path) -> str:
    """The first line of a Python file's docstring; empty for other files."""
    if file.suffix != ".py":
        return ""
    docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return docstring.partition("\n")[0]
