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

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from sgl_vllm.fsm.errors import TooComplexError, UnsupportedGrammarError
from sgl_vllm.jit import compiled


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


_MAX_EXPRESSIONS = 1_000_000
_MAX_PASSES = 100

_GOOD, _UNKNOWN, _ENDLESS, _TOO_LARGE = range(4)


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
    """Attributes: as above; `root` is the number of a rule, and `patterns` are by expression."""

    data: NDArray[np.int32]
    begins: NDArray[np.int32]
    bodies: NDArray[np.int32]
    root: int
    patterns: dict[int, Pattern]

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
        return cls(data, begins, bodies, int(root), patterns)

    def checked(self) -> list[int]:
        """The patterns (`Kind.REGEX`) that are reached from the root.

        Raises:
            UnsupportedGrammarError: there is an expression of another kind, or a rule that may
                begin with itself: no walk through it would end.
            TooComplexError: the grammar is too large.
        """
        if len(self.begins) > _MAX_EXPRESSIONS:
            raise TooComplexError("the grammar is too large")
        status, patterns = _check(self.data, self.begins, self.bodies, self.root)
        if status == _UNKNOWN:
            raise UnsupportedGrammarError("an expression of another kind")
        if status == _ENDLESS:
            raise UnsupportedGrammarError("a rule may begin with itself")
        if status == _TOO_LARGE:
            raise TooComplexError("which rules may be empty takes too long to find out")
        if not self.patterns.keys() >= {*patterns.tolist()}:
            raise UnsupportedGrammarError("a pattern without an automaton")
        return [*patterns.tolist()]


_BYTES, _CLASS, _CLASS_STAR, _EMPTY, _RULE = range(5)
_SEQUENCE, _CHOICE, _TAGS, _REPEAT = range(5, 9)
_REGEX = 12


@compiled
def _check(data, begins, bodies, root):  # type: ignore[no-untyped-def]
    """Whether a grammar is `_GOOD` or what else, and its patterns.

    Bounds: every number of an expression or a rule is checked before it is followed. Each
    expression is on a stack once.
    """
    num = len(begins) - 1
    none = np.empty(0, np.int32)
    if num < 1 or begins[0] != 0 or begins[num] != len(data) or not 0 <= root < len(bodies):
        return _UNKNOWN, none
    for i in range(num):
        if begins[i + 1] < begins[i] + 2 or begins[i + 1] - begins[i] - 2 != data[begins[i] + 1]:
            return _UNKNOWN, none
    order = np.empty(num, np.int32)  # each after what it contains, but for rules in themselves
    stack = np.empty(num, np.int32)
    position = np.zeros(num, np.int32)
    state = np.zeros(num, np.int8)
    count = depth = num_patterns = 0
    stack[0] = bodies[root]
    if not 0 <= stack[0] < num:
        return _UNKNOWN, none
    state[stack[0]] = 1
    while depth >= 0:
        one = stack[depth]
        child = _child(data, begins, bodies, one, position[one])
        if child == -2:
            return _UNKNOWN, none
        if child == -1:
            order[count] = one
            count += 1
            num_patterns += data[begins[one]] == _REGEX
            depth -= 1
            continue
        position[one] += 1
        if state[child] == 0:
            state[child] = 1
            depth += 1
            stack[depth] = child
    patterns = np.empty(num_patterns, np.int32)
    found = 0
    for i in range(count):
        if data[begins[order[i]]] == _REGEX:
            patterns[found] = order[i]
            found += 1
    may_be_empty = np.zeros(num, np.bool_)
    for _ in range(_MAX_PASSES):
        has_changed = False
        for one in order[:count]:
            if not may_be_empty[one] and _is_empty(data, begins, bodies, one, may_be_empty):
                may_be_empty[one] = has_changed = True
        if not has_changed:
            break
    else:
        return _TOO_LARGE, none
    state[:] = 0
    position[:] = 0
    for first in order[:count]:
        if state[first]:
            continue
        depth = 0
        stack[0] = first
        state[first] = 1
        while depth >= 0:
            one = stack[depth]
            child = -1
            kind, at = data[begins[one]], position[one]
            # A sequence begins with its first part, and with the next if that may be empty.
            if kind != _TAGS and (
                kind != _SEQUENCE or at == 0 or may_be_empty[data[begins[one] + 1 + at]]
            ):
                child = _child(data, begins, bodies, one, at)
            if child < 0:
                state[one] = 2
                depth -= 1
                continue
            position[one] += 1
            if state[child] == 1:
                return _ENDLESS, none
            if state[child] == 0:
                state[child] = 1
                depth += 1
                stack[depth] = child
    return _GOOD, patterns


@compiled
def _child(data, begins, bodies, one, index):  # type: ignore[no-untyped-def]
    """The expression that `one` contains at an index: -1 beyond the last, -2 if there is none."""
    num, begin = len(begins) - 1, begins[one]
    kind, size = data[begin], data[begin + 1]
    child = -1
    if kind in (_SEQUENCE, _CHOICE):
        if index >= size:
            return -1
        child = data[begin + 2 + index]
    elif kind in (_RULE, _REPEAT):
        if size != (1 if kind == _RULE else 3):
            return -2
        if index > 0:
            return -1
        rule = data[begin + 2]
        if not 0 <= rule < len(bodies):
            return -2
        child = bodies[rule]
    elif kind == _TAGS:
        if size % 2:
            return -2
        if index >= size:
            return -1
        child = data[begin + 2 + index]
        if index == size - 2:  # not an expression, but a flag
            child = data[begin + 1 + size]
        elif index % 2 and index < size - 1:
            if not 0 <= child < len(bodies):
                return -2
            child = bodies[child]
    elif kind in (_CLASS, _CLASS_STAR):
        return -1 if size % 2 == 1 else -2
    elif kind in (_BYTES, _EMPTY, _REGEX):
        return -1
    else:
        return -2
    return child if 0 <= child < num else -2


@compiled
def _is_empty(data, begins, bodies, one, may_be_empty):  # type: ignore[no-untyped-def]
    """Whether an expression may be empty, as far as that is known of what it contains.

    Bounds: the numbers of all expressions have been checked.
    """
    begin = begins[one]
    kind, size = data[begin], data[begin + 1]
    if kind == _BYTES:
        return size == 0
    if kind == _CLASS:
        return False
    if kind == _RULE:
        return may_be_empty[bodies[data[begin + 2]]]
    if kind == _REPEAT:
        return data[begin + 3] == 0 or may_be_empty[bodies[data[begin + 2]]]
    if kind == _SEQUENCE:
        return may_be_empty[data[begin + 2 : begin + 2 + size]].all()
    if kind == _CHOICE:
        return may_be_empty[data[begin + 2 : begin + 2 + size]].any()
    return True
