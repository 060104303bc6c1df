"""The automaton of one rule: transitions by bytes, and calls of other rules.

Owns the construction of such machines from rules and from each other, and their minimization. Does
not own which rules are called and which become part of their callers (`network.py`). Pure.

    value ::= "[" value ("," value)* "]" | "x"

        (0)  `[`    (1)        (1)  value  (2)        (2)  `,`  (1)
        (0)  `x`  ((3))                               (2)  `]`  ((3))
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sgl_vllm.fsm import tables
from sgl_vllm.fsm.errors import TooComplexError
from sgl_vllm.fsm.nfa import Assembly
from sgl_vllm.fsm.syntax import Node

MAX_STATES = 2_000
"""States of a machine. xgrammar takes larger ones, in seconds."""

MAX_WORK = 600_000
"""Transitions looked at in one compilation, about two microseconds each."""

_WORK_PER_STATE = 10
"""What a state costs beside its transitions: to be made, found again, and minimized."""

_MAX_PARTS = 20_000
"""States of a machine before it is made deterministic."""

Span = tuple[int, int, int]
"""Bytes from the first number to the second, inclusive, lead to the state of the third."""

Call = tuple[str, int]
"""After the text of this rule, the machine is in this state."""


@dataclass(frozen=True, slots=True, eq=False)
class Machine:
    """A deterministic automaton over bytes and rules; state 0 is the start.

    Invariant: minimal, spans of a state are sorted and do not overlap, and a state has at most one
    call of a rule.
    """

    spans: list[list[Span]]
    calls: list[list[Call]]
    accepting: list[bool]

    def is_final(self, state: int) -> bool:
        """Whether the text ends in this state, and nowhere else."""
        return self.accepting[state] and not self.spans[state] and not self.calls[state]

    def table(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """The transitions by bytes: int32 (states, classes of bytes), -1 for none; and the class of
        each of the 256 bytes."""
        begins = sorted({0, *[b for spans in self.spans for low, high, _ in spans
                              for b in (low, high + 1)]} - {256})  # fmt: skip
        number = {byte: i for i, byte in enumerate([*begins, 256])}
        table = np.full((len(self.spans), len(begins)), -1, np.int32)
        for state, spans in enumerate(self.spans):
            for low, high, target in spans:
                table[state, number[low] : number[high + 1]] = target
        classes = np.searchsorted(begins, np.arange(256), side="right") - 1
        return table, classes.astype(np.int32)


class Budget:
    """What one compilation may still cost."""

    def __init__(self) -> None:
        self._left = MAX_WORK

    def spend(self, amount: int) -> None:
        """Raises TooComplexError beyond `MAX_WORK`."""
        self._left -= amount
        if self._left < 0:
            raise TooComplexError("the grammar is too large")


class RuleAssembly(Assembly):
    """The nondeterministic automaton of a rule.

    Args:
        inlined: the machines of the rules whose calls are replaced by copies of them.
    """

    def __init__(self, budget: Budget, inlined: dict[str, Machine]) -> None:
        self._budget = budget
        self._inlined = inlined
        self._empty: list[list[int]] = []
        self._spans: list[list[Span]] = []
        self._calls: list[list[Call]] = []
        self.start = self.new_state()

    def new_state(self) -> int:
        if len(self._spans) >= _MAX_PARTS:
            raise TooComplexError("the grammar is too large")
        self._empty.append([])
        self._spans.append([])
        self._calls.append([])
        return len(self._spans) - 1

    def add_empty(self, source: int, target: int) -> None:
        self._empty[source].append(target)

    def add_span(self, source: int, low: int, high: int, target: int) -> None:
        self._budget.spend(1)
        self._spans[source].append((low, high, target))

    def add_call(self, source: int, name: str, target: int) -> None:
        machine = self._inlined.get(name)
        if machine is None:
            self._calls[source].append((name, target))
        else:
            first, accepting = self.add_machine(machine)
            self.add_empty(source, first)
            for state in accepting:
                self.add_empty(state, target)

    def add_machine(
        self, machine: Machine, left_out: frozenset[tuple[int, Call]] = frozenset()
    ) -> tuple[int, list[int]]:
        """Add a copy, without the calls in `left_out`, which come with their states.

        Returns: its start, and its accepting states. Its states follow the start in order.
        """
        self._budget.spend(_WORK_PER_STATE * len(machine.spans))
        first = len(self._spans)
        for _ in machine.spans:
            self.new_state()
        for state, (spans, calls) in enumerate(zip(machine.spans, machine.calls, strict=True)):
            self._spans[first + state] = [(low, high, first + t) for low, high, t in spans]
            for call in calls:
                if (state, call) not in left_out:
                    self.add_call(first + state, call[0], first + call[1])
        return first, [first + state for state, ends in enumerate(machine.accepting) if ends]

    def add_reference(self, name: str, source: int) -> int:
        target = self.new_state()
        self.add_call(source, name, target)
        return target

    def add_repetition(self, part: Node, low: int, high: int | None, source: int) -> int:
        for _ in range(low):
            source = self.add(part, source)
        end = self.new_state()
        if high is None:
            again = self.new_state()
            self.add_empty(source, again)
            self.add_empty(self.add(part, again), again)
            self.add_empty(again, end)
            return end
        self.add_empty(source, end)
        for _ in range(high - low):
            begin = self.new_state()
            self.add_empty(source, begin)
            source = self.add(part, begin)
            self.add_empty(source, end)
        return end

    def machine(self, accepting: Iterable[int]) -> Machine:
        """The deterministic, minimal machine of what has been added.

        Raises TooComplexError: it is too large.
        """
        ends = frozenset(accepting)
        closures: dict[int, frozenset[int]] = {}
        start = self._closure(self.start, closures)
        numbers = {start: 0}
        pending = [start]
        by_targets: dict[frozenset[int], int] = {}

        def number_of(targets: frozenset[int]) -> int:
            known = by_targets.get(targets)
            if known is None:
                union = frozenset().union(*[self._closure(t, closures) for t in targets])
                self._budget.spend(len(union))
                known = numbers.get(union)
                if known is None:
                    known = numbers[union] = len(numbers)
                    pending.append(union)
                    if known >= MAX_STATES:
                        raise TooComplexError(f"a rule needs more than {MAX_STATES} states")
                by_targets[targets] = known
            return known

        all_spans: list[list[Span]] = []
        all_calls: list[list[Call]] = []
        for subset in pending:  # grows on the way
            self._budget.spend(_WORK_PER_STATE + len(subset))
            called: dict[str, set[int]] = {}
            for state in subset:
                for name, target in self._calls[state]:
                    called.setdefault(name, set()).add(target)
            spans = [span for state in subset for span in self._spans[state]]
            all_spans.append(
                [(low, high, number_of(targets)) for low, high, targets in self._split(spans)]
            )
            all_calls.append([(name, number_of(frozenset(t))) for name, t in called.items()])
        return _minimal(Machine(all_spans, all_calls, [not ends.isdisjoint(s) for s in numbers]))

    def _closure(self, state: int, known: dict[int, frozenset[int]]) -> frozenset[int]:
        """The states that are reached without text, as far as something follows them."""
        found = known.get(state)
        if found is None:
            reached = {state}
            stack = [state]
            while stack:
                for target in self._empty[stack.pop()]:
                    if target not in reached:
                        reached.add(target)
                        stack.append(target)
            self._budget.spend(len(reached))
            found = known[state] = frozenset(
                s for s in reached if self._spans[s] or self._calls[s] or not self._empty[s]
            )
        return found

    def _split(self, spans: list[Span]) -> list[tuple[int, int, frozenset[int]]]:
        """Spans that may overlap as spans with sets of targets, sorted."""
        if len(spans) == 1:
            ((low, high, target),) = spans
            return [(low, high, frozenset((target,)))]
        begins = sorted({b for low, high, _ in spans for b in (low, high + 1)})
        targets: list[set[int]] = [set() for _ in begins]
        index = {begin: i for i, begin in enumerate(begins)}
        for low, high, target in spans:
            for i in range(index[low], index[high + 1]):
                targets[i].add(target)
            self._budget.spend(index[high + 1] - index[low])
        return [
            (begin, end - 1, frozenset(found))
            for begin, end, found in zip(begins, begins[1:], targets, strict=False)
            if found
        ]


def _minimal(machine: Machine) -> Machine:
    """The smallest machine of the same texts and calls. States that lead nowhere go."""
    by_bytes, classes = machine.table()
    names = sorted({name for calls in machine.calls for name, _ in calls})
    by_calls = np.full((len(machine.calls), len(names)), -1, np.int32)
    column = {name: i for i, name in enumerate(names)}
    for state, calls in enumerate(machine.calls):
        for name, target in calls:
            by_calls[state, column[name]] = target
    table = np.ascontiguousarray(np.concatenate([by_bytes, by_calls], axis=1))
    small, accepting, columns = tables.minimal(table, np.array(machine.accepting, np.bool_), 0)
    if not len(small):
        raise TooComplexError("the states of a rule are hard to tell apart")
    small = small[:, columns]
    width = by_bytes.shape[1]
    first = np.append(np.searchsorted(classes, np.arange(width)), 256).tolist()
    return Machine(
        [_spans(row, first) for row in small[:, :width].tolist()],
        [
            [(name, target) for name, target in zip(names, row, strict=True) if target >= 0]
            for row in small[:, width:].tolist()
        ],
        accepting.tolist(),
    )


def _spans(row: list[int], first: list[int]) -> list[Span]:
    """One row of a table; `first` is the first byte of each class, and 256."""
    spans: list[Span] = []
    for i, target in enumerate(row):
        if target < 0:
            continue
        if spans and spans[-1][1] + 1 == first[i] and spans[-1][2] == target:
            spans[-1] = spans[-1][0], first[i + 1] - 1, target
        else:
            spans.append((first[i], first[i + 1] - 1, target))
    return spans
