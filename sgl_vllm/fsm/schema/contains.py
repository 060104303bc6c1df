"""Arrays that contain a number of certain items: `contains`, `minContains`, `maxContains`.

    {"contains": C, "minContains": 1}

    no C yet:  an item of C, then any items | another item, then the same again

Each item is read as one that counts or as one that does not. Where more of them would be too many,
the second is an item of the complement of C. Owns this automaton over items.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product

from sgl_vllm.fsm.errors import NothingValidError, UnsupportedSchemaError
from sgl_vllm.fsm.expressions import Alt, Expression, Lazy, Seq, literal
from sgl_vllm.fsm.schema.context import Compiled, Context
from sgl_vllm.fsm.schema.keywords import Contained, Schema
from sgl_vllm.fsm.schema.workspace import ids

_MAX_STATES = 3_000
_MAX_COUNTED = 4

_Counts = tuple[int, ...]
"""How many items were read, and how many of each `Contained` among them: as far as it matters."""


@dataclass
class _Node:
    """What may follow some items.

    Attributes:
        is_end: whether the array may end here.
        items: the next item, its schema, and the node after it.
    """

    is_end: bool
    items: list[tuple[Expression, Schema, _Node]] = field(default_factory=list)
    previous: list[_Node] = field(default_factory=list)
    to_end: list[int] | None = None
    """The schemas (by id) on a shortest way to an end; None if there is none."""


def compile_containing(
    context: Context,
    contained: Sequence[Contained],
    first: Sequence[Schema],
    rest: Schema,
    low: int,
    high: int | None,
) -> Compiled:
    """Arrays of `low` to `high` items: those of `first`, then any number of `rest`; with the given
    numbers of items among them.

    Raises UnsupportedSchemaError: there is too much to count.
    """
    if len(contained) > _MAX_COUNTED:
        raise UnsupportedSchemaError(f"more than {_MAX_COUNTED} different contains")
    start = _Graph(context, contained, first, rest, low, high).start()
    if start.to_end is None:
        raise NothingValidError("no array contains what it must")
    expression = Seq(literal(b"["), context.blank, _inside(context, start))
    return Compiled(expression, [start.to_end])


class _Graph:
    """The nodes of one array."""

    def __init__(
        self,
        context: Context,
        contained: Sequence[Contained],
        first: Sequence[Schema],
        rest: Schema,
        low: int,
        high: int | None,
    ) -> None:
        self._context = context
        self._contained = contained
        self._first = first
        self._rest = rest
        self._low = low
        self._high = high
        self._enough = max(low, len(first), *(c.start for c in contained))
        """So many items or more make no difference, unless there is a limit."""
        self._nodes: dict[_Counts, _Node] = {}

    def start(self) -> _Node:
        """The node of the empty array, with `to_end` set in all nodes."""
        begin = (0,) * (1 + len(self._contained))
        self._nodes[begin] = start = self._node(begin)
        pending = deque([begin])
        while pending:
            counts = pending.popleft()
            node = self._nodes[counts]
            for schema, expression, following in self._items(counts):
                if following not in self._nodes:
                    if len(self._nodes) > _MAX_STATES:
                        raise UnsupportedSchemaError("too many items of contains to count")
                    self._nodes[following] = self._node(following)
                    pending.append(following)
                after = self._nodes[following]
                node.items.append((expression, schema, after))
                after.previous.append(node)
        self._find_ends()
        return start

    def _node(self, counts: _Counts) -> _Node:
        enough = zip(self._contained, counts[1:], strict=True)
        return _Node(counts[0] >= self._low and all(count >= c.low for c, count in enough))

    def _items(self, counts: _Counts) -> Iterator[tuple[Schema, Expression, _Counts]]:
        """The items that may come next, and the counts after them."""
        index, *found = counts
        if self._high is not None and index >= self._high:
            return
        item = self._first[index] if index < len(self._first) else self._rest
        following = index + 1 if self._high is not None else min(index + 1, self._enough)
        for choice in product((False, True), repeat=len(found)):
            schema, after = item, [following]
            for contained, count, counts_too in zip(self._contained, found, choice, strict=True):
                narrowed = self._narrowed(schema, contained, index, count, counts_too)
                if narrowed is None:
                    break
                schema = narrowed
                after.append(count + counts_too)
            else:
                expression = None if schema is False else self._context.value_if_any(schema)
                if expression is not None:
                    yield schema, expression, tuple(after)

    def _narrowed(
        self, item: Schema, contained: Contained, index: int, count: int, counts_too: bool
    ) -> Schema | None:
        """An item that counts, or one that does not; None if there is no need to tell."""
        is_bounded = contained.high is not None
        matters = index >= contained.start and (is_bounded or count < contained.low)
        if not counts_too:
            if not (matters and is_bounded):
                return item
            return self._kept(item, self._context.complement(contained.schema))
        if not matters or (contained.high is not None and count >= contained.high):
            return None
        return self._kept(item, contained.schema)

    def _kept(self, item: Schema, other: Schema) -> Schema:
        return self._context.both(item, other)

    def _find_ends(self) -> None:
        pending = deque(node for node in self._nodes.values() if node.is_end)
        for node in pending:
            node.to_end = []
        while pending:
            node = pending.popleft()
            for before in node.previous:
                if before.to_end is None:
                    way = next(schema for _, schema, after in before.items if after is node)
                    before.to_end = [*ids(way), *(node.to_end or [])]
                    pending.append(before)


def _inside(context: Context, start: _Node) -> Expression:
    """What follows the opening bracket of an array."""
    made: dict[int, Expression] = {}
    comma = [literal(b","), context.blank]

    def following(node: _Node) -> Expression:
        """What may follow the items that lead to a node."""
        if id(node) not in made:
            made[id(node)] = Lazy(lambda: Seq(context.blank, after(node, comma)))
        return made[id(node)]

    def after(node: _Node, separator: list[Expression]) -> Expression:
        items = [
            Seq(item, following(then)) for item, _, then in node.items if then.to_end is not None
        ]
        ends: list[Expression] = [literal(b"]")] if node.is_end else []
        return Alt([*ends, Seq(*separator, Alt(items))] if items else ends)

    return after(start, [])
