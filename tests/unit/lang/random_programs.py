"""Random programs as source text, for tests that run one program in two ways.

They use all features: texts, f-strings of arguments and variables, gens, selects, tools, loops,
helpers, scopes, forks, both joins, and turns. They read variables, but never branch on one.
"""

from __future__ import annotations

import itertools
import linecache
from typing import Any

from hypothesis import strategies as st

import sgl_vllm as sgl

_HEADER = """
def helper(p, name, word):
    p += f"<{word}:" + sgl.gen(name, max_tokens=7) + ">"
    return p[name]

def look(word):
    return f"({word})"

"""
_numbers = itertools.count()


class _Writer:
    """Writes one program. `known` are the names that a prompt certainly has."""

    def __init__(self, draw: Any, *, is_chat: bool) -> None:
        self._draw = draw
        self._is_chat = is_chat
        self._fresh = itertools.count()
        self.lines: list[str] = []

    def pick(self, *options: Any) -> Any:
        return self._draw(st.sampled_from(options))

    def number(self, least: int, most: int) -> int:
        return self._draw(st.integers(least, most))

    def line(self, depth: int, text: str) -> None:
        self.lines.append("    " * depth + text)

    def value(self, p: str, known: list[str], locals_: list[str]) -> str:
        """An expression whose value can be formatted."""
        options = ["a", "k + 1", "a.upper()", "a[:2]", "str(k > 3)", "k * 2 - 1"]
        options += ["a == 'none'", "len(words)", "words[0]", "'-'.join(words)", "TABLE[a[:1]]"]
        options += ["[w.title() for w in WORDS if w]", "sorted(WORDS, key=lambda w: (len(w), w))"]
        options += ["WORDS[1] if len(WORDS) > 1 else a", "WORDS and k", "sorted(words)"]
        if known:
            name = f"{p}[{self.pick(*known)!r}]"
            options += [name, f"len({name})", f"{name}[:1]", f"[{name}, a][1]", f"str({name}) + a"]
            options += [f"dict(x={name})['x']", f"({name}, k)[1:]", f"json.dumps({name})"]
        return self.pick(*options, *locals_)

    def text(self, p: str, known: list[str], locals_: list[str]) -> str:
        parts = [
            self.pick("one ", "zwei\\n", "{{", "é", "  ", "ab" * 40)
            if self.number(0, 1)
            else "{" + self.value(p, known, locals_) + self.pick("", "!r", ":>6", "") + "}"
            for _ in range(self.number(1, 3))
        ]
        return 'f"""' + "".join(part.replace(":>6}", "!s:>6}") for part in parts) + '"""'

    def name(self, known: list[str]) -> str:
        fresh = f"v{next(self._fresh)}"
        return self.pick(fresh, *known)

    def generation(self, p: str, name: str, known: list[str], locals_: list[str]) -> str:
        kind = self.number(0, 5)
        if kind == 0:
            return f"sgl.select({name!r}, ['x', 'yy', a + 'z'])"
        if kind == 1:
            return f"sgl.gen({name!r}, max_tokens=k, stop=['\\n', a])"
        if kind == 2 and known:
            return f"sgl.gen({name!r}, max_tokens=len(str({self.value(p, known, locals_)})) + 1)"
        if kind == 3:
            return f"sgl.gen({name!r}, n=2)"
        return f"sgl.gen({name!r})"

    def block(self, p: str, depth: int, known: list[str], nesting: int, *, may_gen: bool) -> None:
        """Some statements on the prompt `p`, which add variables to `known`."""
        locals_: list[str] = []
        for _ in range(self.number(1, 4)):
            kind = self.number(0, 12)
            if kind <= 2 or (not may_gen and kind <= 9):
                self.line(depth, f"{p} += {self.text(p, known, locals_)}")
            elif kind <= 4:
                name = self.name(known)
                text = self.text(p, known, locals_)
                self.line(depth, f"{p} += {text} + {self.generation(p, name, known, locals_)}")
                known.append(name)
            elif kind == 5:
                name = self.name(known)
                self.line(depth, f"for i in range({self.number(1, 3)}):")
                self.line(depth + 1, f'{p} += f"{{i}}. " + sgl.gen({name!r}) + "\\n"')
                known.append(name)
            elif kind == 6:
                name = self.name(known)
                value = self.value(p, known, locals_)
                self.line(depth, f"x{len(self.lines)} = helper({p}, {name!r}, {value})")
                locals_.append(f"x{len(self.lines) - 1}")
                known.append(name)
            elif kind == 7 and nesting:
                self.fork(p, depth, known, nesting)
            elif kind == 8:
                name = f"v{next(self._fresh)}"
                self.line(depth, f"with {p}.var_scope({name!r}):")
                self.block(p, depth + 1, list(known), 0, may_gen=may_gen)
                known.append(name)
            elif kind == 9 and known:
                self.line(depth, f"{p} += sgl.var({self.pick(*known)!r})")
            elif kind == 10:
                name = self.name(known)
                self.line(depth, f"{p}.set_var({name!r}, str({self.value(p, known, locals_)}))")
                known.append(name)
            elif kind == 11:
                name, tool = self.name(known), self.pick("tool", "read_only_tool")
                word = self.value(p, known, locals_)
                self.line(depth, f"{p} += sgl.{tool}({name!r}, look, {word})")
                known.append(name)
            else:
                read = self.pick("text()", "text()", "messages()")
                self.line(depth, f"x{len(self.lines)} = {p}.{read}")
                locals_.append(f"x{len(self.lines) - 1}")

    def fork(self, p: str, depth: int, known: list[str], nesting: int) -> None:
        group = f"g{len(self.lines)}"
        size = self.number(0, 3)
        self.line(depth, f"{group} = {p}.fork({size})")
        made = list(known)
        if self.number(0, 1):
            self.line(depth, f"for j, b{depth} in enumerate({group}):")
            self.line(depth + 1, f'b{depth} += f"[{{j}}]"')
            self.block(f"b{depth}", depth + 1, made, nesting - 1, may_gen=True)
        else:
            name = self.name(known)
            self.line(depth, f'{group} += [f"{{a}}{{j}}" for j in range({size})]')
            self.line(depth, f"{group} += sgl.gen({name!r})")
            self.line(depth, f'{group} += lambda j: f"({{j}}{{k}}) "')
            made.append(name)
        if size and self.number(0, 2) == 0:
            its_own: list[str | None] = [n for n in made if n not in known]
            last = self.pick(*its_own or [None])
            if last is not None:
                self.line(depth, f'{p} += f"{{{group}[0][{last!r}]}}"')
        mode = self.pick("", "'concate_and_append'", None)
        if mode is not None:
            self.line(depth, f"{group}.join({mode})")
            if size and mode == "":
                known += [name for name in made if name not in known]

    def program(self) -> str:
        self.line(0, "@sgl.function")
        self.line(0, "def program(s, a, k, words=('abc', 'de')):")
        known: list[str] = []
        if self._is_chat:
            if self.number(0, 1):
                self.line(1, f"s.system({self.text('s', [], [])})")
            for _ in range(self.number(1, 2)):
                self.line(1, "with s.user():")
                self.block("s", 2, known, 0, may_gen=False)
                self.line(1, "with s.assistant():")
                self.block("s", 2, known, 1, may_gen=True)
        else:
            self.line(1, 's += "begin "')
            self.block("s", 1, known, 2, may_gen=True)
        given = ", ".join(self.value("s", known, []) for _ in range(self.number(0, 2)))
        self.line(1, f"return [{given}], {{'k': k}}")
        return _HEADER + "\n".join(self.lines) + "\n"


@st.composite
def sources(draw: Any) -> str:
    """The source text of a program of the arguments `a` (str), `k` (int) and `words`."""
    return _Writer(draw, is_chat=draw(st.booleans())).program()


def program_of(source: str) -> sgl.Program:
    """The program. Its source can be found like that of a notebook cell."""
    filename = f"<random program {next(_numbers)}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    import collections
    import json

    table = collections.OrderedDict(t="tea", c="coffee", b="beer")
    namespace: dict[str, Any] = {"sgl": sgl, "json": json, "TABLE": table, "__name__": "random"}
    namespace["WORDS"] = ("abc", "de")
    exec(compile(source, filename, "exec", dont_inherit=True), namespace)
    program: sgl.Program = namespace["program"]
    return program
