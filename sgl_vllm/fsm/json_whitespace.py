r"""The whitespace of JSON: one style instead of any whitespace, or the style a text begins with.

Owns the styles, which are those of `json.dumps`, and the places of a format where they differ.
Where whitespace is allowed, a compiler puts a *place*, a terminal that is never walked; `styled`
replaces it. Pure.

    {"a": [1, 2]}     "{" OBJECT "\"a\"" ":" COLON "[" ARRAY 1 "," COMMA 2 END "]" END "}"
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from sgl_vllm.fsm.expressions import EMPTY, Alt, Expression, Lazy, Literals, Seq, forget, literal
from sgl_vllm.fsm.parsed_grammar import Kind, ParsedGrammar
from sgl_vllm.protocol.request_keys import COMPACT, FOLLOW, SPACED

MAX_DEPTH = 32
"""Deeper levels are indented like this one."""

OBJECT, ARRAY, END, COMMA, COLON = [Literals(((b"\0%d" % n, None),)) for n in range(5)]
"""Places: before the first member, before the first item, before the closing bracket, after a
comma, and after a colon. At all others there is no whitespace."""

PLACES: dict[bytes, Expression] = {
    b'\0"%d' % n: place
    for n, place in enumerate[Expression]((OBJECT, ARRAY, END, COMMA, COLON, EMPTY))
}
"""Places by the texts that stand for them in a grammar (`with_places`). A quote in the texts keeps
them out of patterns."""

_BLANK = [0, 32, 32, 10, 10, 13, 13, 9, 9]
"""How xgrammar writes any whitespace, `[ \\n\\r\\t]*`."""

_AFTER, _BEFORE = np.full(256, -1), np.full(256, -1)
"""The number of the place after a byte, and of the one before it."""
_AFTER[[*b"{[,:"]] = 0, 1, 3, 4
_BEFORE[[*b"}],:"]] = 2, 2, 5, 5


class _Style(NamedTuple):
    """The text after a comma and after a colon, and the unit of indentation, if lines are indented.
    In indented JSON, an array may be on one line."""

    comma: bytes = b""
    colon: bytes = b" "
    unit: bytes | None = None


_COMPACT, _SPACED = _Style(colon=b""), _Style(b" ")
_LINES = [_Style(unit=unit) for unit in (b"  ", b"    ", b" ", b"   ", b"\t")]
_STYLES = {COMPACT: [_COMPACT], SPACED: [_SPACED], FOLLOW: [_COMPACT, _SPACED, *_LINES]}


def styled(expression: Expression, whitespace: str) -> Expression:
    """An expression with places, in the styles of `whitespace`.

    Cost: the parts of `expression` that a walk reaches are built again for each style and depth.
    """
    return _Styled(expression, whitespace)


class _Styled(Lazy):
    """Invariant: it owns its source, which is forgotten with it."""

    __slots__ = ("_levels", "_source")

    def __init__(self, source: Expression, whitespace: str) -> None:
        self._source = source
        self._levels = [_Level(style) for style in _STYLES[whitespace]]
        super().__init__(lambda: Alt([level.of(source) for level in self._levels]))

    def forget(self) -> Expression | None:
        for level in self._levels:
            level.forget()
        forget(self._source)
        return super().forget()


class _Level:
    """The expressions of one style at one depth. Invariant: one for each original expression, so
    that a loop stays a loop."""

    def __init__(self, style: _Style, depth: int = 0, in_one_line: _Level | None = None) -> None:
        self._style, self._depth = style, depth
        has_lines = style.unit is not None
        self._in_one_line = in_one_line or (_Level(_SPACED) if has_lines else None)
        self._known: dict[int, tuple[Expression, Expression]] = {}  # keeps the originals alive

    @cached_property
    def _inside(self) -> _Level:
        """The level of the members of an object, or of the items of an array."""
        is_last = self._style.unit is None or self._depth == MAX_DEPTH
        return self if is_last else _Level(self._style, self._depth + 1, self._in_one_line)

    def forget(self) -> None:
        self._known.clear()
        for level in (self._in_one_line, vars(self).pop("_inside", None)):
            if level is not None and level is not self:
                level.forget()

    def of(self, expression: Expression) -> Expression:
        known = self._known.get(id(expression))
        if known is None:
            known = self._known[id(expression)] = expression, self._made(expression)
        return known[1]

    def _made(self, expression: Expression) -> Expression:
        if isinstance(expression, Seq):
            return self._sequence(expression.parts)
        if isinstance(expression, Alt):
            return Alt([self.of(option) for option in expression.options])
        if isinstance(expression, Lazy):
            return Lazy(lambda lazy: self.of(lazy.get()), expression)
        if expression is COMMA:
            return Seq(literal(self._style.comma), self._line(self._depth))
        if expression is COLON:
            return literal(self._style.colon)
        if expression is END:
            return self._line(self._depth - 1)
        if isinstance(expression, Literals) and {*expression.followings} != {EMPTY}:
            followings = [self.of(one) for one in expression.followings]
            return Literals(zip(expression.texts, followings, strict=True))
        return expression

    def _sequence(self, parts: tuple[Expression, ...]) -> Expression:
        """The parts after the place of an opening bracket are inside that bracket."""
        for i, part in enumerate(parts):
            if part is OBJECT or part is ARRAY:
                inside = self._inside
                rest = parts[i + 1 :]
                ways = [inside._line(inside._depth), inside._sequence(rest)]
                if part is ARRAY and self._in_one_line is not None:
                    ways = [Alt([Seq(*ways), self._in_one_line._sequence(rest)])]
                return Seq(*map(self.of, parts[:i]), *ways)
        return Seq(*map(self.of, parts))

    def _line(self, depth: int) -> Expression:
        unit = self._style.unit
        return EMPTY if unit is None else literal(b"\n" + depth * unit)


def with_places(grammar: ParsedGrammar) -> ParsedGrammar:
    """xgrammar's grammar of a schema, with places instead of any whitespace next to a bracket, a
    comma or a colon. Cost: a few microseconds per KB."""
    data, begins, kinds = grammar.data, grammar.begins, np.frombuffer(grammar.kinds, np.uint8)
    first, sizes, count = begins[:-1], np.diff(begins) - 2, len(kinds)
    what = np.zeros(count, np.int32)  # a byte, or 1 for any whitespace
    is_byte = (kinds == Kind.BYTES) & (sizes == 1)
    what[is_byte] = data[first[is_byte] + 2] & 255
    for number in np.flatnonzero((kinds == Kind.CLASS_STAR) & (sizes == len(_BLANK))).tolist():
        what[number] = grammar.numbers(number)[1:] == _BLANK
    is_sequence = kinds == Kind.SEQUENCE
    steps = np.zeros(len(data) + 1, np.int32)  # into a sequence, and out of it
    steps[first[is_sequence] + 2] += 1
    steps[begins[1:][is_sequence]] -= 1
    is_part = np.cumsum(steps[:-1]) > 0
    parts = np.where(is_part, what[np.where(is_part, data, 0)], 0)
    after, before = _AFTER[np.roll(parts, 1)], _BEFORE[np.roll(parts, -1)]
    is_empty = (before == 2) & (after >= 0) & (after < 2)  # within {} or []
    place = np.where(before < 0, after, np.where(is_empty, 5, before))
    changed = np.where((parts == 1) & (place >= 0), count + place, data)
    added = [np.array([Kind.BYTES, len(text), *text]) for text in PLACES]
    ends = begins[-1] + np.cumsum([len(one) for one in added])
    data = np.concatenate([changed, *added]).astype(np.int32)
    return replace(grammar, data=data, begins=np.concatenate([begins, ends]).astype(np.int32))
