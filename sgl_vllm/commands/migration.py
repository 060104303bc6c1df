"""Rewrites a program written for SGLang's language, and leaves everything else as it is.

Owns the rules. Each finds expressions in the syntax tree and replaces their text, so that comments
and layout stay.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

OLD, NEW = "sglang", "sgl_vllm.sglang"
SGLANG_PORT, VLLM_PORT = 30000, 8000


@dataclass(frozen=True)
class Edit:
    """Replaces the bytes ``[start, end)`` of a file."""

    start: int
    end: int
    text: str


@dataclass(frozen=True)
class Migrated:
    """A program's new text, and what is left to do by hand, each with its line."""

    text: str
    remarks: tuple[str, ...]


def migrate(text: str) -> Migrated:
    """The program for `sgl_vllm.sglang`. SyntaxError if it is not Python."""
    source = _Source(text)
    tree = ast.parse(text)
    edits: list[Edit] = []
    remarks: list[str] = []
    for node in ast.walk(tree):
        match node:
            case ast.Import() | ast.ImportFrom():
                edits += _import_edits(source, node)
                remarks += _missing(node)
            case ast.Call() if _name_of(node.func) == "RuntimeEndpoint":
                edits += _endpoint_edits(source, node)
            case ast.Subscript(ast.Attribute(backend, "model_info"), ast.Constant("model_path")):
                edits.append(source.replaced(node, f"{source.text_of(backend)}.get_model_name()"))
    return Migrated(source.edited(edits), tuple(remarks))


class _Source:
    """A file's text, by the positions of a syntax tree, which count bytes."""

    def __init__(self, text: str) -> None:
        self._data = text.encode()
        self._line_starts = [0]
        for line in self._data.splitlines(keepends=True):
            self._line_starts.append(self._line_starts[-1] + len(line))

    def start(self, node: ast.expr | ast.stmt | ast.alias | ast.keyword) -> int:
        return self._line_starts[node.lineno - 1] + node.col_offset

    def end(self, node: ast.expr | ast.stmt | ast.alias | ast.keyword) -> int:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return self._line_starts[node.end_lineno - 1] + node.end_col_offset

    def text_of(self, node: ast.expr | ast.stmt | ast.alias | ast.keyword) -> str:
        return self._data[self.start(node) : self.end(node)].decode()

    def replaced(self, node: ast.expr | ast.stmt | ast.alias | ast.keyword, text: str) -> Edit:
        return Edit(self.start(node), self.end(node), text)

    def edited(self, edits: list[Edit]) -> str:
        data = self._data
        for edit in sorted(edits, key=lambda edit: -edit.start):
            data = data[: edit.start] + edit.text.encode() + data[edit.end :]
        return data.decode()


def _is_sglangs(module: str | None) -> bool:
    return module is not None and (module == OLD or module.startswith(f"{OLD}."))


def _import_edits(source: _Source, node: ast.Import | ast.ImportFrom) -> Iterator[Edit]:
    if isinstance(node, ast.ImportFrom):
        if node.level == 0 and _is_sglangs(node.module):
            text = source.text_of(node)
            yield source.replaced(node, re.sub(rf"(from\s+){OLD}\b", rf"\1{NEW}", text, count=1))
        return
    for alias in node.names:
        if not _is_sglangs(alias.name):
            continue
        module = NEW + alias.name.removeprefix(OLD)
        if alias.asname is not None:
            yield source.replaced(alias, f"{module} as {alias.asname}")
        elif alias.name == OLD:
            yield source.replaced(alias, f"{NEW} as {OLD}")
        else:  # binds the name sglang, too
            yield source.replaced(alias, f"{module}, {NEW} as {OLD}")


def _missing(node: ast.Import | ast.ImportFrom) -> Iterator[str]:
    """What `sgl_vllm.sglang` does not have of an import."""
    names: list[str] = []
    if isinstance(node, ast.Import):
        modules = [alias.name for alias in node.names]
    else:
        modules = [node.module or ""] if node.level == 0 else []
        names = [alias.name for alias in node.names if alias.name != "*"]
    for module in filter(_is_sglangs, modules):
        for lacking in _lacking(module, names):
            yield f"line {node.lineno}: replace what {lacking} is for: it is not in {NEW}"


def _lacking(module: str, names: Sequence[str]) -> Iterator[str]:
    """`module` if it has no counterpart, else those of its `names` that have none."""
    counterpart = NEW + module.removeprefix(OLD)
    if not _exists(counterpart):
        yield module
        return
    found = importlib.import_module(counterpart)
    for name in names:
        if not hasattr(found, name) and not _exists(f"{counterpart}.{name}"):
            yield f"{module}.{name}"


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _name_of(function: ast.expr) -> str | None:
    match function:
        case ast.Name(name) | ast.Attribute(_, name):
            return name
    return None


def _endpoint_edits(source: _Source, call: ast.Call) -> Iterator[Edit]:
    """vLLM's port in the place of SGLang's, and no chat template: the server has its own."""
    for argument in (*call.args, *(keyword.value for keyword in call.keywords)):
        text = source.text_of(argument)
        if isinstance(argument, ast.Constant | ast.JoinedStr) and f":{SGLANG_PORT}" in text:
            port = re.sub(rf":{SGLANG_PORT}\b", f":{VLLM_PORT}", text)
            yield source.replaced(argument, port)
    given: list[ast.expr | ast.keyword] = [*call.args, *call.keywords]
    for before, keyword in itertools.pairwise(given):
        if isinstance(keyword, ast.keyword) and keyword.arg == "chat_template_name":
            yield Edit(source.end(before), source.end(keyword), "")
