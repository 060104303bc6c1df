"""What the package touches of vLLM, read from the stubs in `stubs/vllm`.

Owns the notation. mypy reads the same files for the types. Each class, function, attribute and
parameter of a stub is an entry: the installed vLLM must have it. A comment on its line limits that:

    class BlockPool:  # [radix]                        only the part `radix` needs it
    def free(self) -> None: ...  # [radix, select]     two parts need it
    limit: int | None = ...,  # since 0.33             vLLM has it from 0.33 on
    old_name: int  # [fsm] until 0.32                  both

A comment on the first line of a file holds for the file, one on a class for its members, unless
they have their own. Without any, every part needs the entry. A version says that our code works
without the entry on other versions. Functions list their parameters up to the last that we use.
"""

from __future__ import annotations

import ast
import enum
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from sgl_vllm.vllm_api.signatures import Parameter, Signature, signature_of
from sgl_vllm.vllm_api.vllm_source import UNKNOWN_RELEASE

STUBS = Path(__file__).with_name("stubs")

_NOTE = re.compile(
    r"#\s*(?:\[(?P<parts>[\w, ]+)\])?\s*(?:(?P<word>since|until) (?P<release>\d+\.\d+))?"
)
_LOOKS_LIKE_NOTE = re.compile(r"#\s*(?:\[|since \d|until \d).*")

Release = tuple[int, int]


class Kind(enum.Enum):
    CLASS = "class"
    FUNCTION = "function"
    ATTRIBUTE = "attribute"


@dataclass(frozen=True)
class Note:
    """What a comment says of the entry on its line. `parts` is None if it names none."""

    parts: frozenset[str] | None = None
    since: Release = (0, 0)
    until: Release = UNKNOWN_RELEASE

    def holds_for(self, release: Release) -> bool:
        return self.since <= release <= self.until


@dataclass(frozen=True, slots=True)
class Entry:
    """One thing of vLLM that we touch.

    Attributes:
        module: where it is imported from, such as `vllm.v1.request`.
        path: its name there, such as `Request.num_tokens`.
        parts: which parts need it; empty if all do.
        signature: of a function, without parameters that the release does not have.
        bases: of a class, the names of its bases in the stub.
        is_abstract: of a method, whether subclasses have to define it.
        where: file and line of the stub.
    """

    module: str
    path: str
    kind: Kind
    parts: frozenset[str]
    note: Note
    where: str
    signature: Signature | None = None
    bases: tuple[str, ...] = ()
    is_abstract: bool = False
    notes_of_parameters: tuple[tuple[str, Note], ...] = ()

    @property
    def owner(self) -> str:
        """The class that has it; empty at the top level of a module."""
        return self.path.rpartition(".")[0]

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]

    def for_release(self, release: Release) -> Entry | None:
        """The entry as that vLLM has it; None if it need not have it."""
        if not self.note.holds_for(release):
            return None
        dropped = {name for name, note in self.notes_of_parameters if not note.holds_for(release)}
        if not dropped or self.signature is None:
            return self
        return replace(
            self,
            signature=replace(
                self.signature,
                positional=_without(dropped, self.signature.positional),
                keyword_only=_without(dropped, self.signature.keyword_only),
            ),
        )


def read_entries(folder: Path = STUBS) -> list[Entry]:
    """All entries. Takes about 40 ms.

    Raises:
        ValueError: a comment that looks like a note but is not one.
    """
    return [entry for path in sorted(folder.rglob("*.pyi")) for entry in _entries_of(path, folder)]


def module_of(path: Path, folder: Path) -> str:
    parts = list(path.relative_to(folder).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _entries_of(path: Path, folder: Path) -> Iterator[Entry]:
    text = path.read_text()
    if not text:
        return
    notes = _notes(text, path.relative_to(folder))
    first = next(iter(text.splitlines())).lstrip()
    of_file = notes.get(1, Note()) if first.startswith("#") else Note()
    module, where = module_of(path, folder), str(path.relative_to(folder))

    def entry(kind: Kind, node: ast.stmt, name: str, owner: str, parts: frozenset[str]) -> Entry:
        note = _note_on(notes, node)
        return Entry(
            module=module,
            path=f"{owner}.{name}" if owner else name,
            kind=kind,
            parts=parts if note.parts is None else note.parts,
            note=note,
            where=f"{where}:{node.lineno}",
        )

    def walk(body: list[ast.stmt], owner: str, parts: frozenset[str]) -> Iterator[Entry]:
        for node in body:
            if isinstance(node, ast.ClassDef):
                made = entry(Kind.CLASS, node, node.name, owner, parts)
                yield replace(made, bases=tuple(ast.unparse(base) for base in node.bases))
                yield from walk(node.body, made.path, made.parts)
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                signature = signature_of(node, is_method=bool(owner))
                kind = Kind.ATTRIBUTE if signature.kind == "property" else Kind.FUNCTION
                yield replace(
                    entry(kind, node, node.name, owner, parts),
                    signature=signature if kind is Kind.FUNCTION else None,
                    is_abstract="abstractmethod" in map(ast.unparse, node.decorator_list),
                    notes_of_parameters=tuple(_notes_of_parameters(notes, node)),
                )
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                yield entry(Kind.ATTRIBUTE, node, node.target.id, owner, parts)
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                if not ast.unparse(node.value).startswith("TypeVar("):
                    yield entry(Kind.ATTRIBUTE, node, node.targets[0].id, owner, parts)
            elif isinstance(node, ast.ImportFrom):  # a re-export: `from x import y as y`
                for alias in node.names:
                    if alias.asname is not None:
                        yield entry(Kind.ATTRIBUTE, node, alias.asname, owner, parts)

    yield from walk(ast.parse(text).body, "", of_file.parts or frozenset())


def _notes(text: str, path: Path) -> dict[int, Note]:
    """By line."""
    found: dict[int, Note] = {}
    for number, line in enumerate(text.splitlines(), 1):
        comment = _LOOKS_LIKE_NOTE.search(line)
        if comment is None:
            continue
        match = _NOTE.fullmatch(comment[0].strip())
        if match is None:
            raise ValueError(f"{path}:{number}: cannot read the note {comment[0]!r}")
        names = match["parts"]
        parts = frozenset(name.strip() for name in names.split(",")) if names else None
        major, _, minor = (match["release"] or "0.0").partition(".")
        release = int(major), int(minor)
        found[number] = Note(
            parts,
            since=release if match["word"] == "since" else Note.since,
            until=release if match["word"] == "until" else Note.until,
        )
    return found


def _note_on(notes: dict[int, Note], node: ast.stmt) -> Note:
    """On the first or last line of a definition; a class has its body after its first line."""
    if isinstance(node, ast.ClassDef) or node.lineno in notes:
        return notes.get(node.lineno, Note())
    return notes.get(node.end_lineno or node.lineno, Note())


def _notes_of_parameters(
    notes: dict[int, Note], node: ast.FunctionDef | ast.AsyncFunctionDef
) -> Iterator[tuple[str, Note]]:
    arguments = node.args
    for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
        if one.lineno not in (node.lineno, node.end_lineno) and one.lineno in notes:
            yield one.arg, notes[one.lineno]


def _without(names: Iterable[str], parameters: tuple[Parameter, ...]) -> tuple[Parameter, ...]:
    return tuple(one for one in parameters if one.name not in names)
