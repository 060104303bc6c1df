"""Deterministic automata over bytes: the terminal for patterns, and their algebra.

Owns `ByteDfa`, its minimization, intersection and difference. Does not own where automata come from
(`nfa.py`), nor the loops over tables (`tables.py`). Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple  # Any: integers of any size

import numpy as np
from numpy.typing import NDArray

from sgl_vllm.fsm import tables
from sgl_vllm.fsm.errors import TooComplexError
from sgl_vllm.fsm.expressions import EMPTY, NEVER, Alt, Expression, Lazy, Seq

MAX_STATES = 20_000
"""An automaton of more states is refused."""

_MAX_PRODUCT = 50_000_000


class ByteDfa:
    """A deterministic automaton over bytes. Invariant: every state leads to acceptance.

             a          b
        (0) ---> (1) ------> ((2))       table[0, 97] == 1, table[1, 98] == 2, accepting[2]

    Attributes:
        table: (states, 256) int32: the next state, -1 for none.
        accepting: (states,) bool.
        by_class, classes: the same table with equal columns kept once, and each byte's column.
    """

    __slots__ = ("_terminals", "accepting", "by_class", "classes", "start", "table")

    def __init__(
        self, table: NDArray[np.int32], accepting: NDArray[np.bool_], start: int = 0
    ) -> None:
        self.table = np.ascontiguousarray(table, np.int32)
        self.accepting = np.ascontiguousarray(accepting, np.bool_)
        self.start = start
        classes, firsts = tables.column_classes(self.table)
        self.classes = classes.astype(np.uint8)
        self.by_class = np.take(self.table, firsts, axis=1)
        self._terminals: dict[int, Dfa] = {}

    @classmethod
    def minimal_of(
        cls,
        by_class: NDArray[np.int32],
        classes: NDArray[np.integer[Any]],
        accepting: NDArray[np.bool_],
        start: int = 0,
    ) -> ByteDfa:
        """The smallest automaton of the same language as a table over classes of bytes: dead states
        go, equal ones become one.

        Args:
            classes: of the 256 bytes.
        """
        dfa = cls.__new__(cls)
        dfa.by_class, dfa.accepting, columns = tables.minimal(by_class, accepting, start)
        dfa.start = 0
        dfa.classes = columns[classes].astype(np.uint8)
        dfa.table = np.take(dfa.by_class, dfa.classes, axis=1)
        dfa._terminals = {}
        return dfa

    @property
    def num_states(self) -> int:
        return len(self.accepting)

    @property
    def is_empty(self) -> bool:
        """Whether no text is accepted."""
        return not self.accepting.any()

    @property
    def expression(self) -> Expression:
        """The automaton as an expression."""
        start = self.terminal(self.start)
        if start is None:
            return EMPTY if self.accepting[self.start] else NEVER
        return Alt((start, EMPTY)) if self.accepting[self.start] else start

    def terminal(self, state: int) -> Dfa | None:
        """The terminal that begins in a state; None if no byte leads on from it."""
        known = self._terminals.get(state)
        if known is None:
            known = Dfa(self, state)
            if not known.first:
                return None
            self._terminals[state] = known
        return known

    def accepts(self, data: bytes) -> bool:
        state = self.start
        for byte in data:
            state = int(self.table[state, byte])
            if state < 0:
                return False
        return bool(self.accepting[state])


class Dfa:
    """A terminal: a `ByteDfa` in one of its states."""

    __slots__ = ("_row", "dfa", "first", "index")

    def __init__(self, dfa: ByteDfa, index: int) -> None:
        self.dfa = dfa
        self.index = index
        row = dfa.table[index]
        self.first = tables.byte_set(row >= 0)
        self._row: list[int] = row.tolist()

    def step(self, byte: int) -> tuple[Dfa | None, tuple[Expression, ...]]:
        index = self._row[byte]
        dfa = self.dfa
        return dfa.terminal(index), (EMPTY,) if dfa.accepting[index] else ()


class CompiledFormat(NamedTuple):
    """A format as an expression.

    Attributes:
        table_bytes: what its tables take, which can be much more than the format.
    """

    expression: Expression
    table_bytes: int = 0

    @classmethod
    def of_tables(cls, expression: Expression) -> CompiledFormat:
        """With its tables counted."""
        return cls(expression, table_bytes(expression))


def table_bytes(expression: Expression) -> int:
    """What the tables of all automata in an expression take, each counted once.

    Cost: a visit to every part of the expression, which builds those that are built when needed.
    """
    dfas: set[ByteDfa] = set()
    seen: set[Expression] = set()
    stack = [expression]
    while stack:
        part = stack.pop()
        if part in seen:
            continue
        seen.add(part)
        if isinstance(part, Seq):
            stack.extend(part.parts)
        elif isinstance(part, Alt):
            stack.extend(part.options)
        elif isinstance(part, Lazy):
            stack.append(part.get())
        elif isinstance(part, Dfa):
            dfas.add(part.dfa)
    return sum(dfa.table.nbytes + dfa.by_class.nbytes for dfa in dfas)


def minimal(dfa: ByteDfa) -> ByteDfa:
    """The smallest automaton of the same language."""
    return ByteDfa.minimal_of(dfa.by_class, dfa.classes, dfa.accepting, dfa.start)


def of_texts(texts: Iterable[bytes]) -> ByteDfa:
    """The automaton of some texts, none of which is empty."""
    rows: list[dict[int, int]] = [{}]
    accepting: set[int] = set()
    for text in texts:
        state = 0
        for byte in text:
            if byte not in rows[state]:
                rows[state][byte] = len(rows)
                rows.append({})
                if len(rows) > MAX_STATES:
                    raise TooComplexError(f"a list of texts needs more than {MAX_STATES} states")
            state = rows[state][byte]
        accepting.add(state)
    table = np.full((len(rows), 256), -1, np.int32)
    for state, row in enumerate(rows):
        for byte, target in row.items():
            table[state, byte] = target
    flags = np.zeros(len(rows), np.bool_)
    flags[[*accepting]] = True
    return minimal(ByteDfa(table, flags))


def combined(a: ByteDfa, b: ByteDfa, *, minus: bool = False) -> ByteDfa:
    """The texts that `a` and `b` accept; with `minus`, those that `a` accepts and `b` does not.

    Raises:
        TooComplexError: the product has more than `MAX_STATES` states.
    """
    if a.num_states * b.num_states > _MAX_PRODUCT:
        raise TooComplexError("patterns together need too many states")
    pairs, table, classes = tables.product(
        *(a.by_class, a.classes, a.start),
        *(b.by_class, b.classes, b.start),
        not minus,
        MAX_STATES,
    )
    if not len(pairs):
        raise TooComplexError(f"patterns together need more than {MAX_STATES} states")
    accepting_b = np.where(pairs[:, 1] >= 0, b.accepting[pairs[:, 1]], False)
    accepting = a.accepting[pairs[:, 0]] & (~accepting_b if minus else accepting_b)
    return ByteDfa.minimal_of(table, classes, accepting)
