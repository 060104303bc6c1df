"""The regular parts of a parsed grammar, each of which becomes one automaton.

    number ::= "-"? digits     digits ::= [0-9] | [0-9] digits      is      -?[0-9]*[0-9]

Owns which parts these are: without punctuation of JSON, where structure helps more, and not large.
Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from sgl_vllm.fsm.expressions import Expression
from sgl_vllm.fsm.nfa import cached_dfa, dfa_of
from sgl_vllm.fsm.parsed_grammar import Kind, ParsedGrammar, bytes_of
from sgl_vllm.fsm.small_cache import cached_if_few
from sgl_vllm.fsm.syntax import Choice, Node, Repetition, Sequence, Text, one_of
from sgl_vllm.protocol.code_points import complement, normalized

_PUNCTUATION = frozenset(b'{}[]:,"')
_MAX_POSITIONS = 200
"""How many characters a regular part may have, where a part that is repeated five times counts five
times. A larger one is split into smaller automata."""

_MAX_DEPTH = 100
"""Of a regular part, in rules and brackets."""


class RegularPart(NamedTuple):
    """A regular part of a grammar, without references, and how many positions it has."""

    node: Node
    size: int

    @property
    def expression(self) -> Expression:
        return cached_dfa(self.node, lambda: dfa_of(self.node), _MAX_POSITIONS).expression


class RegularParts:
    """Finds the regular parts of one grammar, each once."""

    def __init__(self, grammar: ParsedGrammar) -> None:
        self._grammar = grammar
        self._known: dict[int, RegularPart | None] = {}
        self._depth = 0

    def of(self, number: int) -> RegularPart | None:
        """The texts of a part; None if they are many, not regular, or have punctuation of JSON."""
        if number not in self._known:
            if self._depth > _MAX_DEPTH:
                return None
            self._known[number] = None  # a rule that contains itself
            self._depth += 1
            self._known[number] = self._found(number)
            self._depth -= 1
        return self._known[number]

    def _found(self, number: int) -> RegularPart | None:
        kind, *numbers = self._grammar.numbers(number)
        match kind:
            case Kind.BYTES:
                data = bytes_of(numbers)
                if not data.isascii() or not _PUNCTUATION.isdisjoint(data):
                    return None
                return _limited(Text(data), max(1, len(data)))
            case Kind.EMPTY:
                return RegularPart(Text(b""), 1)
            case Kind.CLASS | Kind.CLASS_STAR:
                return _limited(class_node(kind, numbers), max(1, len(numbers) // 2))
            case Kind.RULE:
                return self.of_rule(numbers[0])
            case Kind.SEQUENCE:
                return self._joined(numbers, Sequence)
            case Kind.CHOICE:
                return self._joined(numbers, Choice)
            case Kind.REPEAT:
                rule, low, high = numbers
                inside = self.of_rule(rule)
                if inside is None:
                    return None
                repeated = Repetition(inside.node, low, None if high < 0 else high)
                return _limited(repeated, inside.size * max(low, high, 1))
            case _:
                return None

    def of_rule(self, rule: int) -> RegularPart | None:
        """As `of`. A rule that ends with itself is a loop, which is how xgrammar writes
        those: `x*` is `r ::= "" | x r`."""
        body = self._grammar.bodies[rule]
        if body in self._known or self._grammar.kinds[body] != Kind.CHOICE:
            return self.of(body)
        options = [self._grammar.parts(one) for one in self._grammar.numbers(body)[1:]]
        again = [option for option in options if option and self._grammar.is_rule(option[-1], rule)]
        if not again:
            return self.of(body)
        self._known[body] = None  # a rule that contains itself elsewhere
        loops = [self._joined(option[:-1], Sequence) for option in again]
        ends = [self._joined(option, Sequence) for option in options if option not in again]
        known = [one for one in (*loops, *ends) if one is not None]
        if ends and len(known) == len(options):
            loop = Choice(tuple([one.node for one in known[: len(loops)]]))
            end = Choice(tuple([one.node for one in known[len(loops) :]]))
            whole = Sequence((Repetition(loop, 0, None), end))
            self._known[body] = _limited(whole, sum([one.size for one in known]))
        return self._known[body]

    def _joined(
        self, numbers: Iterable[int], join: Callable[[tuple[Node, ...]], Node]
    ) -> RegularPart | None:
        found: list[RegularPart] = []
        for number in numbers:
            part = self.of(number)
            if part is None:
                return None
            found.append(part)
        if len(found) == 1:
            return found[0]
        return _limited(join(tuple([one.node for one in found])), sum([one.size for one in found]))


def class_node(kind: int, numbers: list[int]) -> Node:
    """The tree of a class, or of any number of its members."""
    node = _class(tuple(numbers))
    return node if kind == Kind.CLASS else Repetition(node, 0, None)


@cached_if_few
def _class(numbers: tuple[int, ...]) -> Node:
    is_negated, *ends = numbers
    ranges = normalized(zip(ends[::2], ends[1::2], strict=True))
    return one_of(complement(ranges, has_surrogates=True) if is_negated else ranges)


def _limited(node: Node, size: int) -> RegularPart | None:
    return RegularPart(node, size) if size <= _MAX_POSITIONS else None
