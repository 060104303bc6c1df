"""What may come inside an object: listed members in their order, then others.

Owns the order and the count of members. Does not own which members a schema has (`objects.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sgl_vllm.fsm.expressions import Alt, Expression, Lazy, Literals, Seq, literal
from sgl_vllm.fsm.schema.context import Context, spelled


class Member(NamedTuple):
    """A listed member: its name, and its value as an expression."""

    name: str
    value: Expression
    is_required: bool


class Members:
    """What may come inside an object after some of its members.

        {"a": 1, "c": 3|             after(3, 2): "d", or one that is not listed, or the end

    `index` listed members were written or left out; `count` members were written, counted only as
    far as `minProperties` and `maxProperties` need it. Members that are not listed may repeat a
    name, so together they count as one for `minProperties`.

    Args:
        others: a member that is not listed; None if there may be none.
        low, high: how many members there are; None for any number.
        last: a member that is not listed and has to be there. It comes last, so that none after it
            can take its name.
    """

    def __init__(
        self,
        context: Context,
        members: Sequence[Member],
        others: Expression | None,
        low: int,
        high: int | None,
        last: Expression | None = None,
    ) -> None:
        if last is not None and high is not None:
            high -= 1  # its place is kept free
        self._last = last
        self._context = context
        self._members = members
        self._others = others
        self._low = low
        self._high = high
        self._max_count = max(1, low, high or 0)
        self._made: dict[tuple[int, int], Expression] = {}
        self._keys_by_count: dict[int, list[tuple[bytes, Expression | None]]] = {}
        self._next_required = list(range(len(members) + 1))
        """For each index, the next required member, or the number of members."""
        self._num_required = [0] * (len(members) + 1)
        """For each index, the number of required members from there on."""
        for i in reversed(range(len(members))):
            if not members[i].is_required:
                self._next_required[i] = self._next_required[i + 1]
            self._num_required[i] = self._num_required[i + 1] + members[i].is_required

    def after(self, index: int, count: int) -> Expression:
        count = min(count, self._max_count)
        known = self._made.get((index, count))
        if known is None:
            known = self._made[index, count] = Lazy(lambda: self._after(index, count))
        return known

    def _after(self, index: int, count: int) -> Expression:
        options: list[Expression] = []
        is_full = self._high is not None and count >= self._high
        keys: list[tuple[bytes, Expression | None]] = []
        blank = self._context.blank
        next_required = self._next_required[index]
        if not is_full:
            following = min(count + 1, self._max_count)
            keys = self._keys(following)[index : self._last_possible(index, count) + 1]
            if self._high is not None and self._high - count <= self._num_required[index]:
                keys = keys[next_required - index :]  # there is room for required members only
        may_end = next_required == len(self._members)
        if may_end and self._others is not None and not is_full and count + 1 >= self._low:
            options.append(Seq(self._others, self.after(next_required, count + 1)))
        if may_end and self._last is not None and count + 1 >= self._low:
            options.append(Seq(self._last, blank, literal(b"}")))
        if keys:
            options.append(Literals(tuple(keys)))
        more: Expression = Alt(options)
        if count and options:
            more = Seq(literal(b","), blank, more)
        ends: list[Expression] = [more] if options else []
        if may_end and self._last is None and count >= self._low:
            ends.append(literal(b"}"))
        return Seq(*([blank] if count else []), Alt(ends))

    def _keys(self, following: int) -> list[tuple[bytes, Expression | None]]:
        """Every listed member's name, and what comes after it if that makes `following` members."""
        known = self._keys_by_count.get(following)
        if known is None:
            colon = self._context.colon
            known = self._keys_by_count[following] = [
                (spelled(member.name), Seq(colon, member.value, self.after(i + 1, following)))
                for i, member in enumerate(self._members)
            ]
        return known

    def _last_possible(self, index: int, count: int) -> int:
        """The last listed member that may come next: no required one is left out, and enough remain
        for `minProperties`."""
        last = self._next_required[index]
        num_needed = self._low - count - (self._others is not None or self._last is not None)
        if num_needed > 0:
            last = min(last, len(self._members) - num_needed)
        return last
