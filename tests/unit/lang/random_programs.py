"""Random programs as source text, for tests that run one program in two ways.

They use all features: texts, f-strings of arguments and variables, gens, selects, tools, loops,
helpers, scopes, forks, both joins, and turns. They read variables, but never branch on one. Some
conversions of what was read fail.

Tools log when they begin and end. The writer knows which calls must have ended when another begins:
those before it in the same prompt, and those before what the function has read by then. It counts
this as the program's text is written, and calls none of the code that the tests are about.
"""

from __future__ import annotations

import itertools
import linecache
import time
import types
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

import sgl_vllm as sgl

_HEADER = """
def helper(p, name, word):
    p += f"<{word}:" + sgl.gen(name, max_tokens=7) + ">"
    return p[name]

"""
_numbers = itertools.count()


@dataclass(frozen=True)
class Call:
    """One call of a tool: its place in the text, and the loops' variables there."""

    place: int
    at: str

    @property
    def loops(self) -> dict[str, str]:
        return dict(part.split("=") for part in self.at.split())

    def is_with(self, other: Call) -> bool:
        """Whether both are of the same turn of every loop that they share."""
        mine, its = self.loops, other.loops
        return all(its[name] == turn for name, turn in mine.items() if name in its)


@dataclass(frozen=True)
class Source:
    """A program's text. `after` has, for each place where a tool is called, the places of calls
    that must have ended before; `has_effect` the places of tools that are not read-only."""

    text: str
    after: dict[int, frozenset[int]]
    has_effect: frozenset[int]

    def __repr__(self) -> str:
        return self.text


@dataclass
class Log:
    """What the tools of a program did, and which of them the function has asked for."""

    asked: list[Call] = field(default_factory=list)
    began: list[tuple[Call, str]] = field(default_factory=list)
    events: list[tuple[str, Call]] = field(default_factory=list)

    def called(self, place: int, at: str, word: object) -> str:
        """The tools' function. It fails for some words."""
        call = Call(place, at)
        self.began.append((call, str(word)))
        self.events.append(("begin", call))
        digest = zlib.crc32(f"{place}{at}{word}".encode())
        time.sleep(digest % 4 / 1000)
        if digest % 23 == 0:
            raise ValueError(f"no {word}")
        self.events.append(("end", call))
        return f"({word})"

    def too_early(self, source: Source) -> Iterator[tuple[Call, Call]]:
        """Calls that began before another had ended that comes before them."""
        ended: set[Call] = set()
        for event, call in self.events:
            if event == "end":
                ended.add(call)
                continue
            for other, _ in self.began:
                comes_before = other.place in source.after[call.place] and call.is_with(other)
                if comes_before and other not in ended:
                    yield other, call


