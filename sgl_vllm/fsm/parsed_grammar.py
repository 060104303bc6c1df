"""The grammar that xgrammar makes of a format, in flat arrays, as its worker hands it over.

Owns the reading of these arrays, and which grammars no walk would end in. Does not own how a
grammar is compiled (`grammar_compiler.py`), nor who asks xgrammar (`vllm/`). Pure.

    root ::= "a" x{2, 5}     data     0 1 97       an expression: its kind, how many numbers
    x    ::= [^b-c]                   8 3 1 2 5    follow, and these: bytes, bounds, characters,
                                      5 2 0 1      or the numbers of expressions and rules
                                      1 3 1 98 99
                             begins   0 3 8 12 17  where each expression begins, and the end
                             bodies   2 3          the expression of each rule
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from sgl_vllm.fsm import grammar_check
from sgl_vllm.fsm.errors import TooComplexError, UnsupportedGrammarError


class Kind(IntEnum):
    """The kinds of xgrammar's expressions that are read here, and what their numbers are."""

    BYTES = 0
    """Bytes."""
    CLASS = 1
    """Whether all others are meant, then the first and last of each range of code points."""
    CLASS_STAR = 2
    """As `CLASS`, any number of times."""
    EMPTY = 3
    RULE = 4
    """A rule."""
    SEQUENCE = 5
    """Expressions."""
    CHOICE = 6
    """Expressions."""
    TAGS = 7
    """Free text: pairs of a text that ends it and the rule of what follows; whether free text
    follows again; and a choice of the texts that it must not contain."""
    REPEAT = 8
    """A rule, how often at least, and at most (-1: any number of times)."""
    REGEX = 12
    """A pattern, for which xgrammar has made an automaton."""


_FLAT = frozenset({Kind.SEQUENCE, Kind.EMPTY, Kind.BYTES})
"""Kinds of what may be none of a sequence's parts, or several."""

_MAX_EXPRESSIONS = 1_000_000

Parts: TypeAlias = "tuple[int, ...]"
"""Expressions, one after another."""


@dataclass(frozen=True, slots=True, eq=False)
class Pattern:
    """The automaton of a pattern, which may be nondeterministic.

    Attributes:
        start: a state.
        ends: the states that accept.
        edges: int32 (edges, 4): source, first and last byte, target. A first byte of -1 stands for
            an edge without text.
    """

    start: int
    ends: NDArray[np.int32]
    edges: NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class ParsedGrammar:
    """Attributes: as above; `root` is the number of a rule, `patterns` are by expression, and
    `kinds` are those of all expressions."""

    data: NDArray[np.int32]
    begins: NDArray[np.int32]
    bodies: list[int]
    root: int
    patterns: dict[int, Pattern]
    kinds: bytes = field(init=False)

    def __post_init__(self) -> None:
        kinds = self.data[self.begins[:-1]].astype(np.uint8).tobytes()
        object.__setattr__(self, "kinds", kinds)

    @classmethod
    def of(cls, packed: bytes) -> ParsedGrammar:
        """Of what `vllm/xgrammar_worker.py` sends: int32 numbers in sections, each after its
        length. They are the root; bodies; `begins`; data; and for each pattern its expression and
        its start, its ends, and its edges."""
        numbers = np.frombuffer(packed, np.int32)
        sections = []
        position = 0
        while position < len(numbers):
            begin, position = position + 1, position + 1 + int(numbers[position])
            sections.append(numbers[begin:position])
        (root,), bodies, begins, data, *automata = sections
        patterns = {}
        for (number, start), ends, edges in zip(*[iter(automata)] * 3, strict=True):
            patterns[int(number)] = Pattern(int(start), ends, edges.reshape(-1, 4))
        return cls(data, begins, bodies.tolist(), int(root), patterns)

    def numbers(self, number: int) -> list[int]:
        """The kind of an expression, and the numbers that follow it."""
        kind, _, *numbers = self.data[self.begins[number] : self.begins[number + 1]].tolist()
        return [kind, *numbers]

    def parts(self, number: int) -> Parts:
        """What an expression is a sequence of, without parts that are empty."""
        kinds = self.kinds
        if kinds[number] == Kind.SEQUENCE:
            _, *numbers = self.numbers(number)
            if all(kinds[one] not in _FLAT for one in numbers):
                return tuple(numbers)
            return tuple([part for one in numbers for part in self.parts(one)])
        is_empty = kinds[number] == Kind.EMPTY or self.numbers(number) == [Kind.BYTES]
        return () if is_empty else (number,)

    def is_rule(self, number: int, rule: int) -> bool:
        """Whether an expression is nothing but a rule."""
        return self.kinds[number] == Kind.RULE and self.data[self.begins[number] + 2] == rule

    def key(self, number: int) -> bytes:
        """Equal for equal expressions, as far as they are written equally."""
        return self.data[self.begins[number] : self.begins[number + 1]].tobytes()

    def text(self, number: int) -> bytes:
        """The bytes of an expression that is nothing else; empty for others."""
        return bytes_of(self.numbers(number)[1:]) if self.kinds[number] == Kind.BYTES else b""

    def resolved(self, number: int) -> tuple[int, ...]:
        """The expression behind rules, choices and sequences of one."""
        kind, *numbers = self.numbers(number)
        while kind in (Kind.RULE, Kind.SEQUENCE, Kind.CHOICE) and len(numbers) == 1:
            number = self.bodies[numbers[0]] if kind == Kind.RULE else numbers[0]
            kind, *numbers = self.numbers(number)
        return kind, len(numbers), *numbers

    def checked(self) -> list[int]:
        """The patterns and free texts that are reached from the root.

        Raises:
            UnsupportedGrammarError: there is an expression of another kind, or a rule that may
                begin with itself in a way that is no loop: no walk through it would end.
            TooComplexError: the grammar is too large.
        """
        if len(self.begins) > _MAX_EXPRESSIONS:
            raise TooComplexError("the grammar is too large")
        status, found = grammar_check.check(
            self.data, self.begins, np.array(self.bodies, np.int32), self.root
        )
        if status == grammar_check.UNKNOWN:
            raise UnsupportedGrammarError("an expression of another kind")
        if status == grammar_check.ENDLESS:
            raise UnsupportedGrammarError("a rule may begin with itself")
        if status == grammar_check.TOO_LARGE:
            raise TooComplexError("which rules may be empty takes too long to find out")
        numbers: list[int] = found.tolist()
        for number in numbers:
            is_pattern = self.data[self.begins[number]] == Kind.REGEX
            if is_pattern and number not in self.patterns:
                raise UnsupportedGrammarError("a pattern without an automaton")
        return numbers


def bytes_of(numbers: Iterable[int]) -> bytes:
    """The bytes of an expression. Some of xgrammar's are signed."""
    return bytes([number & 255 for number in numbers])
