r"""The grammar that xgrammar makes of a format -> an expression.

Owns the formats that are read as xgrammar reads them, whatever it makes of their keywords, because
its own grammar says so: JSON, arguments in XML, which some models write, and grammars. Pure: it is
given the grammar.

    root        ::= "{" ws "\"a\"" ws ":" ws root_prop_0 ws "}"     a sequence: literals, blanks
    root_prop_0 ::= [1-9] [0-9]*                                    an automaton: no punctuation

What `schema/` would make of a text is made here too, so that terminals, and what is known about
tokens in them, are shared: strings are `JsonString`, blanks and numbers are automata.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import numpy as np

from sgl_vllm.fsm.byte_dfa import ByteDfa
from sgl_vllm.fsm.characters import ANY
from sgl_vllm.fsm.expressions import EMPTY, Alt, Expression, Lazy, Literals, Seq, literal
from sgl_vllm.fsm.free_text import begins_in, free_text
from sgl_vllm.fsm.json_string import RAW_STRING, STRING, JsonString
from sgl_vllm.fsm.nfa import cached_dfa, dfa_of, dfa_of_transitions
from sgl_vllm.fsm.parsed_grammar import Kind, ParsedGrammar, Pattern
from sgl_vllm.fsm.regex import of_pattern
from sgl_vllm.fsm.small_cache import cached_if_few
from sgl_vllm.fsm.syntax import CharacterClass, Choice, Node, Repetition, Sequence, Text
from sgl_vllm.protocol.code_points import Ranges, complement, intersection, normalized

_PUNCTUATION = frozenset(b'{}[]:,"')
_MAX_POSITIONS = 200
"""Characters of a rule, with what is repeated counted as often. A larger rule is a structure of
smaller automata."""

_ESCAPE = (1, 17, 0, 34, 34, 92, 92, 47, 47, 98, 98, 102, 102, 110, 110, 114, 114, 116, 116)
_HEX_DIGIT = (1, 7, 0, 65, 70, 97, 102, 48, 57)
_STRING_REST = (
    *((6, 3), (5, 1), (5, 2), (5, 3)),
    *((0, 1, 34), (1, 11, 1, 0, 31, 34, 34, 92, 92, 13, 13, 10, 10), (4, 0)),
    *((0, 1, 92), (4, 1), (4, 0)),
    *((6, 2), (5, 1), (5, 5), _ESCAPE, (0, 1, 117), *[_HEX_DIGIT] * 4),
)
"""How xgrammar writes the rest of a JSON string, as `_Compiler._shape` of its rule."""

_PLAIN = (1, 9, 1, 34, 34, 92, 92, 13, 13, 10, 10)
"""A character of a string with a length, of which xgrammar allows no escapes."""

Parts: TypeAlias = "tuple[int, ...]"
"""Expressions, one after another."""


def compile_parsed(grammar: ParsedGrammar) -> Expression:
    """The texts that a grammar allows.

    Cost: some microseconds per KB, and what its patterns take. All else is made when a walk
    reaches it.

    Raises:
        UnsupportedGrammarError: it has a construct that is not known here.
        TooComplexError: it, or one of its patterns, is too large.
    """
    compiler = _Compiler(grammar)
    for pattern in grammar.checked():
        compiler.expression(pattern)
    return compiler.rule(grammar.root)


class _Compiler:
    """Makes the expressions of one grammar, each once, so that a rule may contain itself."""

    def __init__(self, grammar: ParsedGrammar) -> None:
        self._data, self._begins = grammar.data, grammar.begins
        self._patterns = grammar.patterns
        self._bodies: list[int] = grammar.bodies.tolist()
        self._rules: dict[int, Expression] = {}
        self._expressions: dict[int, Expression] = {}
        self._sequences: dict[Parts, Expression] = {}
        self._regular: dict[int, _Regular | None] = {}

    def rule(self, rule: int) -> Expression:
        known = self._rules.get(rule)
        if known is None:
            known = self._rules[rule] = Lazy(lambda: self._rule(rule))
        return known

    def _rule(self, rule: int) -> Expression:
        if self._is_string_rest(rule):
            return JsonString.of(STRING)
        return self.expression(self._bodies[rule])

    def expression(self, number: int) -> Expression:
        known = self._expressions.get(number)
        if known is None:
            known = self._expressions[number] = self._made(number)
        return known

    def _made(self, number: int) -> Expression:
        kind, *numbers = self._numbers(number)
        if kind != Kind.BYTES:
            regular = self._regular_part(number)
            if regular is not None:
                return regular.expression
        match kind:
            case Kind.BYTES:
                return literal(bytes(numbers))
            case Kind.RULE:
                return self.rule(numbers[0])
            case Kind.SEQUENCE:
                return self._sequence(self._parts(number))
            case Kind.CHOICE:
                return self._choice(self._options(number))
            case Kind.REPEAT:
                rule, low, high = numbers
                return _repeated(self.rule(rule), low, None if high < 0 else high)
            case Kind.TAGS:
                return self._free_text(numbers)
            case _:
                return _dfa_of(self._patterns[number]).expression

    def _numbers(self, number: int) -> list[int]:
        """The kind of an expression, and the numbers that follow it."""
        kind, _, *numbers = self._data[self._begins[number] : self._begins[number + 1]].tolist()
        return [kind, *numbers]

    def _is_string_rest(self, rule: int) -> bool:
        """Whether a rule is the rest of a JSON string after its opening quote."""
        shape: list[tuple[int, ...]] = []
        pending = [self._bodies[rule]]
        known = {rule: 0}
        for number in pending:  # grows on the way
            kind, *numbers = self._numbers(number)
            if kind == Kind.RULE:
                if numbers[0] not in known:
                    known[numbers[0]] = len(known)
                    pending.append(self._bodies[numbers[0]])
                shape.append((kind, known[numbers[0]]))
            elif kind in (Kind.SEQUENCE, Kind.CHOICE):
                shape.append((kind, len(numbers)))
                pending += numbers
            else:
                shape.append((kind, len(numbers), *numbers))
            if len(shape) > len(_STRING_REST) or shape[-1] != _STRING_REST[len(shape) - 1]:
                return False
        return True

    # -- sequences and choices ---------------------------------------------------------------------

    def _parts(self, number: int) -> Parts:
        """What an expression is a sequence of, without parts that are empty."""
        kind, *numbers = self._numbers(number)
        if kind == Kind.SEQUENCE:
            return tuple([part for one in numbers for part in self._parts(one)])
        return () if kind == Kind.EMPTY or (kind == Kind.BYTES and not numbers) else (number,)

    def _options(self, number: int) -> list[Parts]:
        """What a choice is between. Rules that are nothing but choices are part of it."""
        options: dict[Parts, None] = {}
        pending = [number]
        seen = {number}
        while pending:
            number = pending.pop()
            kind, *numbers = self._numbers(number)
            if kind == Kind.CHOICE and self._regular_part(number) is None:
                inside = numbers
            elif kind == Kind.RULE and self._is_structure(numbers[0]):
                inside = [self._bodies[numbers[0]]]
            elif kind == Kind.SEQUENCE and len(numbers) == 1:
                inside = numbers
            else:
                options[self._parts(number)] = None
                continue
            pending += [one for one in reversed(inside) if one not in seen]
            seen.update(inside)
        return [*options]

    def _is_structure(self, rule: int) -> bool:
        return not self._is_string_rest(rule) and self._regular_part(self._bodies[rule]) is None

    def _choice(self, options: list[Parts]) -> Expression:
        """Any of several sequences. What they begin with in common is written once."""
        begun: dict[bytes, tuple[int, list[Parts]]] = {}
        made: list[Expression] = []
        for option in options:
            if option:
                first, *rest = option
                key = self._data[self._begins[first] : self._begins[first + 1]].tobytes()
                begun.setdefault(key, (first, []))[1].append(tuple(rest))
            else:
                made.append(EMPTY)
        texts: list[tuple[bytes, Expression | None]] = []
        for first, rests in begun.values():
            kind, *numbers = self._numbers(first)
            if kind == Kind.BYTES:
                texts.append((bytes(numbers), self._following(rests)))
            elif len(rests) == 1:
                made.append(self._sequence((first, *rests[0])))
            else:
                made.append(Seq(self.expression(first), self._following(rests)))
        if texts:
            made.append(Literals(tuple(texts)))
        return made[0] if len(made) == 1 else Alt(made)

    def _following(self, rests: list[Parts]) -> Expression:
        if len(rests) == 1:
            return self._sequence(rests[0])
        return Lazy(lambda: self._choice(rests))

    def _sequence(self, parts: Parts) -> Expression:
        known = self._sequences.get(parts)
        if known is None:
            known = self._sequences[parts] = self._new_sequence(parts)
        return known

    def _new_sequence(self, parts: Parts) -> Expression:
        made: list[Expression] = []
        position = 0
        while position < len(parts):
            part, *following = parts[position : position + 2]
            text = self._text(following[0]) if following else b""
            word = self._excluded_word(part)
            if text.startswith(b'"') and (limits := self._limits_of_plain(part)):
                made += [JsonString.of(RAW_STRING, 0, *limits), literal(text[1:])]
                position += 2
            elif word and text.startswith(word) and not begins_in(word, word):
                made += [free_text((word,)).until[0].expression, literal(text[len(word) :])]
                position += 2
            else:
                made.append(self.expression(part))
                position += 1
        return made[0] if len(made) == 1 else Seq(*made)

    def _text(self, number: int) -> bytes:
        kind, *numbers = self._numbers(number)
        return bytes(numbers) if kind == Kind.BYTES else b""

    def _limits_of_plain(self, number: int) -> tuple[int, int | None] | None:
        """How often a character of a string with `minLength` or `maxLength` is repeated."""
        kind, *numbers = self._numbers(number)
        if kind != Kind.REPEAT or self._resolved(self._bodies[numbers[0]]) != _PLAIN:
            return None
        _, low, high = numbers
        return low, None if high < 0 else high

    def _resolved(self, number: int) -> tuple[int, ...]:
        """The expression behind rules, choices and sequences of one."""
        kind, *numbers = self._numbers(number)
        while kind in (Kind.RULE, Kind.SEQUENCE, Kind.CHOICE) and len(numbers) == 1:
            number = self._bodies[numbers[0]] if kind == Kind.RULE else numbers[0]
            kind, *numbers = self._numbers(number)
        return kind, len(numbers), *numbers

    # -- free text ---------------------------------------------------------------------------------

    def _free_text(self, numbers: list[int]) -> Expression:
        """Free text up to one of several words, what follows it, and maybe free text again."""
        *pairs, is_repeated, _ = numbers
        words = {self._text(word): rule for word, rule in zip(pairs[::2], pairs[1::2], strict=True)}
        excluded = frozenset(self._excluded(numbers))
        if not words and not excluded:
            return of_pattern(r"[\s\S]*").expression
        text = free_text(tuple(words), excluded - words.keys())
        again: Expression = Lazy(lambda: whole) if is_repeated else EMPTY
        whole = Alt(
            [
                text.without.expression,
                *[
                    Seq(until.expression, self.rule(rule), again)
                    for until, rule in zip(text.until, words.values(), strict=True)
                ],
            ]
        )
        return whole

    def _excluded(self, numbers: list[int]) -> list[bytes]:
        """What free text must not contain."""
        return [self._text(one) for one in self._numbers(numbers[-1])[1:]]

    def _excluded_word(self, number: int) -> bytes | None:
        """What free text must not contain, if an expression is that and it is one word."""
        kind, _, *numbers = self._resolved(number)
        if kind != Kind.TAGS or len(numbers) != 2:
            return None
        words = self._excluded(numbers)
        return words[0] if len(words) == 1 else None

    # -- regular parts without punctuation ---------------------------------------------------------

    def _regular_part(self, number: int) -> _Regular | None:
        """The texts of a part; None if they are many, not regular, or have punctuation of JSON."""
        if number not in self._regular:
            self._regular[number] = None  # a rule that contains itself
            self._regular[number] = self._new_regular_part(number)
        return self._regular[number]

    def _new_regular_part(self, number: int) -> _Regular | None:
        kind, *numbers = self._numbers(number)
        match kind:
            case Kind.BYTES:
                data = bytes(numbers)
                if not data.isascii() or not _PUNCTUATION.isdisjoint(data):
                    return None
                return _limited(Text(data), max(1, len(data)))
            case Kind.EMPTY:
                return _Regular(Text(b""), 1)
            case Kind.CLASS:
                return _Regular(_class(tuple(numbers)), 1)
            case Kind.CLASS_STAR:
                return _Regular(Repetition(_class(tuple(numbers)), 0, None), 1)
            case Kind.RULE:
                return self._regular_part(self._bodies[numbers[0]])
            case Kind.SEQUENCE:
                return self._joined(numbers, Sequence)
            case Kind.CHOICE:
                return self._joined(numbers, Choice)
            case Kind.REPEAT:
                rule, low, high = numbers
                inside = self._regular_part(self._bodies[rule])
                if inside is None:
                    return None
                repeated = Repetition(inside.node, low, None if high < 0 else high)
                return _limited(repeated, inside.size * max(low, high, 1))
            case _:
                return None

    def _joined(
        self, numbers: list[int], join: Callable[[tuple[Node, ...]], Node]
    ) -> _Regular | None:
        found: list[_Regular] = []
        for number in numbers:
            part = self._regular_part(number)
            if part is None:
                return None
            found.append(part)
        if len(found) == 1:
            return found[0]
        return _limited(join(tuple([one.node for one in found])), sum([one.size for one in found]))


class _Regular(NamedTuple):
    """A regular part of a grammar, without references, and how many positions it has."""

    node: Node
    size: int

    @property
    def expression(self) -> Expression:
        return cached_dfa(self.node, lambda: dfa_of(self.node), _MAX_POSITIONS).expression


def _dfa_of(pattern: Pattern) -> ByteDfa:
    """The same automaton for the same pattern."""
    num_bytes = pattern.edges.nbytes
    key = pattern.start, pattern.ends.tobytes(), pattern.edges.tobytes()
    return cached_dfa(key, lambda: _made_dfa(pattern), num_bytes)


def _made_dfa(pattern: Pattern) -> ByteDfa:
    """With a start of its own, 0, and one end."""
    edges, ends = pattern.edges + np.array([1, 0, 0, 1]), pattern.ends + 1
    last = int(max(edges[:, [0, 3]].max(initial=0), ends.max(initial=0), pattern.start + 1)) + 1
    is_empty = edges[:, 1] < 0
    empties = [[0, pattern.start + 1], *[[end, last] for end in ends.tolist()]]
    return dfa_of_transitions(
        last + 1,
        np.ascontiguousarray(edges[~is_empty], np.int32),
        np.concatenate([np.array(empties, np.int32), edges[is_empty][:, [0, 3]].astype(np.int32)]),
        last,
    )


def _limited(node: Node, size: int) -> _Regular | None:
    return _Regular(node, size) if size <= _MAX_POSITIONS else None


@cached_if_few
def _class(numbers: tuple[int, ...]) -> Node:
    """A class of characters, as far as UTF-8 can write them."""
    is_negated, *ends = numbers
    ranges: Ranges = normalized([*zip(ends[::2], ends[1::2], strict=True)])
    return CharacterClass(complement(ranges) if is_negated else intersection(ranges, ANY))


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
