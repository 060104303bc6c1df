"""Where a name of one vLLM probably moved in another: same name, same body, or a similar body.

Owns how definitions are found and compared, and the thresholds below which nothing is said. A vLLM
has 3,000 files, so definitions are found by their first lines and indentation, and only those are
parsed that may be alike. What both vLLMs have is no new place of something else.
"""

from __future__ import annotations

import ast
import functools
import re
from collections import Counter
from collections.abc import Iterator
from difflib import SequenceMatcher
from os.path import commonpath

from sgl_vllm.vllm_api.vllm_source import SourceClass, VllmSource

SAME_NAME, SAME_OWNER, ELSEWHERE, SAME_ATTRIBUTE = 0.4, 0.6, 0.8, 0.5
"""Shares that must be equal: of a body with the same name, with another name in the same class or
module, with another name elsewhere; of the lines that use an attribute."""

_FIRST_LINE = re.compile(r"^( *)(class|(?:async )?def) (\w+)|^(\w+)(?:: [^=\n]+)? = ", re.MULTILINE)

Place = tuple[str, str, str]
"""Where a vLLM has something: `module:path`, file and line, and what says so."""


class Definition:
    """A class, function, method or constant: its source, indented as in its file."""

    def __init__(self, module: str, path: str, kind: str, where: str, text: str) -> None:
        self.module, self.path, self.kind, self.where, self.text = module, path, kind, where, text
        self.owner, _, self.name = path.rpartition(".")

    def place(self, why: str) -> Place:
        return f"{self.module}:{self.path}", self.where, why

    @functools.cached_property
    def header(self) -> str:
        """The lines before a body, as one."""
        return " ".join(re.split(r":(?: *#.*)?\n", self.text, maxsplit=1)[0].split())

    @functools.cached_property
    def shape(self) -> list[str]:
        """The tokens of a function, the lines of a class; without its name, docstrings and
        annotations. Empty if a string with text at the start of a line hides its end."""
        try:
            tree = ast.parse(f"if 1:\n{self.text}" if self.owner else self.text)
        except SyntaxError:
            return []
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                if ast.get_docstring(node) is not None:
                    node.body[0] = ast.Pass()
                if not isinstance(node, ast.ClassDef):
                    node.returns = None
            elif isinstance(node, ast.arg | ast.AnnAssign):
                node.annotation = ast.Name("_")
        text = re.sub(rf"\b{self.name}\b", "_", ast.unparse(tree))
        return text.splitlines() if self.kind == "class" else re.findall(r"\w+|[^\w\s]", text)


class Search:
    """Looks in `after` for what `before` has. Reading both takes 8 s of CPU time."""

    def __init__(self, before: VllmSource, after: VllmSource) -> None:
        self.before, self.after = before, after
        self.old, self.new = definitions(before), definitions(after)

    def here(self, module: str, path: str) -> Place | None:
        """Where `after` has it, or its class."""
        paths = [path, path.rpartition(".")[0]]
        found = [_imported(self.after, self.new, module, one) for one in paths]
        return next((one.place(one.header) for one in found if one is not None), None)

    def elsewhere(self, module: str, path: str) -> Place | None:
        """The likely place of what `after` lacks; None if nothing is alike, or two are equally."""
        one = _imported(self.before, self.old, module, path)
        found = self._like(one) if one is not None else self._like_attributes(module, path)
        *others, best = sorted([(0.0, 0, None), *found], key=lambda scored: scored[:2])
        return best[2] if not others or others[-1][:2] != best[:2] else None

    def _like(self, one: Definition) -> Iterator[tuple[float, int, Place]]:
        """With how likely it is and how near."""
        old_paths = {path for _, path in self.old} - {one.path}
        is_short = len(one.shape) < (8 if one.kind == "class" else 30)
        for key, other in self.new.items():
            same_name, is_old = other.name == one.name, key in self.old or other.path in old_paths
            near = (other.module, other.owner) == (one.module, one.owner)
            # What is old can only be where a function or class was imported from all along.
            if other.kind != one.kind or (is_old and (one.owner or not same_name)):
                continue
            if not same_name:  # before anything is parsed; short bodies are alike by chance
                words = [re.findall(r"\w+", each.header) for each in (one, other)]
                if (is_short and not near) or (one.kind == "def" and _shared(*words) < 0.5):
                    continue
            if 0.4 < len(one.text) / len(other.text) < 2.5:
                least = SAME_NAME if same_name else SAME_OWNER if near else ELSEWHERE
                least = ELSEWHERE if is_old else least
                like = _shared(one.shape, other.shape)
                if like >= least:  # it takes longer to compare the order, too
                    like = SequenceMatcher(None, one.shape, other.shape, autojunk=False).ratio()
                if like >= least:
                    why = f"{'the same name, ' * same_name}{int(100 * like)}% of the body"
                    score = like + 0.2 * same_name + 0.1 * near - 0.5 * is_old
                    modules = [each.module.replace(".", "/") for each in (one, other)]
                    yield score, commonpath(modules).count("/"), other.place(why)

    def _like_attributes(self, module: str, path: str) -> Iterator[tuple[float, int, Place]]:
        """Find a renamed attribute: new attributes of the class that are used in similar lines, and
        classes of the module that did not have this name before."""
        owner, _, name = path.rpartition(".")
        before, after = (vllm.find_class(module, owner) for vllm in (self.before, self.after))
        if before is None or after is None:
            return
        old, old_names = _source_of(self.before, self.old, before)
        new, new_names = _source_of(self.after, self.new, after)
        for new_name in new_names - old_names:
            uses = _lines_with(name, old), _lines_with(new_name, new)
            types = [{line for line in lines if line.startswith("_:")} for lines in uses]
            like = _shared(*uses)
            if like >= SAME_ATTRIBUTE and (not all(types) or types[0] & types[1]):
                where, why = self.new[after.module, after.name].where, "of the lines that use it"
                place = f"{after.module}:{after.name}.{new_name}"
                yield like, 0, (place, where, f"{like:.0%} {why}")
        sets = re.compile(rf"^ +(?:self\.)?{name}(?:: .*| = .*)$", re.MULTILINE)
        for key, one in self.new.items():
            had = self.old.get(key)
            is_new = had is None or not sets.search(had.text)
            if key[0] == after.module and one.kind == "class" and is_new and sets.search(one.text):
                yield 0.1, 0, (f"{one.module}:{one.path}.{name}", one.where, "the same name")


