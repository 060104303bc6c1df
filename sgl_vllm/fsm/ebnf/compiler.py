"""Grammars -> expressions.

Owns how machines that call each other become terminals and what follows them. Each way to leave a
machine, which is a call or the end of the rule, is a terminal: an automaton of the bytes up to
there.

    "[" value ("," value)* "]" | "x"    begins with   `[`, then value, then what follows the call
                                                      `x`, the end
"""

from __future__ import annotations

from functools import partial

import numpy as np
from numpy.typing import NDArray

from sgl_vllm.fsm import tables
from sgl_vllm.fsm.byte_dfa import ByteDfa
from sgl_vllm.fsm.ebnf.ambiguity import check_ambiguity
from sgl_vllm.fsm.ebnf.machine import Budget, Call, Machine
from sgl_vllm.fsm.ebnf.network import ROOT, network
from sgl_vllm.fsm.ebnf.syntax import parse
from sgl_vllm.fsm.errors import TooComplexError, UnsupportedGrammarError
from sgl_vllm.fsm.expressions import EMPTY, NEVER, Alt, Expression, Lazy, Seq

MAX_GRAMMAR_CHARS = 32 << 10

MAX_TERMINAL_STATES = 6_000
"""States of all terminals together, at some 100 bytes to 1 KiB each."""

MIN_BYTES = 10
"""Where rules call each other, fewer bytes than this are little but brackets. A token may then go
through many calls: a bitmask of three kinds of brackets took 166 us, and xgrammar's 14."""


def compile_grammar(grammar: str) -> Expression:
    """The texts that a grammar allows, from its rule `root`.

    Cost: some milliseconds for most grammars, at most about a second.

    Raises:
        UnsupportedGrammarError: the grammar is not compiled here; ask another backend.
        TooComplexError: it is too large.
    """
    if len(grammar) > MAX_GRAMMAR_CHARS:
        raise TooComplexError(f"the grammar has more than {MAX_GRAMMAR_CHARS:,} characters")
    budget = Budget()
    try:
        machines = network(parse(grammar), budget)
    except RecursionError:
        raise TooComplexError("the grammar is nested too deeply") from None
    if len(machines) > 1 or any(machines[ROOT].calls):
        _check_bytes(machines)
        check_ambiguity(machines, ROOT, budget)
    return _Compiler(machines).rule(ROOT)


def _check_bytes(machines: dict[str, Machine]) -> None:
    known = 0
    for machine in machines.values():
        for spans in machine.spans:
            for low, high, _ in spans:
                known |= (1 << high + 1) - (1 << low)
    if known.bit_count() < MIN_BYTES:
        raise UnsupportedGrammarError("little but brackets, which xgrammar knows faster")


class _Compiler:
    """Makes the expressions of the places in machines, each once."""

    def __init__(self, machines: dict[str, Machine]) -> None:
        self._machines = machines
        self._places: dict[tuple[str, int], Lazy] = {}
        num_states = 0
        self._exits: dict[str, list[_Exit]] = {}
        for name, machine in machines.items():
            exits = self._exits[name] = _exits(machine)
            num_states += sum(one.dfa.num_states for one in exits)
            if num_states > MAX_TERMINAL_STATES:
                raise TooComplexError("the automaton of the grammar is too large")

    def rule(self, name: str) -> Expression:
        """What a rule allows."""
        return self._place(name, 0)

    def _place(self, name: str, state: int) -> Lazy:
        """What may follow in a state of a machine, up to the end of its rule."""
        known = self._places.get((name, state))
        if known is None:
            known = self._places[name, state] = Lazy(partial(self._from, name, state))
        return known

    def _from(self, name: str, state: int) -> Expression:
        options = []
        for one in self._exits[name]:
            text = one.text(state)
            if text is not NEVER:
                options.append(Seq(text, *self._after(name, one.call)))
        return Alt(options)

    def _after(self, name: str, call: Call | None) -> list[Expression]:
        if call is None:
            return []
        callee, target = call
        following: list[Expression] = [self.rule(callee)]
        if not self._machines[name].is_final(target):
            following.append(self._place(name, target))
        return following


class _Exit:
    """One way to leave a machine: a call and where it returns to, or the end, for which it is None.

    Attributes:
        dfa: the automaton of the bytes up to there, from any state of the machine.

    Args:
        numbers: the state of `dfa` for each state of the machine, -1 if it does not lead there.
    """

    def __init__(self, dfa: ByteDfa, numbers: NDArray[np.int64], call: Call | None) -> None:
        self.dfa = dfa
        self.call = call
        self._numbers = numbers

    def text(self, state: int) -> Expression:
        """The bytes from a state of the machine to this exit."""
        number = int(self._numbers[state])
        if number < 0:
            return NEVER
        terminal = self.dfa.terminal(number)
        if terminal is None:
            return EMPTY
        return Alt((terminal, EMPTY)) if self.dfa.accepting[number] else terminal


def _exits(machine: Machine) -> list[_Exit]:
    table, classes = machine.table()
    calls = dict.fromkeys(call for calls in machine.calls for call in calls)
    if not calls:  # every state of a minimal machine leads to its end
        dfa = ByteDfa(table, classes, np.array(machine.accepting, np.bool_))
        return [_Exit(dfa, np.arange(len(table)), None)]
    exits: list[_Exit] = []
    for call in [*calls, None]:
        leaves = machine.accepting if call is None else [call in c for c in machine.calls]
        small, accepting, numbers = tables.merged(table, np.array(leaves, np.bool_))
        if not len(small):
            raise TooComplexError("the states of a rule are hard to tell apart")
        exits.append(_Exit(ByteDfa(small, classes, accepting), numbers, call))
    return exits
