"""Arrays: items by their index, their number, `contains` and `uniqueItems`.

    {"contains": C, "minContains": 1}

    no C yet:  an item of C, then any items | another item, then the same again

    {"items": {"enum": ["a", "b"]}, "uniqueItems": true}

    none yet:  "a", then "b" or the end | "b", then "a" or the end | the end

With `contains`, each item is read as one that counts or as one that does not. Where more of them
would be too many, the second is an item of the complement of C. Which items were used is not
regular in general, so arrays of different items of which there are infinitely many are refused.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import product
from typing import Generic, NamedTuple, TypeAlias, TypeVar

from sgl_vllm.fsm.errors import UnsupportedSchemaError
from sgl_vllm.fsm.expressions import EMPTY, Alt, Expression, Lazy, Seq, literal
from sgl_vllm.fsm.schema.context import Compiled, Context, spelled
from sgl_vllm.fsm.schema.nodes import Node
from sgl_vllm.fsm.schema.scalars import listed_scalars
from sgl_vllm.fsm.schema.value_sets import ANY, Arrays, Contained

MAX_COUNTED_ITEMS = 10_000
_MAX_STATES = 3_000
_MAX_COUNTED = 4
_MAX_VALUES = 1_000

State = TypeVar("State")
_Moves: TypeAlias = Iterable[tuple[Expression, State]]
_Test: TypeAlias = Callable[[State], bool]


class _Items(NamedTuple):
    """From `low` to `high` items (None: any number): those of `first`, then any of `rest`."""

    first: Sequence[Node]
    rest: Node
    low: int
    high: int | None


def compile_array(context: Context, arrays: Arrays) -> Compiled | None:
    """The arrays of a set."""
    low, high = arrays.low, arrays.high
    if low > MAX_COUNTED_ITEMS or (high or 0) > MAX_COUNTED_ITEMS:
        raise UnsupportedSchemaError(f"more than {MAX_COUNTED_ITEMS:,} items to count")
    rules, all_of = arrays.rules, context.algebra.all_of
    if len(rules) == 1:
        first, rest = [*rules[0].first], rules[0].rest or ANY
    else:
        length = max([len(rule.first) for rule in rules], default=0)
        *first, rest = [all_of([rule.at(i) for rule in rules]) for i in range(length + 1)]
    items = _Items(first, rest, low, high)
    contained = [one for one in arrays.contained if one.low or one.high is not None]
    if arrays.are_unique and (high is None or high > 1):
        if contained:
            raise UnsupportedSchemaError("uniqueItems beside contains")
        return _compile_unique(context, items._replace(first=first[:high]))
    if contained:
        return _Containing(context, contained, items).compiled()
    return _compile(context, items)


def _compile(context: Context, items: _Items) -> Compiled | None:
    first, rest, low, high = items
    made: list[Expression] = []  # the last one is for all later items
    for node in (*first, rest) if high != len(first) else first:
        expression = context.value(node)
        if expression is None:
            high = len(made) if high is None else min(high, len(made))
            break
        made.append(expression)
    if high is not None and low > high:
        return None
    enough = max(low, len(first))

    def moves(count: int) -> Iterator[tuple[Expression, int]]:
        if high is None or count < high:
            following = count + 1 if high is not None else min(count + 1, enough)
            yield made[min(count, len(made) - 1)], following

    needed = [*first[:low], *([rest] if low > len(first) else [])]
    return Compiled(_array(context, 0, moves, lambda count: count >= low), [needed])


def _array(
    context: Context, start: State, moves: Callable[[State], _Moves[State]], may_end: _Test[State]
) -> Expression:
    """The arrays of an automaton over items, built when a walk reaches them.

    Args:
        moves: from a state, the items that may come next, and the state after each.
        may_end: whether an array may end in a state.
    """
    rest = _Rest(context, moves, may_end)
    return Seq(literal(b"["), context.blank, rest.of(start, context.opens_array))


class _Rest(Generic[State]):
    """What may follow in each state of such an automaton."""

    def __init__(
        self, context: Context, moves: Callable[[State], _Moves[State]], may_end: _Test[State]
    ) -> None:
        self._context = context
        self._moves = moves
        self._may_end = may_end
        self._made: dict[State, Expression] = {}

    def of(self, state: State, before: Expression, end: Expression = EMPTY) -> Expression:
        items = [Seq(item, self._after_item(after)) for item, after in self._moves(state)]
        ends: list[Expression] = [Seq(end, literal(b"]"))] if self._may_end(state) else []
        return Alt([*ends, Seq(before, Alt(items))] if items else ends)

    def _after_item(self, state: State) -> Expression:
        if state not in self._made:
            context = self._context
            separated = Lazy(self.of, state, context.comma, context.ends)
            self._made[state] = Seq(context.blank, separated)
        return self._made[state]


# -- uniqueItems


def _compile_unique(context: Context, items: _Items) -> Compiled | None:
    """Arrays of different items.

    Raises UnsupportedSchemaError: an item has infinitely many values, or too many.
    """
    listed = [_finite_values(context, item) for item in items.first]
    others = _finite_values(context, items.rest) if items.high != len(listed) else {}
    distinct = {text for texts in (*listed, others) for text in texts}
    most = min(len(distinct), len(listed) + len(others))
    low, high = items.low, most if items.high is None else min(items.high, most)
    if low > high:
        return None
    if low == 1 and listed and not listed[0]:
        return None
    if low > 1 and listed:
        raise UnsupportedSchemaError("uniqueItems beside prefixItems and minItems")

    def moves(used: frozenset[object]) -> Iterator[tuple[Expression, frozenset[object]]]:
        count = len(used)
        values = listed[count] if count < len(listed) else others
        for key in values if count < high else ():
            if key not in used:
                yield values[key], used | {key}

    start: frozenset[object] = frozenset()
    return Compiled(_array(context, start, moves, lambda used: len(used) >= low), [[]])


def _finite_values(context: Context, node: Node) -> dict[object, Expression]:
    """The values of a node that has finitely many, each by a key that is equal for equal values."""
    values = context.algebra.of(node)
    listed = [*[s.values for s in values.strings], *[n.values for n in values.numbers]]
    if values.objects or values.arrays or None in listed:
        raise UnsupportedSchemaError("uniqueItems of items with infinitely many values")
    found = listed_scalars(context, values)
    if len(found) > _MAX_VALUES:
        raise UnsupportedSchemaError(f"uniqueItems of more than {_MAX_VALUES:,} values")
    return {(isinstance(value, bool), value): literal(spelled(value)) for value in found}


# -- contains

_Counts = tuple[int, ...]
"""A state: how many items were read, and how many of each `Contained` among them, as far as it
matters."""


class _Move(NamedTuple):
    """The next item as a node and as an expression, and the state after it."""

    node: Node
    item: Expression
    after: _Counts


class _Containing:
    """Arrays with certain numbers of certain items: an automaton over items.

    Raises UnsupportedSchemaError: there is too much to count.
    """

    def __init__(self, context: Context, contained: Sequence[Contained], items: _Items) -> None:
        if len(contained) > _MAX_COUNTED:
            raise UnsupportedSchemaError(f"more than {_MAX_COUNTED} different contains")
        self._context = context
        self._contained = contained
        self._items = items
        self._enough = max(items.low, len(items.first), *(c.start for c in contained))
        """So many items or more make no difference, unless there is a limit."""
        self._moves: dict[_Counts, list[_Move]] = {}
        self._to_end: dict[_Counts, list[Node]] = {}
        """The items on a shortest way to an end, for each state that has one."""

    def compiled(self) -> Compiled | None:
        start = (0,) * (1 + len(self._contained))
        self._find_moves(start)
        if start not in self._to_end:
            return None
        expression = _array(self._context, start, self._useful_moves, self._is_end)
        return Compiled(expression, [self._to_end[start]])

    def _useful_moves(self, state: _Counts) -> list[tuple[Expression, _Counts]]:
        moves = self._moves[state]
        return [(move.item, move.after) for move in moves if move.after in self._to_end]

    def _find_moves(self, start: _Counts) -> None:
        """Find the transitions of all states, and the ways to complete an array from each."""
        before: dict[_Counts, list[tuple[_Counts, Node]]] = {start: []}
        pending = deque([start])
        while pending:
            state = pending.popleft()
            moves = self._moves[state] = list(self._moves_from(state))
            for move in moves:
                if move.after not in before:
                    if len(before) > _MAX_STATES:
                        raise UnsupportedSchemaError("too many items of contains to count")
                    before[move.after] = []
                    pending.append(move.after)
                before[move.after].append((state, move.node))
        self._to_end = {state: [] for state in self._moves if self._is_end(state)}
        pending.extend(self._to_end)
        while pending:
            state = pending.popleft()
            for previous, node in before[state]:
                if previous not in self._to_end:
                    self._to_end[previous] = [node, *self._to_end[state]]
                    pending.append(previous)

    def _is_end(self, state: _Counts) -> bool:
        enough = zip(self._contained, state[1:], strict=True)
        return state[0] >= self._items.low and all(count >= c.low for c, count in enough)

    def _moves_from(self, state: _Counts) -> Iterator[_Move]:
        first, rest, _, high = self._items
        index, *found = state
        if high is not None and index >= high:
            return
        item = first[index] if index < len(first) else rest
        following = index + 1 if high is not None else min(index + 1, self._enough)
        for choice in product((False, True), repeat=len(found)):
            parts, after = [item], [following]
            for contained, count, counts_too in zip(self._contained, found, choice, strict=True):
                part = self._counted(contained, index, count, counts_too)
                if part is None:
                    break
                parts += part
                after.append(count + counts_too)
            else:
                node = self._context.algebra.all_of(parts)
                expression = self._context.value(node)
                if expression is not None:
                    yield _Move(node, expression, tuple(after))

    def _counted(
        self, contained: Contained, index: int, count: int, counts_too: bool
    ) -> list[Node] | None:
        """What an item must be valid against to count, or not to count; None if no item may count
        here, or it does not matter."""
        high = contained.high
        matters = index >= contained.start and (high is not None or count < contained.low)
        if not counts_too:
            is_other = matters and high is not None
            return [self._context.algebra.not_of(contained.node)] if is_other else []
        if not matters or (high is not None and count >= high):
            return None
        return [contained.node]
