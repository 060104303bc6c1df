"""The grammars that xgrammar prints, in a syntax that it does not read itself.

Owns what that syntax has beyond xgrammar's EBNF: look-ahead, patterns, free text, and repetitions
without a limit. Pure.

    root    ::= (("\\"" root_1{2, -1} "\\"" items)) (=([ \\n]* [,}]))
    root_1  ::= Regex("^[a-z]$", json_string=true)
    value   ::= TagDispatch(loop_after_dispatch=false, excludes=("</value>"))
"""

from __future__ import annotations

import re
from typing import NamedTuple

from sgl_vllm.fsm.ebnf.syntax import TOKEN, Parser, Token, text_of, tokens_of
from sgl_vllm.fsm.syntax import Node, Reference

_TOKEN = re.compile(rf"(?P<minus> -1 ) | (?P<equals> = ) | {TOKEN.pattern}", re.VERBOSE)


class PrintedGrammar(NamedTuple):
    """The rules by name.

    Attributes:
        patterns: regular expressions, by the names that rules refer to them by. They are of
            characters that a JSON string can contain without an escape.
        free_texts: the words that a free text must not contain, by names of the same kind.
    """

    rules: dict[str, Node]
    patterns: dict[str, str]
    free_texts: dict[str, tuple[bytes, ...]]


def parse_printed(grammar: str) -> PrintedGrammar:
    """What `str(xgrammar.Grammar...)` prints. Look-ahead is left out: xgrammar puts it where it
    holds anyway, so that it can prepare masks.

    Raises: as `syntax.parse`.
    """
    parser = _PrintedParser(tokens_of(grammar, _TOKEN))
    return PrintedGrammar(parser.rules(), parser.patterns, parser.free_texts)


class _PrintedParser(Parser):
    def __init__(self, tokens: list[Token]) -> None:
        super().__init__(tokens)
        self.patterns: dict[str, str] = {}
        self.free_texts: dict[str, tuple[bytes, ...]] = {}

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
        match self.tokens[self.position]:
            case Token("name", "Regex"):
                return self._pattern()
            case Token("name", "TagDispatch"):
                return self._free_text()
        return super()._element()

    def _pattern(self) -> Reference:
        self.take("name")
        self.take("(")
        regex = text_of(self.take("text")).decode(errors="surrogatepass")
        self.take(",")
        self._option("json_string", "true")
        self.take(")")
        name = f"Regex({len(self.patterns)})"  # no rule has this name
        self.patterns[name] = regex
        return Reference(name)

    def _free_text(self) -> Reference:
        self.take("name")
        self.take("(")
        self._option("loop_after_dispatch", "false")
        self.take(",")
        self._name("excludes")
        self.take("equals")
        self.take("(")
        excluded = [text_of(self.take("text"))]
        while self.kind == ",":
            self.take(",")
            excluded.append(text_of(self.take("text")))
        self.take(")")
        self.take(")")
        name = f"TagDispatch({len(self.free_texts)})"
        self.free_texts[name] = tuple(excluded)
        return Reference(name)

    def _option(self, name: str, value: str) -> None:
        self._name(name)
        self.take("equals")
        self._name(value)

    def _name(self, name: str) -> None:
        if self.take("name") != name:
            self.refuse()
