"""llama.cpp's grammars (GBNF) -> the dialect that xgrammar reads.

    ws  ::= | " "       ws  ::=() | " "
    any ::= .*          any ::= [^]*

Owns these two differences: an empty alternative, and any character. Everything else is left as it
is written, what is no grammar included. Pure.
"""

from __future__ import annotations

import re
from itertools import pairwise
from typing import NamedTuple

_TOKEN = re.compile(
    r"""[ \t\r\n]+ | \#[^\r\n]*
      | (?P<assign> ::= )
      | (?P<name> [A-Za-z_.-][A-Za-z0-9_.-]* )
      | "(?P<text> (?: [^"\\\r\n] | \\. )* )"
      | \[(?P<members> (?: [^\]\\\r\n] | \\. )* )\]
      | (?P<number> [0-9]+ )
      | (?P<mark> [(){}|*+?,] )""",
    re.VERBOSE,
)
_BEFORE_ALTERNATIVE = ("assign", "|", "(")
_AFTER_ALTERNATIVE = ("|", ")", "end", "rule")


class _Token(NamedTuple):
    """Kinds are the groups of `_TOKEN`, and `rule` is the name of one that is defined here; a mark
    is its own kind."""

    kind: str
    begin: int
    end: int


def as_xgrammar_reads_it(grammar: str) -> str:
    """The same rules. Cost: about a microsecond for two characters."""
    pieces, position = [], 0
    tokens = _tokens(grammar)
    rules = {grammar[token.begin : token.end] for token in tokens if token.kind == "rule"}
    for before, token in pairwise(tokens):
        is_empty = before.kind in _BEFORE_ALTERNATIVE and token.kind in _AFTER_ALTERNATIVE
        if is_empty and (before.kind, token.kind) != ("(", ")"):
            pieces += [grammar[position : before.end], "()"]
            position = before.end
        name = grammar[token.begin : token.end]
        if token.kind == "name" and "." in name and name not in rules:
            core = name.strip(".")  # a name, between any characters
            first, last = name.split(core) if core else (name, "")
            parts = ["[^]"] * len(first) + [core] * bool(core) + ["[^]"] * len(last)
            pieces += [grammar[position : token.begin], " ".join(parts)]
            position = token.end
    return "".join([*pieces, grammar[position:]])


def _tokens(grammar: str) -> list[_Token]:
    """Without space and comments; none if it is no grammar."""
    tokens = []
    position = 0
    while position < len(grammar):
        match = _TOKEN.match(grammar, position)
        if match is None:
            return []
        position = match.end()
        if match.lastgroup is not None:
            kind = match[0] if match.lastgroup == "mark" else match.lastgroup
            tokens.append(_Token(kind, *match.span()))
    tokens.append(_Token("end", len(grammar), len(grammar)))
    return [
        token._replace(kind="rule") if (token.kind, after.kind) == ("name", "assign") else token
        for token, after in pairwise(tokens)
    ] + tokens[-1:]
