"""Objects: listed properties in their order, then others.

Owns `properties`, `required`, `additionalProperties`, `patternProperties`, `minProperties` and
`maxProperties`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any  # Any: JSON of a user's schema

from sgl_vllm.fsm.byte_dfa import ByteDfa, combined
from sgl_vllm.fsm.errors import UnsupportedSchemaError
from sgl_vllm.fsm.expressions import Alt, Expression, Lazy, Literals, Seq, literal
from sgl_vllm.fsm.json_string import NAME_STRING, STRING, JsonString
from sgl_vllm.fsm.rust_regex import compile_trusted, compile_untrusted
from sgl_vllm.fsm.schema.context import Compiled, Context, string
from sgl_vllm.fsm.schema.keywords import Schema
from sgl_vllm.fsm.schema.values import limits, quoted
from sgl_vllm.fsm.schema.workspace import ids

MAX_COUNTED_PROPERTIES = 1_000

_ANY_NAME = r'(?:[^"\\\x{0}-\x{1f}]|\\["\\bfnrt]|\\u00(?:0[0-7bef]|1[0-9a-f]))*'
"""Names in their one spelling, as `NAME_STRING`."""


def compile_object(context: Context, schema: dict[str, Any]) -> Compiled:
    """The objects that are valid against `schema`, with the listed properties in their order."""
    properties = schema.get("properties", {})
    required = dict.fromkeys(schema.get("required", []))
    closed = context.is_strict and "properties" in schema
    additional = schema.get("additionalProperties", not closed)
    patterns = schema.get("patternProperties", {})
    if context.is_strict and "additionalProperties" in schema and additional is not False:
        raise UnsupportedSchemaError("additionalProperties with strict semantics")
    members: list[_Member] = []
    for name, subschema in properties.items():
        if subschema is False:
            if name in required:
                raise UnsupportedSchemaError("a required property for which nothing is valid")
            continue
        members.append(_Member(name, context.value(subschema), name in required))
    automata = {p: context.workspace.pattern(p) for p in patterns}
    for name in required:
        if name not in properties:
            if any(a.accepts(quoted(name)) for a in automata.values()):
                raise UnsupportedSchemaError("a required property that only a pattern names")
            if additional is False:
                raise UnsupportedSchemaError("a required property that is not allowed")
            members.append(_Member(name, context.value(additional), True))
    others = _other_members(context, members, properties, automata, patterns, additional)
    low, high = limits(schema, "minProperties", "maxProperties")
    num_required = sum(m.is_required for m in members)
    if high is not None and high < max(low, num_required):
        raise UnsupportedSchemaError("maxProperties is too low")
    if low > len(members) + (others is not None):
        raise UnsupportedSchemaError("minProperties is too high")
    if low <= num_required:
        low = 0
    if high is not None and high >= len(members) and others is None:
        high = None
    if max(low, high or 0) > MAX_COUNTED_PROPERTIES:
        raise UnsupportedSchemaError(f"more than {MAX_COUNTED_PROPERTIES:,} properties to count")
    tail = _Members(context, members, others, low, high).after(0, 0)
    return Compiled(
        Seq(literal(b"{"), context.blank, tail),
        ids(*[properties.get(name, additional) for name in required]),
    )


@dataclass(frozen=True, slots=True)
class _Member:
    name: str
    value: Expression
    is_required: bool


def _other_members(
    context: Context,
    members: Sequence[_Member],
    properties: Mapping[str, Any],
    automata: Mapping[str, ByteDfa],
    patterns: Mapping[str, Any],
    additional: Schema,
) -> Expression | None:
    """A member that is not one of `properties`; None if none is allowed."""
    options: list[Expression] = []
    names = {*properties, *(m.name for m in members)}
    listed = {name: quoted(name) for name in names}
    items = list(automata.items())
    for i, (pattern, dfa) in enumerate(items):
        if any(dfa.accepts(name) for name in listed.values()):
            raise UnsupportedSchemaError("a property that a pattern names, too")
        for _, other in items[i + 1 :]:
            if not combined(dfa, other).is_empty:
                raise UnsupportedSchemaError("patternProperties that overlap")
        if patterns[pattern] is not False:
            value = context.value(patterns[pattern])
            options.append(Seq(dfa.expression, context.colon, value))
    if additional is not False:
        if automata:
            rest = compile_trusted('"' + _ANY_NAME + '"')
            for dfa in automata.values():
                rest = combined(rest, dfa, minus=True)
            if listed:
                excluded = "|".join(_verbatim(name) for name in listed.values())
                rest = combined(rest, compile_untrusted(excluded), minus=True)
            key = rest.expression
        else:
            # A listed name must not come back in another spelling.
            inner = tuple(sorted(name[1:-1] for name in listed.values()))
            key = string(JsonString.of(NAME_STRING if inner else STRING, names=inner))
        options.append(Seq(key, context.colon, context.value(additional)))
    if not options:
        return None
    return options[0] if len(options) == 1 else Alt(options)


def _verbatim(text: bytes) -> str:
    return "".join([f"\\x{{{ord(c):x}}}" for c in text.decode()])


class _Members:
    """What may come inside an object after some of its members.

        {"a": 1, "c": 3|             after(3, 2): "d", or one that is not listed, or the end

    `index` listed members were written or left out; `count` members were written, counted only as
    far as `minProperties` and `maxProperties` need it. Members that are not listed may repeat a
    name, so together they count as one for `minProperties`.
    """

    def __init__(
        self,
        context: Context,
        members: Sequence[_Member],
        others: Expression | None,
        low: int,
        high: int | None,
    ) -> None:
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
        if keys:
            options.append(Literals(tuple(keys)))
        more: Expression = Alt(options)
        if count and options:
            more = Seq(literal(b","), blank, more)
        ends: list[Expression] = [more] if options else []
        if may_end and count >= self._low:
            ends.append(literal(b"}"))
        return Seq(*([blank] if count else []), Alt(ends))

    def _keys(self, following: int) -> list[tuple[bytes, Expression | None]]:
        """Every listed member's name, and what comes after it if that makes `following` members."""
        known = self._keys_by_count.get(following)
        if known is None:
            colon = self._context.colon
            known = self._keys_by_count[following] = [
                (quoted(member.name), Seq(colon, member.value, self.after(i + 1, following)))
                for i, member in enumerate(self._members)
            ]
        return known

    def _last_possible(self, index: int, count: int) -> int:
        """The last listed member that may come next: no required one is left out, and enough remain
        for `minProperties`."""
        last = self._next_required[index]
        num_needed = self._low - count - (self._others is not None)
        if num_needed > 0:
            last = min(last, len(self._members) - num_needed)
        return last
