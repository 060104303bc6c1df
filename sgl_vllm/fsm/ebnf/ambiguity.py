"""How many ways to read a text may be open at once.

Owns the check that this number is bounded, whatever the text. An automaton keeps all of them
(`fsm/automaton.py`), so without the check a long text could stop its request. Pure.

A *reading* is a state of a machine, and a stack of the calls that it returns to. The check follows
pairs of readings of the same text. Of their stacks it keeps what they do not have in common:

    expr ::= "(" expr ")" ws | num ws      after `(1 ` the blank is of the inner `ws`, or the outer

        (expr in ws, [return to `)`])                  (expr before `)`, [])

Where the difference may grow without end, as in `s ::= "a" s "a" | ""`, the grammar is left to
xgrammar.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import TypeAlias

from sgl_vllm.fsm.ebnf.machine import Budget, Machine
from sgl_vllm.fsm.errors import UnsupportedGrammarError

MAX_READINGS = 32
"""Open at once, of a text."""

_MAX_DIFFERENCE = 6
"""Calls in which two readings differ."""

_MAX_PAIRS = 10_000
_WORK_PER_READING = 3

Place: TypeAlias = "tuple[str, int]"
"""A rule and a state of its machine."""

Reading: TypeAlias = "tuple[str, int, tuple[Place, ...]]"
"""A place, and the places to return to, the next one last."""

Pair: TypeAlias = "tuple[Reading, Reading]"


def check_ambiguity(machines: dict[str, Machine], root: str, budget: Budget) -> None:
    """Refuse machines in which the open readings of a text may become more and more.

    Raises:
        UnsupportedGrammarError: they may, or this cannot be excluded.
        TooComplexError: the budget is used up.
    """
    _Pairs(machines, root, budget).check()


class _Pairs:
    """The pairs of readings that texts lead to."""

    def __init__(self, machines: dict[str, Machine], root: str, budget: Budget) -> None:
        self._machines = machines
        self._root = root
        self._budget = budget
        self._callers = self._find_callers()
        self._seen: set[Pair] = set()
        self._pending: list[Pair] = []

    def check(self) -> None:
        start = (self._root, 0, ())
        self._add(start, start)
        while self._pending:
            self._step(*self._pending.pop())
        most = Counter(first for first, _ in self._seen).most_common(1)
        if most[0][1] > MAX_READINGS:
            raise UnsupportedGrammarError("the grammar is too ambiguous")

    def _find_callers(self) -> dict[str, list[Place]]:
        """The places that may be on top of the stack while a rule is read."""
        returns: defaultdict[str, set[Place]] = defaultdict(set)
        last: defaultdict[str, set[str]] = defaultdict(set)
        for name, machine in self._machines.items():
            for calls in machine.calls:
                for callee, target in calls:
                    if machine.is_final(target):
                        last[callee].add(name)  # returns where its caller returns
                    else:
                        returns[callee].add((name, target))
        found = {}
        for name in self._machines:
            reached = {name}
            stack = [name]
            while stack:
                for caller in last[stack.pop()] - reached:
                    reached.add(caller)
                    stack.append(caller)
            found[name] = sorted(set().union(*[returns[one] for one in reached]))
        return found

    def _add(self, first: Reading, second: Reading) -> None:
        """Note a pair, without what the stacks have in common at the bottom."""
        common = 0
        for a, b in zip(first[2], second[2], strict=False):
            if a != b:
                break
            common += 1
        first = first[0], first[1], first[2][common:]
        second = second[0], second[1], second[2][common:]
        if max(len(first[2]), len(second[2])) > _MAX_DIFFERENCE:
            raise UnsupportedGrammarError("the grammar is ambiguous to any depth")
        for pair in ((first, second), (second, first)):
            if pair not in self._seen:
                self._seen.add(pair)
                if len(self._seen) > _MAX_PAIRS:
                    raise UnsupportedGrammarError("the grammar has too many ambiguities")
                if pair[0] <= pair[1]:
                    self._pending.append(pair)

    def _step(self, first: Reading, second: Reading) -> None:
        """Note the pairs after one more byte."""
        for one, other in self._with_callers(first, second):
            before = self._open(one)
            after = before if other == one else self._open(other)
            for a in before:
                for b in after:
                    self._step_places(a, b)

    def _step_places(self, a: Reading, b: Reading) -> None:
        spans_a = self._machines[a[0]].spans[a[1]]
        spans_b = self._machines[b[0]].spans[b[1]]
        self._budget.spend(len(spans_a) + len(spans_b))
        if a == b:
            for _, _, target in spans_a:
                self._add((a[0], target, a[2]), (a[0], target, a[2]))
            return
        i = j = 0
        while i < len(spans_a) and j < len(spans_b):
            low_a, high_a, to_a = spans_a[i]
            low_b, high_b, to_b = spans_b[j]
            if max(low_a, low_b) <= min(high_a, high_b):
                self._add((a[0], to_a, a[2]), (b[0], to_b, b[2]))
            if high_a < high_b:
                i += 1
            else:
                j += 1

    def _with_callers(self, first: Reading, second: Reading) -> Iterator[Pair]:
        """The pair, and the pairs with more of the common stack, as far as one may return there."""
        pending = [(first, second)]
        seen = {*pending}
        while pending:
            pair = pending.pop()
            yield pair
            for name in self._returning(pair[0]) | self._returning(pair[1]):
                for caller in self._callers[name]:
                    longer = _under(caller, pair[0]), _under(caller, pair[1])
                    if longer in seen:
                        continue
                    if min(len(reading[2]) for reading in longer) > _MAX_DIFFERENCE:
                        raise UnsupportedGrammarError("calls return together to any depth")
                    seen.add(longer)
                    pending.append(longer)

    def _returning(self, reading: Reading) -> set[str]:
        """The rules from which a reading returns below its stack before the next byte."""
        return {
            place[0]
            for place in self._reached(reading)
            if not place[2] and self._machines[place[0]].accepting[place[1]]
        }

    def _open(self, reading: Reading) -> list[Reading]:
        """The readings that a reading stands for: those after calls and returns before a byte."""
        return [one for one in self._reached(reading) if self._machines[one[0]].spans[one[1]]]

    def _reached(self, reading: Reading) -> set[Reading]:
        reached = {reading}
        stack = [reading]
        while stack:
            name, state, returns = stack.pop()
            machine = self._machines[name]
            found: list[Reading] = []
            for callee, target in machine.calls[state]:
                deeper = returns if machine.is_final(target) else (*returns, (name, target))
                found.append((callee, 0, deeper))
            if machine.accepting[state] and returns:
                found.append((*returns[-1], returns[:-1]))
            for one in found:
                if one not in reached:
                    reached.add(one)
                    stack.append(one)
        self._budget.spend(_WORK_PER_READING * len(reached))
        return reached


def _under(caller: Place, reading: Reading) -> Reading:
    return reading[0], reading[1], (caller, *reading[2])
