"""What clients send is harmless in log lines and error messages."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import sgl_vllm
from sgl_vllm.protocol.quoting import quoted

PACKAGE = Path(sgl_vllm.__file__).parent


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("chatcmpl-5", "'chatcmpl-5'"),
        ("a\nERROR forged", r"'a\nERROR forged'"),
        ("\x1b[2J\u2028\ud800", r"'\x1b[2J\u2028\ud800'"),
        ("it's", '"it\'s"'),
        ("x" * 1_000_000, f"'{'x' * 100}'..."),
    ],
)
def test_a_text_is_shown_on_one_short_line(text: str, shown: str) -> None:
    assert quoted(text) == shown


def raw_ids_in_logs(tree: ast.AST) -> Iterator[ast.expr]:
    """The arguments of log calls that are ids of requests, and not quoted."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            logger = node.func.value
            name = getattr(logger, "id", getattr(logger, "attr", ""))
            if name.strip("_") == "logger":
                yield from (one for one in node.args if _is_id(one))


def _is_id(argument: ast.expr) -> bool:
    name = getattr(argument, "attr", getattr(argument, "id", ""))
    return name in ("request_id", "external_req_id")


def test_a_raw_id_in_a_log_is_found() -> None:
    code = "logger.info('%s', request.request_id)\nself._logger.info('%s', quoted(request_id))"
    assert [ast.unparse(one) for one in raw_ids_in_logs(ast.parse(code))] == ["request.request_id"]


def test_no_log_shows_an_id_as_its_client_wrote_it() -> None:
    texts = {path: path.read_text() for path in PACKAGE.rglob("*.py")}
    with_logs = {path: ast.parse(text) for path, text in texts.items() if "logger" in text}
    assert [path for path, tree in with_logs.items() if [*raw_ids_in_logs(tree)]] == []
