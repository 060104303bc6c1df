"""The regular parts of a parsed grammar, each of which becomes one automaton.

    number ::= "-"? digits     digits ::= [0-9] | [0-9] digits      is      -?[0-9]*[0-9]

Owns which parts these are: without punctuation of JSON, where structure helps more, and not large.
Pure.
"""

from __future__ import annotations

from collections.abc import Iterable

from sgl_vllm.fsm.expressions import Expression
from sgl_vllm.fsm.nfa import cached_dfa, dfa_of
from sgl_vllm.fsm.parsed_grammar import Kind, ParsedGrammar, Parts, bytes_of
from sgl_vllm.fsm.small_cache import cached_if_few
from sgl_vllm.fsm.syntax import Choice, Node, Repetition, Sequence, Text, one_of
from sgl_vllm.protocol.code_points import complement, normalized

_PUNCTUATION = frozenset(b'{}[]:,"')
_MAX_POSITIONS = 200
"""How many characters a regular part may have, where a part that is repeated five times counts five
times. A larger one is split into smaller automata."""

_MAX_DEPTH = 100
"""Of a regular part, in rules and brackets."""


class RegularParts:
    """Finds the regular parts of one grammar, each once."""

    def __init__(self, grammar: ParsedGrammar) -> None:
        self._grammar = grammar
        self._sizes: dict[int, int | None] = {}
        """How many characters a regular part has; None for a part that is not regular."""
        self._depth = 0

    def includes(self, number: int) -> bool:
        """Whether a part is regular, not large, and has no punctuation of JSON."""
        return self._size(number) is not None

    def includes_rule(self, rule: int) -> bool:
        return self._size_of_rule(rule) is not None

    def expression(self, number: int) -> Expression:
        """The texts of a part that is regular."""
        node = self._node(number)
        key = str(node)  # the garbage collector does not track strings
        return cached_dfa(key, lambda: dfa_of(node), len(key)).expression

    # -- sizes -------------------------------------------------------------------------------------

    def _size(self, number: int) -> int | None:
        if number not in self._sizes:
            if self._depth > _MAX_DEPTH:
                return None
            self._sizes[number] = None  # a rule that contains itself
            self._depth += 1
            self._sizes[number] = self._found_size(number)
            self._depth -= 1
        return self._sizes[number]

    def _found_size(self, number: int) -> int | None:
        kind, *numbers = self._grammar.numbers(number)
        match kind:
            case Kind.BYTES:
                data = bytes_of(numbers)
                is_plain = data.isascii() and _PUNCTUATION.isdisjoint(data)
                return _limited(max(1, len(data))) if is_plain else None
            case Kind.EMPTY:
                return 1
            case Kind.CLASS | Kind.CLASS_STAR:
                return _limited(max(1, len(numbers) // 2))
            case Kind.RULE:
                return self._size_of_rule(numbers[0])
            case Kind.SEQUENCE | Kind.CHOICE:
                return self._sum(numbers)
            case Kind.REPEAT:
                rule, low, high = numbers
                once = self._size_of_rule(rule)
                return None if once is None else _limited(once * max(low, high, 1))
            case _:
                return None

    def _size_of_rule(self, rule: int) -> int | None:
        body = self._grammar.bodies[rule]
        if body in self._sizes or self._grammar.kinds[body] != Kind.CHOICE:
            return self._size(body)
        loops, ends = self._loop(rule)
        if not loops:
            return self._size(body)
        self._sizes[body] = None  # a rule that contains itself elsewhere
        sizes = [self._sum(option) for option in (*loops, *ends)]
        known = [size for size in sizes if size is not None]
        if ends and len(known) == len(sizes):
            self._sizes[body] = _limited(sum(known))
        return self._sizes[body]

    def _loop(self, rule: int) -> tuple[list[Parts], list[Parts]]:
        """The options of a rule that end with the rule, without that last part; and its other
        options. Such a rule is a loop: xgrammar writes `x*` as `r ::= "" | x r`."""
        grammar = self._grammar
        options = [grammar.parts(one) for one in grammar.numbers(grammar.bodies[rule])[1:]]
        again = [option for option in options if option and grammar.is_rule(option[-1], rule)]
        return [option[:-1] for option in again], [one for one in options if one not in again]

    def _sum(self, numbers: Iterable[int]) -> int | None:
        total = 0
        for number in numbers:
            size = self._size(number)
            if size is None:
                return None
            total += size
        return _limited(total)

    # -- trees -------------------------------------------------------------------------------------

    def _node(self, number: int) -> Node:
        kind, *numbers = self._grammar.numbers(number)
        match kind:
            case Kind.BYTES:
                return Text(bytes_of(numbers))
            case Kind.CLASS | Kind.CLASS_STAR:
                return class_node(kind, numbers)
            case Kind.RULE:
                return self._node_of_rule(numbers[0])
            case Kind.CHOICE:
                return Choice(tuple([self._node(one) for one in numbers]))
            case Kind.REPEAT:
                rule, low, high = numbers
                return Repetition(self._node_of_rule(rule), low, None if high < 0 else high)
            case _:
                return self._sequence(numbers)

    def _node_of_rule(self, rule: int) -> Node:
        body = self._grammar.bodies[rule]
        loops, ends = self._loop(rule) if self._grammar.kinds[body] == Kind.CHOICE else ([], [])
        if not loops:
            return self._node(body)
        loop = Choice(tuple([self._sequence(one) for one in loops]))
        end = Choice(tuple([self._sequence(one) for one in ends]))
        return Sequence((Repetition(loop, 0, None), end))

    def _sequence(self, numbers: Iterable[int]) -> Node:
        return Sequence(tuple([self._node(one) for one in numbers]))


def class_node(kind: int, numbers: list[int]) -> Node:
    """The tree of a class, or of any number of its members."""
    node = _class(tuple(numbers))
    return node if kind == Kind.CLASS else Repetition(node, 0, None)


@cached_if_few
def _class(numbers: tuple[int, ...]) -> Node:
    is_negated, *ends = numbers
    ranges = normalized(zip(ends[::2], ends[1::2], strict=True))
    return one_of(complement(ranges, has_surrogates=True) if is_negated else ranges)


def _limited(size: int) -> int | None:
    return size if size <= _MAX_POSITIONS else None
