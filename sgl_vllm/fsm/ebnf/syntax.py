"""The text of a grammar -> its rules.

Owns the syntax: xgrammar's dialect of GBNF, as far as its meaning is context-free text. Macros,
look-ahead and attributes of rules are refused here, as is all that is no grammar. Pure.

    root ::= item ("," ws item)*    # a comment
    item ::= [a-zA-Z_] [^\\n,]{0,20} | "\\u00e9"
    ws   ::= ""
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise
from typing import NoReturn

from sgl_vllm.fsm.errors import TooComplexError, UnsupportedGrammarError
from sgl_vllm.fsm.small_cache import cached_if_few
from sgl_vllm.fsm.syntax import CharacterClass, Choice, Node, Reference, Repetition, Sequence, Text
from sgl_vllm.protocol.code_points import Ranges, normalized

MAX_RULES = 1_000
MAX_NESTING = 100
"""Parentheses within parentheses."""

_LAST = 0x10FFFF


TOKEN = re.compile(
    r"""[ \t\r\n]+ | \#[^\r\n]*
      | (?P<assign> ::= )
      | (?P<name> [A-Za-z_.-][A-Za-z0-9_.-]* )
      | "(?P<text> (?: [^"\\\r\n] | \\. )* )"
      | \[(?P<members> (?: [^\]\\\r\n] | \\. )* )\]
      | (?P<number> [0-9]+ )
      | (?P<mark> [(){}|*+?,] )""",
    re.VERBOSE,
)
_CHARACTER = re.compile(
    r"""\\x(?P<x>[0-9a-fA-F]+) | \\u(?P<u>[0-9a-fA-F]{4}) | \\U(?P<U>[0-9a-fA-F]{8})
      | \\(?P<escaped>.) | (?P<plain>.)""",
    re.VERBOSE | re.DOTALL,
)
_ESCAPES = {
    **{char: ord(char) for char in "'\"?\\/"},
    **dict(zip("nrtabfv0e", b"\n\r\t\a\b\f\v\0\x1b", strict=True)),
}
_ESCAPES_IN_CLASS = _ESCAPES | {char: ord(char) for char in "^$.*+()[]{}|-"}
_NO_RULES = frozenset(
    {*("true", "false"), *("TagDispatch", "TokenTagDispatch", "Token", "ExcludeToken", "Regex")}
)
"""Names with a meaning of their own."""


def parse(grammar: str) -> dict[str, Node]:
    """The rules of a grammar, by name.

    Raises:
        UnsupportedGrammarError: it is no grammar, or says more than which texts are allowed.
        TooComplexError: it has more than `MAX_RULES` rules, or is nested too deeply.
    """
    return Parser(tokens_of(grammar, TOKEN)).rules()


@dataclass(frozen=True, slots=True)
class Token:
    """Kinds are the groups of `TOKEN`; a mark is its own kind."""

    kind: str
    value: str


def tokens_of(grammar: str, pattern: re.Pattern[str]) -> list[Token]:
    if "\0" in grammar:
        raise UnsupportedGrammarError("a NUL, where xgrammar stops to read")
    tokens = []
    position = 0
    while position < len(grammar):
        match = pattern.match(grammar, position)
        if match is None:
            raise UnsupportedGrammarError(f"not understood: {grammar[position : position + 20]!r}")
        position = match.end()
        if match.lastgroup is not None:
            value = match[match.lastgroup]
            tokens.append(Token(value if match.lastgroup == "mark" else match.lastgroup, value))
    return [*tokens, Token("end", "")]


class Parser:
    """Recursive descent over the tokens. Each method begins at the current token and leaves the
    one after what it has read."""

    def __init__(self, tokens: list[Token]) -> None:
        self.tokens = tokens
        self.position = 0
        self._nesting = 0
        self._defined: frozenset[str] = frozenset()

    def rules(self) -> dict[str, Node]:
        """Raises as `parse`."""
        defined = [
            token.value
            for token, following in pairwise(self.tokens)
            if token.kind == "name" and following.kind == "assign"
        ]
        if len(defined) > MAX_RULES:
            raise TooComplexError(f"the grammar has more than {MAX_RULES} rules")
        self._defined = frozenset(defined)
        if len(self._defined) < len(defined) or not _NO_RULES.isdisjoint(defined):
            raise UnsupportedGrammarError("a rule has two definitions or a reserved name")
        rules = {}
        while self.kind != "end":
            name, body = self.rule()
            rules[name] = body
        return rules

    @property
    def kind(self) -> str:
        return self.tokens[self.position].kind

    def rule(self) -> tuple[str, Node]:
        name = self.take("name")
        self.take("assign")
        return name, self._choice()

    def take(self, kind: str) -> str:
        if self.kind != kind:
            self.refuse()
        self.position += 1
        return self.tokens[self.position - 1].value

    def refuse(self) -> NoReturn:
        raise UnsupportedGrammarError(f"{self.tokens[self.position].value!r} is not understood")

    @property
    def _is_at_rule(self) -> bool:
        return self.kind == "name" and self.tokens[self.position + 1].kind == "assign"

    def _choice(self) -> Node:
        options = [self._sequence()]
        while self.kind == "|":
            self.take("|")
            options.append(self._sequence())
        return options[0] if len(options) == 1 else Choice(tuple(options))

    def _sequence(self) -> Node:
        parts = [self._repeated()]
        while not self._ends_sequence():
            parts.append(self._repeated())
        return parts[0] if len(parts) == 1 else Sequence(tuple(parts))

    def _ends_sequence(self) -> bool:
        return self.kind in ("|", ")", "end") or self._is_at_rule

    def _repeated(self) -> Node:
        part = self._element()
        match self.kind:
            case "*":
                low, high = 0, None
            case "+":
                low, high = 1, None
            case "?":
                low, high = 0, 1
            case "{":
                return Repetition(part, *self._bounds())
            case _:
                return part
        self.position += 1
        return Repetition(part, low, high)

    def _bounds(self) -> tuple[int, int | None]:
        self.take("{")
        high: int | None
        low = high = self._number()
        if self.kind == ",":
            self.take(",")
            high = None if self.kind == "}" else self._number()
        self.take("}")
        if high is not None and high < low:
            raise UnsupportedGrammarError("a repetition with its bounds exchanged")
        return low, high

    def _number(self) -> int:
        number = self.take("number")
        if len(number) > 9:
            raise TooComplexError("a repetition with a number of more than nine digits")
        return int(number)

    def _element(self) -> Node:
        match self.kind:
            case "text":
                return Text(text_of(self.take("text")))
            case "members":
                return CharacterClass(_class(self.take("members")))
            case "name":
                name = self.take("name")
                if name not in self._defined:
                    raise UnsupportedGrammarError(f"{name} is not defined")
                return Reference(name)
            case "(":
                return self._parenthesis()
        self.refuse()

    def _parenthesis(self) -> Node:
        self.take("(")
        if self.kind == ")":
            self.take(")")
            return Text(b"")
        self._nesting += 1
        if self._nesting > MAX_NESTING:
            raise TooComplexError("the grammar is nested too deeply")
        inside = self._choice()
        self._nesting -= 1
        self.take(")")
        return inside


def text_of(written: str) -> bytes:
    codes = [_code(match, _ESCAPES) for match in _CHARACTER.finditer(written)]
    return "".join(map(chr, codes)).encode(errors="surrogatepass")


@cached_if_few
def _class(members: str) -> Ranges:
    is_negated = members.startswith("^")
    found = [*_CHARACTER.finditer(members, 1 if is_negated else 0)]
    codes = [_code(match, _ESCAPES_IN_CLASS) for match in found]
    is_dash = [match["plain"] == "-" for match in found]
    ranges = []
    i = 0
    while i < len(codes):
        low = high = codes[i]
        if i + 2 < len(codes) and is_dash[i + 1]:
            high = codes[i + 2]
            i += 2
        if high < low:
            raise UnsupportedGrammarError("a range of characters with its ends exchanged")
        ranges.append((low, high))
        i += 1
    return _others(normalized(ranges)) if is_negated else normalized(ranges)


def _others(ranges: Ranges) -> Ranges:
    """All other code points, surrogates included."""
    found, begin = [], 0
    for low, high in ranges:
        if begin < low:
            found.append((begin, low - 1))
        begin = high + 1
    return (*found, (begin, _LAST)) if begin <= _LAST else tuple(found)


def _code(match: re.Match[str], escapes: dict[str, int]) -> int:
    if match["plain"]:
        return ord(match["plain"])
    if match["escaped"]:
        code = escapes.get(match["escaped"])
        if code is None:
            raise UnsupportedGrammarError(f"the escape {match[0]}")
        return code
    digits = match["x"] or match["u"] or match["U"]
    if len(digits) > 8 or int(digits, 16) > _LAST:
        raise UnsupportedGrammarError(f"the code point {match[0]}")
    return int(digits, 16)
