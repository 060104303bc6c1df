"""The rules of a grammar -> few machines that call each other.

Owns which rules are called. All others become part of the machines that refer to them, so a regular
grammar is one machine without calls, however it is written. Pure.

Rules that refer to themselves first or last are loops, not calls:

    expr ::= expr "+" expr | num      is     expr ::= num ("+" num)*
    list ::= item "," list | item            list ::= item ("," item)*
"""

from __future__ import annotations

from sgl_vllm.fsm.ebnf.machine import Budget, Call, Machine, RuleAssembly
from sgl_vllm.fsm.errors import UnsupportedGrammarError
from sgl_vllm.fsm.syntax import (
    CharacterClass,
    Choice,
    Node,
    Reference,
    Repetition,
    Sequence,
    Spelled,
    Text,
)

ROOT = "root"

_MAX_ROUNDS = 4
_WORK_PER_RULE = 5


def network(rules: dict[str, Node], budget: Budget) -> dict[str, Machine]:
    """The machines of a grammar by rule, `ROOT` first.

    Raises:
        UnsupportedGrammarError: some rule has no text, or begins with itself in a way that is no
            loop.
        TooComplexError: it is too large.
    """
    if ROOT not in rules:
        raise UnsupportedGrammarError("no rule root")
    order = _callees_first(rules)
    _check_texts(rules, order, budget)
    inlined: dict[str, Machine] = {}
    called: dict[str, Machine] = {}
    for name in order:
        assembly = RuleAssembly(budget, inlined)
        end = assembly.add(rules[name], assembly.start)
        machine = _without_loops(name, assembly.machine([end]), budget)
        if name == ROOT or _calls(machine, name):
            called[name] = machine
        else:
            inlined[name] = machine
    made: dict[str, Machine] = {}
    pending = [ROOT]
    while pending:
        name = pending.pop()
        if name not in made:
            made[name] = _with_all_inlined(name, called[name], inlined, budget)
            pending += [callee for calls in made[name].calls for callee, _ in calls]
    _check_beginnings(made)
    return made


def _callees_first(rules: dict[str, Node]) -> list[str]:
    """The rules that are reached from the root, each after those that it refers to, except where
    they refer to each other."""
    order: list[str] = []
    seen = {ROOT}
    stack = [(ROOT, iter(_references(rules[ROOT])))]
    while stack:
        name, references = stack[-1]
        following = next((r for r in references if r not in seen), None)
        if following is None:
            order.append(name)
            stack.pop()
        else:
            seen.add(following)
            stack.append((following, iter(_references(rules[following]))))
    return order


def _references(node: Node) -> list[str]:
    match node:
        case Reference(name):
            return [name]
        case Sequence(parts) | Choice(parts):
            return [name for part in parts for name in _references(part)]
        case Repetition(part):
            return _references(part)
    return []


def _check_texts(rules: dict[str, Node], order: list[str], budget: Budget) -> None:
    """Refuse a grammar with a part that no text ends. xgrammar goes into it."""
    ending: set[str] = set()

    def ends(node: Node) -> bool:
        match node:
            case Text():
                return True
            case CharacterClass(members) | Spelled(members):
                return bool(members)
            case Reference(name):
                return name in ending
            case Sequence(parts):
                return all(map(ends, parts))
            case Choice(options):
                return any(map(ends, options))
            case Repetition(part, low):
                return not low or ends(part)

    left = order
    while left:
        budget.spend(_WORK_PER_RULE * len(left))
        without = []
        for name in left:
            if ends(rules[name]):
                ending.add(name)
            else:
                without.append(name)
        if len(without) == len(left):
            raise UnsupportedGrammarError(f"no text of the rule {left[0]} ends")
        left = without
    if any(_has_empty_class(rules[name]) for name in order):
        raise UnsupportedGrammarError("a class of no characters")


def _has_empty_class(node: Node) -> bool:
    match node:
        case CharacterClass(members) | Spelled(members):
            return not members
        case Sequence(parts) | Choice(parts):
            return any(map(_has_empty_class, parts))
        case Repetition(part):
            return _has_empty_class(part)
    return False


def _calls(machine: Machine, name: str) -> bool:
    return any(callee == name for calls in machine.calls for callee, _ in calls)


def _without_loops(name: str, machine: Machine, budget: Budget) -> Machine:
    """The machine without the calls of its own rule that are loops.

    A call in the start, followed by some text t, means that t may follow any text of the rule. One
    that ends the text goes back to the start, whatever may follow then.
    """
    for _ in range(_MAX_ROUNDS):
        own = [(s, (callee, to)) for s, calls in enumerate(machine.calls)
               for callee, to in calls if callee == name]  # fmt: skip
        first: list[tuple[int, Call]] = [(s, call) for s, call in own if s == 0]
        last = [(s, call) for s, call in own if s and machine.is_final(call[1])]
        if not first and not last:
            break
        assembly = RuleAssembly(budget, {})
        body, accepting = assembly.add_machine(machine, frozenset(last))
        _add_start(assembly, machine, body, name)
        end = assembly.new_state()
        # The start may be a state that other states lead back to. Only at the very start is the
        # call a loop.
        if machine.accepting[0]:
            accepting.append(assembly.start)
        for state in accepting:
            assembly.add_empty(state, end)
            for _, (_, target) in first:
                assembly.add_empty(state, body + target)
        for state, _ in last:
            assembly.add_empty(body + state, assembly.start)
        machine = assembly.machine([end])
    return machine


def _add_start(assembly: RuleAssembly, machine: Machine, body: int, name: str) -> None:
    """Give the assembly's start the transitions of the machine's, without calls of its own rule."""
    for low, high, target in machine.spans[0]:
        assembly.add_span(assembly.start, low, high, body + target)
    for callee, target in machine.calls[0]:
        if callee != name:
            assembly.add_call(assembly.start, callee, body + target)


def _with_all_inlined(
    name: str, machine: Machine, inlined: dict[str, Machine], budget: Budget
) -> Machine:
    if not any(callee in inlined for calls in machine.calls for callee, _ in calls):
        return machine
    assembly = RuleAssembly(budget, inlined)
    first, accepting = assembly.add_machine(machine)
    assembly.add_empty(assembly.start, first)
    end = assembly.new_state()
    for state in accepting:
        assembly.add_empty(state, end)
    return _without_loops(name, assembly.machine([end]), budget)


def _check_beginnings(machines: dict[str, Machine]) -> None:
    """Refuse a rule that begins with itself: it would be called without end."""
    empty: set[str] = set()
    beginnings: dict[str, set[str]] = {}
    while True:
        before = len(empty)
        for name, machine in machines.items():
            reached = {0}
            stack = [0]
            callees: set[str] = set()
            while stack:
                for callee, target in machine.calls[stack.pop()]:
                    callees.add(callee)
                    if callee in empty and target not in reached:
                        reached.add(target)
                        stack.append(target)
            beginnings[name] = callees
            if any(machine.accepting[state] for state in reached):
                empty.add(name)
        if len(empty) == before:
            break
    left = {**beginnings}
    while left:
        done = [name for name, callees in left.items() if left.keys().isdisjoint(callees)]
        if not done:
            raise UnsupportedGrammarError(f"the rule {next(iter(left))} begins with itself")
        for name in done:
            del left[name]