class _Writer:
    """Writes one program. `known` are the names that a prompt certainly has.

    A set of places says of which calls of tools is certain that they have ended. `_done` has those
    that have before the function goes on, `_in` those before a prompt goes on, `_with` those before
    a variable of a prompt is there.
    """

    def __init__(self, draw: Any, *, is_chat: bool) -> None:
        self._draw = draw
        self._is_chat = is_chat
        self._fresh = itertools.count()
        self._done: frozenset[int] = frozenset()
        self._in: dict[str, frozenset[int]] = {"s": frozenset()}
        self._with: dict[tuple[str, str], frozenset[int]] = {}
        self._loops: list[str] = []
        self._written: set[tuple[str, str]] = set()
        self._joined: Counter[str] = Counter()  # how often each name was joined into a list
        self.after: dict[int, frozenset[int]] = {}
        self.has_effect: set[int] = set()
        self.lines: list[str] = []

    def make(self, p: str, name: str, known: list[str]) -> None:
        """An operation of the prompt makes a variable."""
        known.append(name)
        self._written.add((p, name))
        self._with[p, name] = self._in[p]

    def read(self, p: str, name: str) -> str:
        """The function reads a variable."""
        self._done |= self._with[p, name]
        return f"{p}[{name!r}]"

    def tool(self, p: str, name: str, known: list[str], locals_: list[str]) -> str:
        """A call of a tool. The function has computed its arguments by then."""
        kind, place = self.pick("tool", "tool", "read_only_tool"), len(self.after)
        is_var = known and self.number(0, 3) == 0
        word = f"sgl.var({self.pick(*known)!r})" if is_var else self.value(p, known, locals_)
        more = f", word={word}" if self.number(0, 2) == 0 else f", {word}"
        before = self._done | self._in[p]
        if kind == "tool":
            self.has_effect.add(place)
        else:
            before &= self.has_effect
        self.after[place] = before
        at = " ".join(f"{loop}={{{loop}}}" for loop in self._loops)
        self._in[p] |= {place}
        return f"sgl.{kind}({name!r}, called, {place}, f'{at}'{more})"

    def pick(self, *options: Any) -> Any:
        return self._draw(st.sampled_from(options))

    def number(self, least: int, most: int) -> int:
        return self._draw(st.integers(least, most))

    def line(self, depth: int, text: str) -> None:
        self.lines.append("    " * depth + text)

    def value(self, p: str, known: list[str], locals_: list[str]) -> str:
        """An expression whose value can be formatted."""
        options = ["a", "k + 1", "a.upper()", "a[:2]", "3 + k", "k + k"]
        options += ["a + 'none'", "words[:1]", "words[0]", "'-'.join(WORDS)", "TABLE['t']"]
        options += ["[w.title() for w in WORDS if w]", "sorted(WORDS, key=lambda w: (len(w), w))"]
        options += ["WORDS[1] if len(WORDS) > 1 else a", "WORDS and k", "sorted(WORDS)"]
        options += locals_
        if known:
            variable = self.pick(*known)
            name = f"{p}[{variable!r}]" + "[0]" * self._joined[variable]
            reading = [name, f"{name}[:1]", f"[{name}, a][1]", f"{name} + a", f"{name}.strip()"]
            reading += [f"dict(x={name})['x']", f"({name}, k)[1]", f"(a + {name}).upper()"]
            chosen = self.pick(*options, *reading)
            if chosen in reading:
                self.read(p, variable)
            return chosen
        return self.pick(*options)

    def text(self, p: str, known: list[str], locals_: list[str]) -> str:
        parts = [
            self.pick("one ", "zwei\\n", "{{", "é", "  ", "ab" * 40)
            if self.number(0, 1)
            else "{" + self.value(p, known, locals_) + "}"
            for _ in range(self.number(1, 3))
        ]
        return 'f"""' + "".join(parts) + '"""'

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
            value = self.value(p, known, locals_).replace("'", '"')
            return f"sgl.gen({name!r}, stop=f'{{{value}}}!')"
        if kind == 3:
            return f"sgl.gen({name!r}, n=2)"
        return f"sgl.gen({name!r})"

    def block(self, p: str, depth: int, known: list[str], nesting: int, *, may_gen: bool) -> None:
        """Some statements on the prompt `p`, which add variables to `known`."""
        locals_: list[str] = []
        for _ in range(self.number(1, 4)):
            kind = self.number(0, 20)
            if kind <= 2 or (not may_gen and kind <= 9):
                self.line(depth, f"{p} += {self.text(p, known, locals_)}")
            elif kind <= 4:
                name = self.name(known)
                text = self.text(p, known, locals_)
                self.line(depth, f"{p} += {text} + {self.generation(p, name, known, locals_)}")
                self.make(p, name, known)
            elif kind == 5:
                name = self.name(known)
                self.line(depth, f"for i in range({self.number(1, 3)}):")
                self.line(depth + 1, f'{p} += f"{{i}}. " + sgl.gen({name!r}) + "\\n"')
                self.make(p, name, known)
            elif kind == 6:
                name = self.name(known)
                value = self.value(p, known, locals_)
                self.line(depth, f"x{len(self.lines)} = helper({p}, {name!r}, {value})")
                locals_.append(f"x{len(self.lines) - 1}")
                self.make(p, name, known)
                self.read(p, name)
            elif kind == 7 and nesting:
                self.fork(p, depth, known, nesting)
            elif kind == 8:
                name = f"v{next(self._fresh)}"
                self.line(depth, f"with {p}.var_scope({name!r}):")
                self.block(p, depth + 1, list(known), 0, may_gen=may_gen)
                self.make(p, name, known)
            elif kind == 9 and known:
                self.line(depth, f"{p} += sgl.var({self.pick(*known)!r})")
            elif kind == 10:
                name = self.name(known)
                value = self.value(p, known, locals_)
                self.line(depth, f'{p}.set_var({name!r}, f"""{{{value}}}""")')
                self.make(p, name, known)
                self._with[p, name] = frozenset()
            elif kind in (11, 12, 13, 18, 19, 20):
                name = self.name(known)
                self.line(depth, f"{p} += {self.tool(p, name, known, locals_)}")
                self.make(p, name, known)
            elif kind == 14 and known:
                variable = self.pick(*known)
                name = self.read(p, variable) + "[0]" * self._joined[variable]
                failing = (f"{name}[1:]", f"{name}.strip(3)", f"{name}[0]", f"{name} / 2")
                self.line(depth, f"x{len(self.lines)} = {self.pick(*failing)}")
                locals_.append(f"x{len(self.lines) - 1}")
            elif kind == 15 and known:
                parts = [f"sgl.var({self.pick(*known)!r})", self.text(p, known, locals_), "a"]
                given = ", ".join(self._draw(st.permutations(parts)))
                order = f"any_order([{given}]" if self.number(0, 1) else f"any_order({given}"
                self.line(depth, f"{p} += sgl.{order}, key=str)")
            elif kind == 16:
                word = self.pick("a", "f'{a}{k}'", *locals_)
                self.line(depth, "fs = [lambda w: f'{i}{w}' for i in range(3)]")
                self.line(depth, f"{p} += fs[0]({word})")
            else:
                read = self.pick("text()", "sync()", "messages()")
                self._done |= self._in[p]
                self.line(depth, f"x{len(self.lines)} = {p}.{read}")
                locals_.append(f"x{len(self.lines) - 1}")

    def fork(self, p: str, depth: int, known: list[str], nesting: int) -> None:
        group, b = f"g{len(self.lines)}", f"b{len(self.lines)}"
        size = self.number(0, 3)
        self.line(depth, f"{group} = {p}.fork({size})")
        made = list(known)
        self._in[b] = self._in[p]
        self._with.update({(b, name): self._with[p, name] for name in known})
        before = self._done
        if self.number(0, 1):
            loop = f"j{len(self.lines)}"
            self.line(depth, f"for {loop}, {b} in enumerate({group}):")
            self.line(depth + 1, f'{b} += f"[{{{loop}}}]"')
            self._loops.append(loop)
            self.block(b, depth + 1, made, nesting - 1, may_gen=True)
            self._loops.pop()
        else:
            name = self.name(known)
            self.line(depth, f'{group} += [f"{{a}}{{j}}" for j in range({size})]')
            self.line(depth, f"{group} += sgl.gen({name!r})")
            self.line(depth, f'{group} += lambda j: f"({{j}}{{k}}) "')
            self.make(b, name, made)
        if not size:
            self._done = before
        if size and self.number(0, 2) == 0:
            its_own: list[str | None] = [n for n in made if n not in known]
            last = self.pick(*its_own or [None])
            if last is not None:  # of one branch only, so which calls have ended is not counted
                self.line(depth, f'{p} += f"{{{group}[0][{last!r}]}}"')
        mode = self.pick("", "'concate_and_append'", None)
        if mode is not None:
            self.line(depth, f"{group}.join({mode})")
            if size and mode == "":
                new = [name for name in dict.fromkeys(made) if name not in known]
                for name in new:
                    self._in[p] |= self._with[b, name]
                for name in new:
                    self.make(p, name, known)
                for name in {name for prompt, name in self._written if prompt == b}:
                    self._joined[name] += 1
                    self._written.add((p, name))
            elif size:
                self._in[p] |= self._in[b]

    def program(self) -> Source:
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
        text = _HEADER + "\n".join(self.lines) + "\n"
        return Source(text, self.after, frozenset(self.has_effect))


