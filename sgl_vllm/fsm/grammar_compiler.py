r"""The grammar that xgrammar makes of a format -> an expression.

Owns the formats that are read as xgrammar reads them, whatever it makes of their keywords, because
its own grammar says so: JSON, grammars, and structural tags. Pure: it is given the grammar.

    root        ::= "{" ws "\"a\"" ws ":" ws root_prop_0 ws "}"     a sequence: literals, blanks
    root_prop_0 ::= [1-9] [0-9]*                                    an automaton: no punctuation

Terminals are those of `schema/`, so that what is known about tokens in them is shared: strings are
`JsonString`, blanks and numbers are automata.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import chain

import numpy as np

from sgl_vllm.fsm.byte_dfa import ByteDfa
from sgl_vllm.fsm.expressions import EMPTY, Alt, Expression, Lazy, Literals, Seq, literal
from sgl_vllm.fsm.free_text import begins_in, free_text
from sgl_vllm.fsm.json_string import RAW_STRING, STRING, JsonString
from sgl_vllm.fsm.nfa import cached_dfa, dfa_of, dfa_of_transitions
from sgl_vllm.fsm.parsed_grammar import Kind, ParsedGrammar, Parts, Pattern, bytes_of
from sgl_vllm.fsm.regex import of_pattern
from sgl_vllm.fsm.regular_parts import RegularParts, class_node

_ESCAPE = (1, 17, 0, 34, 34, 92, 92, 47, 47, 98, 98, 102, 102, 110, 110, 114, 114, 116, 116)
_HEX_DIGIT = (1, 7, 0, 65, 70, 97, 102, 48, 57)
_STRING_REST = (
    *((6, 3), (5, 1), (5, 2), (5, 3)),
    *((0, 1, 34), (1, 11, 1, 0, 31, 34, 34, 92, 92, 13, 13, 10, 10), (4, 0)),
    *((0, 1, 92), (4, 1), (4, 0)),
    *((6, 2), (5, 1), (5, 5), _ESCAPE, (0, 1, 117), *[_HEX_DIGIT] * 4),
)
"""How xgrammar writes the rest of a JSON string: the expressions of its rule, breadth first. For a
sequence or a choice, only its length is listed. Rules are numbered in order of appearance."""

_PLAIN = (1, 9, 1, 34, 34, 92, 92, 13, 13, 10, 10)
"""A character of a string with a length, of which xgrammar allows no escapes."""


def compile_parsed(
    grammar: ParsedGrammar, marks: Mapping[bytes, Expression] | None = None
) -> Expression:
    """The texts that a grammar allows.

    Cost: some microseconds per KB, and what its patterns and free texts take. All else is made when
    a walk reaches it.

    Args:
        marks: texts that stand for an expression where they are the whole text of a rule.

    Raises:
        UnsupportedGrammarError: it has a construct that is not known here.
        TooComplexError: it, or one of its patterns, is too large.
    """
    compiler = _Compiler(grammar, marks or {})
    for number in grammar.checked():
        compiler.expression(number)
    return compiler.rule(grammar.root)


class _Compiler:
    """Makes the expressions of one grammar, each once, so that a rule may contain itself."""

    def __init__(self, grammar: ParsedGrammar, marks: Mapping[bytes, Expression]) -> None:
        self._marks = marks
        self._grammar = grammar
        self._regular = RegularParts(grammar)
        self._rules: dict[int, Expression] = {}
        self._expressions: dict[int, Expression] = {}
        self._sequences: dict[Parts, Expression] = {}
        self._known_alternatives: dict[int, tuple[Parts, ...]] = {}
        self._structures: dict[int, int | None] = {}

    def rule(self, rule: int) -> Expression:
        known = self._rules.get(rule)
        if known is None:
            known = self._rules[rule] = Lazy(self._rule, rule)
        return known

    def _rule(self, rule: int) -> Expression:
        if self._is_string_rest(rule):
            return JsonString.of(STRING)
        again, first = self._begun_by_itself(rule)
        if not again:
            return self.expression(self._grammar.bodies[rule])
        once = self._choice(self._options(first))
        more = [
            Seq(self._sequence(parts[:-1]), once)
            if parts and self._grammar.is_rule(parts[-1], rule)
            else self._sequence(parts)
            for parts in again
        ]
        return Seq(once, _repeated(Alt(more), 0, None))

    def _begun_by_itself(self, rule: int) -> tuple[list[Parts], list[Parts]]:
        """What follows the rule in those of its options that begin with it, and the other options.

        expr ::= expr "+" expr | num      is      num ("+" num)*
        """
        options = self._alternatives(self._grammar.bodies[rule])
        again = [one for one in options if one and self._grammar.is_rule(one[0], rule)]
        return [one[1:] for one in again], [one for one in options if one not in again]

    def expression(self, number: int) -> Expression:
        known = self._expressions.get(number)
        if known is None:
            known = self._expressions[number] = self._made(number)
        return known

    def _made(self, number: int) -> Expression:
        kind, *numbers = self._grammar.numbers(number)
        if kind != Kind.BYTES and self._regular.includes(number):
            return self._regular.expression(number)
        match kind:
            case Kind.BYTES:
                data = bytes_of(numbers)
                return self._marks.get(data) or literal(data)
            case Kind.RULE:
                return self.rule(numbers[0])
            case Kind.SEQUENCE:
                return self._sequence(self._grammar.parts(number))
            case Kind.CHOICE:
                return self._choice(self._options(self._alternatives(number)))
            case Kind.REPEAT:
                rule, low, high = numbers
                return _repeated(self.rule(rule), low, None if high < 0 else high)
            case Kind.TAGS:
                return self._free_text(numbers)
            case Kind.CLASS | Kind.CLASS_STAR:  # a large one
                return dfa_of(class_node(kind, numbers)).expression
            case _:
                return _dfa_of(self._grammar.patterns[number]).expression

    def _is_string_rest(self, rule: int) -> bool:
        """Whether a rule is the rest of a JSON string after its opening quote."""
        shape: list[tuple[int, ...]] = []
        pending = [self._grammar.bodies[rule]]
        known = {rule: 0}
        for number in pending:  # grows on the way
            kind, *numbers = self._grammar.numbers(number)
            if kind == Kind.RULE:
                if numbers[0] not in known:
                    known[numbers[0]] = len(known)
                    pending.append(self._grammar.bodies[numbers[0]])
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

    def _options(self, among: Iterable[Parts]) -> list[Parts]:
        """What a choice is between. A rule that is an option becomes its own options, unless other
        options begin with it."""
        options: dict[Parts, None] = {}
        key = self._grammar.key
        pending = [*among]
        begun = Counter([key(option[0]) for option in pending if option])
        inlined: set[int] = set()
        while pending:
            option = pending.pop()
            rule = self._structure(option)
            if rule is None or rule in inlined or begun[key(option[0])] > 1:
                options[option] = None
                continue
            inlined.add(rule)
            inside = self._alternatives(self._grammar.bodies[rule])
            begun.update([key(one[0]) for one in inside if one])
            pending += inside
        return [*options]

    def _alternatives(self, number: int) -> tuple[Parts, ...]:
        known = self._known_alternatives.get(number)
        if known is None:
            kind, *numbers = self._grammar.numbers(number)
            if kind == Kind.CHOICE and not self._regular.includes(number):
                inside = [self._alternatives(one) for one in reversed(numbers)]
                known = tuple(chain.from_iterable(inside))
            elif kind == Kind.SEQUENCE and len(numbers) == 1:
                known = self._alternatives(numbers[0])
            else:
                known = (self._grammar.parts(number),)
            self._known_alternatives[number] = known
        return known

    def _structure(self, option: Parts) -> int | None:
        """The rule that an option is, if it is one, and that rule is a structure."""
        if len(option) != 1:
            return None
        (number,) = option
        if number not in self._structures:
            kind, rule, *_ = *self._grammar.numbers(number), -1
            is_structure = (
                kind == Kind.RULE
                and not self._is_string_rest(rule)
                and not self._begun_by_itself(rule)[0]
                and not self._regular.includes_rule(rule)
            )
            self._structures[number] = rule if is_structure else None
        return self._structures[number]

    def _choice(self, options: Iterable[Parts]) -> Expression:
        """Any of several sequences. What they begin with in common is written once."""
        begun: dict[bytes, tuple[int, list[Parts]]] = {}
        made: list[Expression] = []
        for option in options:
            if option:
                first, *rest = option
                begun.setdefault(self._grammar.key(first), (first, []))[1].append(tuple(rest))
            else:
                made.append(EMPTY)
        texts: list[tuple[bytes, Expression | None]] = []
        for first, rests in begun.values():
            kind, *numbers = self._grammar.numbers(first)
            if kind == Kind.BYTES and bytes_of(numbers) not in self._marks:
                texts.append((bytes_of(numbers), self._following(rests)))
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
        return Lazy(self._choice, tuple(rests))

    def _sequence(self, parts: Parts) -> Expression:
        """As `_new_sequence`, made when a walk reaches it, and the same for the same parts."""
        known = self._sequences.get(parts)
        if known is None:
            known = self._sequences[parts] = Lazy(self._new_sequence, parts)
        return known

    def _new_sequence(self, parts: Parts) -> Expression:
        made: list[Expression] = []
        position = 0
        while position < len(parts):
            part, *following = parts[position : position + 2]
            text = self._grammar.text(following[0]) if following else b""
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

    def _limits_of_plain(self, number: int) -> tuple[int, int | None] | None:
        """How often a character of a string with `minLength` or `maxLength` is repeated."""
        kind, *numbers = self._grammar.numbers(number)
        if (
            kind != Kind.REPEAT
            or self._grammar.resolved(self._grammar.bodies[numbers[0]]) != _PLAIN
        ):
            return None
        _, low, high = numbers
        return low, None if high < 0 else high

    # -- free text ---------------------------------------------------------------------------------

    def _free_text(self, numbers: list[int]) -> Expression:
        """Free text up to one of several words, what follows it, and maybe free text again."""
        *pairs, is_repeated, _ = numbers
        words = {
            self._grammar.text(word): rule
            for word, rule in zip(pairs[::2], pairs[1::2], strict=True)
        }
        found = {*self._excluded(numbers)}  # a text without the shortest of them has none
        excluded = frozenset(one for one in found if not any(w in one for w in found - {one}))
        words = {one: rule for one, rule in words.items() if not any(w in one for w in excluded)}
        if not words and not excluded:
            return of_pattern(r"[\s\S]*").expression
        text = free_text(tuple(words), excluded)
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
        return [self._grammar.text(one) for one in self._grammar.numbers(numbers[-1])[1:]]

    def _excluded_word(self, number: int) -> bytes | None:
        """What free text must not contain, if an expression is that and it is one word."""
        kind, _, *numbers = self._grammar.resolved(number)
        if kind != Kind.TAGS or len(numbers) != 2:
            return None
        words = self._excluded(numbers)
        return words[0] if len(words) == 1 else None


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


def _repeated(part: Expression, low: int, high: int | None) -> Expression:
    """`part`, from `low` to `high` times. Made as far as a walk gets."""
    if high is None and low == 0:
        loop: list[Expression] = []
        endless = Alt((EMPTY, Seq(part, Lazy(lambda: loop[0]))))
        loop.append(endless)
        return endless
    if high == 0:
        return EMPTY
    fewer = Lazy(_repeated, part, max(low - 1, 0), None if high is None else high - 1)
    once = Seq(part, fewer)
    return once if low else Alt((EMPTY, once))