def definitions(vllm: VllmSource) -> dict[tuple[str, str], Definition]:
    """The top-level definitions of a vLLM's modules and classes, by module and path."""
    found: dict[tuple[str, str], Definition] = {}
    for file in sorted((vllm.root / "vllm").rglob("*.py")):
        text, relative = file.read_text(), file.relative_to(vllm.root)
        module = ".".join(relative.with_suffix("").parts).removesuffix(".__init__")
        around: list[tuple[int, str, str]] = []  # indentation, kind, name
        for match in _FIRST_LINE.finditer(text):
            indent, kind = len(match[1] or ""), (match[2] or "=").removeprefix("async ")
            around = [one for one in around if one[0] < indent]
            is_inside = all(kind == "class" for _, kind, _ in around)
            around.append((indent, kind, match[3] or match[4]))
            if is_inside and not text.endswith(f".setter\n{match[1]}", 0, match.start()):
                path = ".".join(name for _, _, name in around)
                end = _end_of(indent).search(text, match.end())
                source = text[match.start() : end.start() if end is not None else None]
                where = f"{relative}:{text.count(chr(10), 0, match.start()) + 1}"
                found[module, path] = Definition(module, path, kind, where, source)
    return found


@functools.cache
def _end_of(indent: int) -> re.Pattern[str]:
    """The next line that stands no further right: another statement, not a closing bracket."""
    return re.compile(rf"^ {{0,{indent}}}[A-Za-z_@#]", re.MULTILINE)


def _imported(
    vllm: VllmSource, known: dict[tuple[str, str], Definition], module: str, path: str
) -> Definition | None:
    """What can be imported as this: in the module that defines it, or in a base class."""
    owner, _, name = path.rpartition(".")
    if not owner:
        found = vllm.find(module, name)
        return known.get((found[0], name)) if found is not None else None
    of_class = vllm.find_class(module, owner)
    member = vllm.member(of_class, name) if of_class is not None else None
    key = (member.owner.module, f"{member.owner.name}.{name}") if member is not None else ("", "")
    return known.get(key)


def _source_of(
    vllm: VllmSource, known: dict[tuple[str, str], Definition], owner: SourceClass
) -> tuple[str, set[str]]:
    """The source of a class and its bases, and the names of their attributes."""
    classes = [one for one in vllm.ancestry(owner) if (one.module, one.name) in known]
    text = "\n".join(known[one.module, one.name].text for one in classes)
    return text, {name for one in classes for name in one.attributes}


def _lines_with(name: str, text: str) -> list[str]:
    lines = re.findall(rf"^.*\b{name}\b.*$", text, re.MULTILINE)
    return [re.sub(rf"\b{name}\b", "_", line).strip() for line in lines]


def _shared(one: list[str], other: list[str]) -> float:
    """The share that both have, in any order."""
    return 2 * (Counter(one) & Counter(other)).total() / max(1, len(one) + len(other))