@st.composite
def sources(draw: Any) -> Source:
    """A program of the arguments `a` (str), `k` (int) and `words`."""
    return _Writer(draw, is_chat=draw(st.booleans())).program()


def program_of(source: str, log: Log | None = None, *, notes_asked: bool = False) -> sgl.Program:
    """The program of a text, whose tools write to `log`.

    Its source can be found like that of a notebook cell. If it `notes_asked`, it also logs which
    tools its function asks for; then it cannot be traced.
    """
    log = log or Log()
    filename = f"<random program {next(_numbers)}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    import collections
    import json

    table = collections.OrderedDict(t="tea", c="coffee", b="beer")
    namespace: dict[str, Any] = {"sgl": sgl, "json": json, "TABLE": table, "__name__": "random"}
    namespace |= {"WORDS": ("abc", "de"), "called": log.called}
    if notes_asked:

        def tool(name: str, function: Any, place: int, at: str, *args: Any, **kwargs: Any) -> Any:
            log.asked.append(Call(place, at))
            return sgl.tool(name, function, place, at, *args, **kwargs)

        namespace["sgl"] = types.SimpleNamespace(
            **{name: getattr(sgl, name) for name in sgl.__all__} | {"tool": tool}
        )
    exec(compile(source, filename, "exec", dont_inherit=True), namespace)
    program: sgl.Program = namespace["program"]
    return program
