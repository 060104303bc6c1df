"""What may come inside an object: its listed members, then others.

Owns the order and the count of members. Does not own which members a schema has (`objects.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from sgl_vllm.fsm.expressions import Alt, Expression, Lazy, Literals, Seq, literal
from sgl_vllm.fsm.schema.context import Context, spelled

MAX_IN_ANY_ORDER = 6
"""If an object lists more members, they come in listed order."""

Left: TypeAlias = "int | tuple[int, ...]"
"""The listed members that may still come, by index: these; or, in listed order, all from one on."""

_Key: TypeAlias = "tuple[bytes, Expression | None]"


class Member(NamedTuple):
    """A listed member: its name, and its value as an expression."""

    name: str
    value: Expression
    is_required: bool


class Members:
    """What may come inside an object after some of its members.

        {"c": 3, "a": 1|             after((1, 3), 2): "b", "d", one that is not listed, or the end

    If few members are listed, they come in any order while one of those left is optional.
    Otherwise, they come in listed order, so that the names of required ones are forced. Members
    that are not listed come after them.

    `count` members were written, counted only as far as `minProperties` and `maxProperties` need
    it. Members that are not listed may repeat a name, so together they count as one for
    `minProperties`.

    Cost: one expression, built when a walk reaches it, for each set of members left and count.

    Args:
        others: a member that is not listed; None if there may be none.
        low, high: how many members there are; None for any number.
        last: a member that is not listed and has to be there. It comes last, so that none after it
            can take its name.

    Attributes:
        start: all members, up to the closing brace.
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
        self._made: dict[tuple[Left, int], Expression] = {}
        self._keys: dict[tuple[int, Left, int], _Key] = {}
        self._in_any_order = len(members) <= MAX_IN_ANY_ORDER
        self.start = self.after((*range(len(members)),) if self._in_any_order else 0, 0)

    def after(self, left: Left, count: int) -> Expression:
        known = self._made.get((left, count))
        if known is None:
            known = self._made[left, count] = Lazy(lambda: self._after(left, count))
        return known

    def _after(self, left: Left, count: int) -> Expression:
        indices = range(left, len(self._members)) if isinstance(left, int) else left
        num_required = sum([self._members[i].is_required for i in indices])
        has_room = self._high is None or self._high - count > num_required  # for optional ones
        may_end = not num_required
        following = min(count + 1, self._max_count)
        context = self._context
        end = Seq(context.ends, literal(b"}"))
        options: list[Expression] = []
        keys = self._next(indices, count, num_required, has_room)
        if may_end and self._others is not None and has_room and count + 1 >= self._low:
            options.append(Seq(self._others, self.after((), following)))
        if may_end and self._last is not None and count + 1 >= self._low:
            options.append(Seq(self._last, context.blank, end))
        if keys:
            options.append(Literals(tuple(keys)))
        more: Expression = Alt(options)
        if options:
            more = Seq(context.comma if count else context.opens_object, more)
        ends: list[Expression] = [more] if options else []
        if may_end and self._last is None and count >= self._low:
            ends.append(end if count else literal(b"}"))
        return Seq(*([context.blank] if count else []), Alt(ends))

    def _next(
        self, left: Sequence[int], count: int, num_required: int, has_room: bool
    ) -> list[_Key]:
        """The listed members that may come next."""
        num_needed = self._low - count - (self._others is not None or self._last is not None)
        is_free = self._in_any_order and has_room and max(num_required, num_needed) < len(left)
        following = min(count + 1, self._max_count)
        keys: list[_Key] = []
        for k, i in enumerate(left):
            is_required = self._members[i].is_required
            if not is_free and len(left) - k < num_needed:
                break
            if has_room or is_required:
                rest = (*left[:k], *left[k + 1 :]) if self._in_any_order else i + 1
                keys.append(self._key(i, rest, following))
            if is_required and not is_free:
                break
        return keys

    def _key(self, index: int, left: Left, count: int) -> _Key:
        """A listed member's name, and what comes after it if that makes `count` members."""
        known = self._keys.get((index, left, count))
        if known is None:
            member = self._members[index]
            value = Seq(self._context.colon, member.value, self.after(left, count))
            known = self._keys[index, left, count] = (spelled(member.name), value)
        return known
