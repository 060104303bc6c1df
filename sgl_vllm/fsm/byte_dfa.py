"""Deterministic automata over bytes: the terminal for patterns, and their algebra.

Owns `ByteDfa`, its minimization, intersection and difference. Does not own where automata come from
(`nfa.py`), nor the loops over tables (`tables.py`). Pure.
"""

from __future__ import annotations

from typing import Any, NamedTuple  # Any: integers of any size

import numpy as np
from numpy.typing import NDArray

from sgl_vllm.fsm import tables
from sgl_vllm.fsm.errors import TooComplexError
from sgl_vllm.fsm.expressions import EMPTY, NEVER, Alt, Expression

MAX_STATES = 20_000
"""An automaton of more states is refused."""


class ByteDfa:
    """A deterministic automaton over bytes. Invariant: every transition leads to a state, which is
    checked, because loops without checks follow them. In one that becomes an expression, every
    state leads to acceptance (`minimal`, `combined`).

             a          b
        (0) ---> (1) ------> ((2))       row(0)[97] == 1, row(1)[98] == 2, accepting[2]

    Attributes:
        by_class: (states, classes of bytes) int32: the next state, -1 for none.
        classes: (256,) uint8: the class of each byte. `class_of` is the same as bytes.
        accepting: (states,) bool.
    """

    __slots__ = ("_terminals", "accepting", "by_class", "class_of", "classes", "start")

    def __init__(
        self,
        by_class: NDArray[np.int32],
        classes: NDArray[np.integer[Any]],
        accepting: NDArray[np.bool_],
        start: int = 0,
    ) -> None:
        self.by_class = np.ascontiguousarray(by_class, np.int32)
        self.classes = classes.astype(np.uint8)
        self.class_of = self.classes.tobytes()
        self.accepting = np.ascontiguousarray(accepting, np.bool_)
        self.start = start
        assert 0 <= start < len(self.accepting)
        tables.check_table(self.by_class, self.accepting, self.classes)
        self._terminals: dict[int, Dfa] = {}

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

    @property
    def table_bytes(self) -> int:
        """What its transitions take once all states have been visited: then each has its row as a
        list, too, of 8 bytes for each number."""
        return 3 * self.by_class.nbytes

    def row(self, state: int) -> NDArray[np.int32]:
        """(256,): the state that each byte leads to, -1 for none."""
        return self.by_class[state][self.classes]

    def accepts(self, data: bytes) -> bool:
        state = self.start
        for byte in data:
            state = int(self.by_class[state, self.class_of[byte]])
            if state < 0:
                return False
        return bool(self.accepting[state])


class Dfa:
    """A terminal: a `ByteDfa` in one of its states."""

    __slots__ = ("_row", "dfa", "first", "index")

    def __init__(self, dfa: ByteDfa, index: int) -> None:
        self.dfa = dfa
        self.index = index
        self.first = tables.byte_set(dfa.row(index) >= 0)
        self._row: list[int] = dfa.by_class[index].tolist()

    def step(self, byte: int) -> tuple[Dfa | None, tuple[Expression, ...]]:
        index = self._row[self.dfa.class_of[byte]]
        dfa = self.dfa
        return dfa.terminal(index), (EMPTY,) if dfa.accepting[index] else ()


class CompiledFormat(NamedTuple):
    """A format as an expression.

    Attributes:
        table_bytes: what its tables take, which can be much more than the format; None if they are
            made and counted when a walk reaches them.
    """

    expression: Expression
    table_bytes: int | None = None


def minimal(dfa: ByteDfa) -> ByteDfa:
    """The minimal automaton of the same language: dead states are removed, equal ones merged."""
    by_class, accepting, columns = tables.minimal(dfa.by_class, dfa.accepting, dfa.start)
    return ByteDfa(by_class, columns[dfa.classes], accepting)


def combined(a: ByteDfa, b: ByteDfa, *, minus: bool = False) -> ByteDfa:
    """The texts that `a` and `b` accept; with `minus`, those that `a` accepts and `b` does not.

    Raises:
        TooComplexError: the product has more than `MAX_STATES` states.
    """
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
    return minimal(ByteDfa(table, classes, accepting))
