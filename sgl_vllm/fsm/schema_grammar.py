r"""The grammar that xgrammar makes of a schema -> an expression.

Owns the schemas that are read as xgrammar reads them, whatever it makes of their keywords, because
the grammar that it prints says so: of JSON, and of arguments in XML, which some models write.
`schema/` compiles JSON whose keywords it knows, in less time. Pure: it is given the grammar.

    root        ::= "{" ws "\"a\"" ws ":" ws root_prop_0 ws "}"     a sequence: literals, blanks
    root_prop_0 ::= [1-9] [0-9]*                                    an automaton: no punctuation

What `schema/` would make of a text is made here too, so that terminals, and what is known about
tokens in them, are shared: strings are `JsonString`, blanks and numbers are automata.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from sgl_vllm.fsm import regex
from sgl_vllm.fsm.byte_dfa import ByteDfa
from sgl_vllm.fsm.characters import ANY
from sgl_vllm.fsm.ebnf.network import ROOT
from sgl_vllm.fsm.ebnf.printed import PrintedGrammar, parse_printed
from sgl_vllm.fsm.errors import TooComplexError, UnsupportedGrammarError
from sgl_vllm.fsm.expressions import EMPTY, Alt, Expression, Lazy, Seq, literal
from sgl_vllm.fsm.free_text import begins_in, free_text
from sgl_vllm.fsm.json_string import RAW_STRING, STRING, JsonString
from sgl_vllm.fsm.nfa import cached_dfa
from sgl_vllm.fsm.small_cache import cached_if_few
from sgl_vllm.fsm.syntax import (
    CharacterClass,
    Choice,
    Node,
    Reference,
    Repetition,
    Sequence,
    Spelled,
    Text,
)
from sgl_vllm.protocol.code_points import Ranges, intersection

MAX_GRAMMAR_CHARS = 64 << 10
"""Reading this much takes some 30 ms. Larger ones are left to xgrammar."""

_PUNCTUATION = frozenset(b'{}[]:,"')
_MAX_POSITIONS = 200
"""Characters of a rule, with what is repeated counted as often. A larger rule is a structure of
smaller automata."""

_MAX_COUNT = 10_000

_STRINGS, *_ = parse_printed(r"""
basic_escape ::= (([\"\\/bfnrt]) | ("u" [A-Fa-f0-9] [A-Fa-f0-9] [A-Fa-f0-9] [A-Fa-f0-9]))
basic_string_sub ::= (("\"") | ([^\0-\x1f\"\\\r\n] basic_string_sub)
    | ("\\" basic_escape basic_string_sub))
plain ::= [^\"\\\r\n]
""")
"""How xgrammar writes the rest of a string, and a character of a string with a length."""


def compile_schema_grammar(grammar: str) -> Expression:
    """The texts that a grammar allows which xgrammar has printed for a schema.

    Cost: about a millisecond per KB. The automaton costs what is visited of it.

    Raises:
        UnsupportedGrammarError: it has a construct that is not known here.
        UnsupportedPatternError: so has one of its patterns.
        TooComplexError: it is too large.
    """
    if len(grammar) > MAX_GRAMMAR_CHARS:
        raise TooComplexError(f"the grammar has more than {MAX_GRAMMAR_CHARS:,} characters")
    try:
        printed = parse_printed(grammar)
        if ROOT not in printed.rules:
            raise UnsupportedGrammarError("no rule root")
        return _Compiler(printed).rule(ROOT)
    except RecursionError:
        raise TooComplexError("the grammar is nested too deeply") from None


class _Compiler:
    def __init__(self, printed: PrintedGrammar) -> None:
        self._rules, self._patterns, self._free_texts = rules, *_ = printed
        self._empty = _Empty(printed)
        self._expressions: dict[str, Expression] = {}
        self._regular: dict[str, _Regular | None] = {}
        self._is_string_tail = (
            rules.get("basic_escape") == _STRINGS["basic_escape"]
            and rules.get("basic_string_sub") == _STRINGS["basic_string_sub"]
        )

    def rule(self, name: str) -> Expression:
        """The expression of a rule. One for each, so that a rule may contain itself."""
        known = self._expressions.get(name)
        if known is None:
            holder: list[Expression] = []
            self._expressions[name] = Lazy(lambda: holder[0])
            known = self._made(name)
            holder.append(known)
            self._expressions[name] = known
        return known

    def _made(self, name: str) -> Expression:
        if name in self._patterns:
            return regex.full_match_in_json(self._patterns[name]).expression
        if name in self._free_texts:
            return free_text((), frozenset(self._free_texts[name])).without.expression
        if name == "basic_string_sub" and self._is_string_tail:
            return JsonString.of(STRING)
        node = self._rules[name]
        regular = self._regular_rule(name)
        if regular is not None and not isinstance(node, Text):
            return regular.expression
        return self._expression(node)

    def _expression(self, node: Node) -> Expression:
        match node:
            case Text(data):
                return literal(data)
            case CharacterClass(ranges):
                return _shared_dfa(_writable(ranges)).expression
            case Spelled():
                return _shared_dfa(node).expression
            case Reference(name):
                return self.rule(name)
            case Choice(options):
                return Alt([self._expression(option) for option in options])
            case Sequence(parts):
                return self._sequence(parts)
            case Repetition(part, low, high):
                return self._repetition(part, low, high)

    def _sequence(self, parts: tuple[Node, ...]) -> Expression:
        match parts:
            case (Text(b'"'), Repetition(part, low, high), Text(b'"')) if self._is_plain(part):
                return Seq(literal(b'"'), JsonString.of(RAW_STRING, 0, low, high))
        made: list[Expression] = []
        position = 0
        while position < len(parts):
            part, *following = parts[position : position + 2]
            word = self._excluded_word(part)
            match following:
                case [Text(data)] if word and data.startswith(word) and not begins_in(word, word):
                    made.append(free_text((word,)).until[0].expression)
                    made.append(literal(data[len(word) :]))
                    position += 2
                case _:
                    made.append(self._expression(part))
                    position += 1
        return Seq(*made)

    def _excluded_word(self, node: Node) -> bytes | None:
        """What free text must not contain, if `node` is that and it is one word."""
        while isinstance(node, Reference) and node.name in self._rules:
            node = self._rules[node.name]
        words = self._free_texts.get(node.name, ()) if isinstance(node, Reference) else ()
        return words[0] if len(words) == 1 else None

    def _is_plain(self, node: Node) -> bool:
        """Whether it is a character of a string with `minLength` or `maxLength`, of which xgrammar
        allows no escapes."""
        plain = _STRINGS["plain"]
        return node == plain or (
            isinstance(node, Reference) and self._rules.get(node.name) == plain
        )

    def _repetition(self, part: Node, low: int, high: int | None) -> Expression:
        if max(low, high or 0) > _MAX_COUNT:
            raise TooComplexError(f"a repetition of more than {_MAX_COUNT:,} times")
        regular = self._regular_part(Repetition(part, low, high))
        if regular is not None:
            return regular.expression
        if self._empty.part(part):
            raise UnsupportedGrammarError("a repetition of what may be empty")
        return _repeated(self._expression(part), low, high)

    # -- regular parts without punctuation ---------------------------------------------------------

    def _regular_rule(self, name: str) -> _Regular | None:
        if name not in self._regular:
            self._regular[name] = None  # a rule that contains itself
            if name in self._rules:
                self._regular[name] = self._regular_part(self._rules[name])
        return self._regular[name]

    def _regular_part(self, node: Node) -> _Regular | None:
        """The texts of a part; None if they are many, not regular, or have punctuation of JSON."""
        match node:
            case Text(data):
                if not data.isascii() or not _PUNCTUATION.isdisjoint(data):
                    return None
                return _limited(node, max(1, len(data)))
            case CharacterClass(ranges):
                return _limited(_writable(ranges), 1)
            case Spelled():
                return _limited(node, 1)
            case Reference(name):
                return self._regular_rule(name)
            case Choice(options):
                return _joined([self._regular_part(option) for option in options], Choice)
            case Sequence(parts):
                return _joined([self._regular_part(part) for part in parts], Sequence)
            case Repetition(part, low, high):
                inside = self._regular_part(part)
                if inside is None:
                    return None
                repeated = Repetition(inside.node, low, high)
                return _limited(repeated, inside.size * max(low, high or 1))


class _Regular(NamedTuple):
    """A regular part of a grammar, without references, and how many positions it has."""

    node: Node
    size: int

    @property
    def expression(self) -> Expression:
        return _shared_dfa(self.node).expression


def _limited(node: Node, size: int) -> _Regular | None:
    return _Regular(node, size) if size <= _MAX_POSITIONS else None


def _joined(
    parts: list[_Regular | None], join: Callable[[tuple[Node, ...]], Node]
) -> _Regular | None:
    known = [part for part in parts if part is not None]
    if len(known) < len(parts):
        return None
    return _limited(join(tuple([part.node for part in known])), sum([part.size for part in known]))


def _shared_dfa(node: Node) -> ByteDfa:
    return cached_dfa(node, lambda: node, _MAX_POSITIONS)


@cached_if_few
def _writable(ranges: Ranges) -> Node:
    """Those of the characters that UTF-8 can write."""
    return CharacterClass(intersection(ranges, ANY))


def _repeated(part: Expression, low: int, high: int | None) -> Expression:
    """`part`, from `low` to `high` times. Made as far as a walk gets."""
    if high is None and low == 0:
        loop: list[Expression] = []
        endless = Alt((EMPTY, Seq(part, Lazy(lambda: loop[0]))))
        loop.append(endless)
        return endless
    if high == 0:
        return EMPTY
    fewer = Lazy(lambda: _repeated(part, max(low - 1, 0), None if high is None else high - 1))
    once = Seq(part, fewer)
    return once if low else Alt((EMPTY, once))


class _Empty:
    """Which parts of rules may be empty.

    Raises UnsupportedGrammarError if a rule may begin with itself: no walk through it would end.
    """

    def __init__(self, printed: PrintedGrammar) -> None:
        self._rules = printed.rules
        self._known = dict.fromkeys([*printed.patterns, *printed.free_texts], True)
        self._open: set[str] = set()
        for name in self._rules:
            self.rule(name)

    def rule(self, name: str) -> bool:
        known = self._known.get(name)
        if known is None:
            if name in self._open:
                raise UnsupportedGrammarError("a rule begins with itself")
            self._open.add(name)
            known = self._known[name] = self.part(self._rules[name])
            self._open.remove(name)
        return known

    def part(self, node: Node) -> bool:
        """It looks at everything with which a text may begin."""
        match node:
            case Text(data):
                return not data
            case Reference(name):
                return self.rule(name)
            case Choice(options):
                return True in [self.part(option) for option in options]
            case Sequence(parts):
                return all(self.part(part) for part in parts)
            case Repetition(part, low, _):
                return self.part(part) or low == 0
            case CharacterClass() | Spelled():
                return False
