"""The grammars that xgrammar prints, in a syntax that it does not read itself.

Owns what that syntax has beyond xgrammar's EBNF: look-ahead, patterns, and repetitions without a
limit. Pure.

    root    ::= (("\\"" root_1{2, -1} "\\"" items)) (=([ \\n]* [,}]))
    root_1  ::= Regex("^[a-z]$", json_string=true)
"""

from __future__ import annotations

import re
from typing import NamedTuple

from sgl_vllm.fsm.ebnf.syntax import TOKEN, Node, Parser, Reference, Token, text_of, tokens_of

_TOKEN = re.compile(rf"(?P<minus> -1 ) | (?P<equals> = ) | {TOKEN.pattern}", re.VERBOSE)


class PrintedGrammar(NamedTuple):
    """The rules by name, and the regular expressions by the name that rules have for them. These
    are of characters that a JSON string can contain without an escape."""

    rules: dict[str, Node]
    patterns: dict[str, str]


def parse_printed(grammar: str) -> PrintedGrammar:
    """What `str(xgrammar.Grammar...)` prints. Look-ahead is left out: xgrammar puts it where it
    holds anyway, so that it can prepare masks.

    Raises: as `syntax.parse`.
    """
    parser = _PrintedParser(tokens_of(grammar, _TOKEN))
    return PrintedGrammar(parser.rules(), parser.patterns)


class _PrintedParser(Parser):
    def __init__(self, tokens: list[Token]) -> None:
        super().__init__(tokens)
        self.patterns: dict[str, str] = {}

    def rule(self) -> tuple[str, Node]:
        name, body = super().rule()
        if self._is_at_look_ahead:
            self.take("(")
            self.take("equals")
            self._choice()
            self.take(")")
        return name, body

    @property
    def _is_at_look_ahead(self) -> bool:
        return self.kind == "(" and self.tokens[self.position + 1].kind == "equals"

    def _ends_sequence(self) -> bool:
        return super()._ends_sequence() or self._is_at_look_ahead

    def _bounds(self) -> tuple[int, int | None]:
        if self.tokens[self.position + 3].kind != "minus":
            return super()._bounds()
        self.take("{")
        low = self._number()
        self.take(",")
        self.take("minus")
        self.take("}")
        return low, None

    def _element(self) -> Node:
        if self.kind != "name" or self.tokens[self.position].value != "Regex":
            return super()._element()
        self.take("name")
        self.take("(")
        regex = text_of(self.take("text")).decode(errors="surrogatepass")
        self.take(",")
        option = [self.take("name"), self.take("equals"), self.take("name")]
        self.take(")")
        if option != ["json_string", "=", "true"]:
            self.refuse()
        name = f"Regex({len(self.patterns)})"  # no rule has this name
        self.patterns[name] = regex
        return Reference(name)
