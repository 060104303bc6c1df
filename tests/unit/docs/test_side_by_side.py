"""The programs in `docs/side_by_side`: how long each is, as the page states it."""

from __future__ import annotations

import ast
import io
import tokenize
from pathlib import Path

import pytest

import sgl_vllm

DOCS = Path(sgl_vllm.__file__).parent.parent / "docs"
FOLDER = DOCS / "side_by_side"
PROGRAMS = sorted(path.name.removesuffix("_sgl.py") for path in FOLDER.glob("*_sgl.py"))
NO_CODE = {
    getattr(tokenize, name)
    for name in ("COMMENT", "NL", "NEWLINE", "INDENT", "DEDENT", "ENCODING", "ENDMARKER")
}


def num_code_lines(source: str) -> int:
    """Lines that hold code: no blank line, no comment, no docstring."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            first = node.body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                lines -= set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return len(lines)


def lengths(program: str) -> tuple[int, int]:
    raw, ours = (
        num_code_lines((FOLDER / f"{program}_{how}.py").read_text()) for how in ("openai", "sgl")
    )
    return raw, ours


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_page_states_the_lengths_and_raw_calls_are_twice_as_long(program: str) -> None:
    raw, ours = lengths(program)
    page = (DOCS / "moving.md").read_text().splitlines()
    (row,) = [line for line in page if f"{program}_sgl.py" in line]
    assert row.endswith(f"| {raw} | {ours} | {raw / ours:.1f} |")
    assert raw >= 2 * ours and len(PROGRAMS) == 3
