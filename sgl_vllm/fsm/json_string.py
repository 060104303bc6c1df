"""The terminal for JSON strings of any or of bounded length.

Owns how characters of a JSON string are spelled in bytes, and their count; and the automaton that
counts them, to combine with those of patterns (`regex.json_string_search`). Pure.
"""

from __future__ import annotations

from functools import lru_cache
from typing import ClassVar, Literal
from weakref import WeakValueDictionary

import numpy as np

from sgl_vllm.fsm.byte_dfa import ByteDfa, Dfa
from sgl_vllm.fsm.expressions import EMPTY, Expression
from sgl_vllm.fsm.names import Names
from sgl_vllm.fsm.tables import byte_set, column_classes

QUOTE = 0x22
_HEX_DIGITS = b"0123456789abcdefABCDEF"


class JsonString:
    """A terminal: the rest of a JSON string, counting its characters, up to the closing quote.

    At least `low` more characters, at most `high` (None: any number). Equal strings are one object,
    shared by all grammars.

    Attributes:
        names: what the rest must not be.
    """

    __slots__ = ("__weakref__", "body", "first", "high", "index", "low", "names")

    _shared: ClassVar[WeakValueDictionary[tuple[object, ...], JsonString]] = WeakValueDictionary()

    def __init__(
        self,
        body: StringBody,
        index: int,
        low: int,
        high: int | None,
        names: Names | None,
    ) -> None:
        self.body = body
        self.index = index
        self.low = low
        self.high = high
        self.names = names
        self.first = body.first[index]
        if index == 0:
            if high == 0:
                self.first &= 1 << QUOTE
            if low > 0 or (names is not None and names.ends):
                self.first &= ~(1 << QUOTE)

    @classmethod
    def of(
        cls,
        body: StringBody,
        index: int = 0,
        low: int = 0,
        high: int | None = None,
        names: Names | None = None,
    ) -> JsonString:
        key = (body, index, low, high, names)
        known = cls._shared.get(key)
        if known is None:
            known = cls._shared[key] = JsonString(body, index, low, high, names)
        return known

    def step(self, byte: int) -> tuple[JsonString | None, tuple[Expression, ...]]:
        index = self.body.rows[self.index][byte]
        if index == -2:
            return None, (EMPTY,)
        low, high = self.low, self.high
        if index == 0:
            low = max(0, low - 1)
            high = None if high is None else high - 1
        names = self.names.after(byte) if self.names is not None else None
        return JsonString.of(self.body, index, low, high, names), ()


class StringBody:
    """The inside of JSON strings as an automaton over UTF-8 (RFC 8259, 7; RFC 3629, 4).

    State 0 is between characters; the closing quote leads from there to -2.
    """

    def __init__(self, escapes: Literal["any", "characters", "needed", "raw"]) -> None:
        """
        Args:
            escapes: which escapes a string may contain. any: all of JSON's. characters: those of
                whole characters; a surrogate pair is one, half of a pair is none. needed: only
                those without which JSON cannot write a character, so that every text has one
                spelling, the one of `json.dumps(..., ensure_ascii=False)`. raw: none, but control
                characters that end no line may stand for themselves, which is no JSON.
        """
        rows = [[-1] * 256 for _ in range(20)]
        between, one, two, three, e0, ed, f0, f4, escape, hex4, hex3, hex2, hex1, extra = range(14)
        high2, high1, low_escape, low_u, low_d, low_half = range(14, 20)
        for byte in range(0x20, 0x80):
            rows[between][byte] = between
        rows[between][QUOTE] = -2
        rows[between][0x5C] = escape if escapes != "raw" else -1
        if escapes == "raw":
            for byte in {*range(0x20)} - {*b"\r\n"}:
                rows[between][byte] = between
        for byte in range(0xC2, 0xE0):
            rows[between][byte] = one
        for byte in range(0xE1, 0xF0):
            rows[between][byte] = two
        rows[between][0xE0], rows[between][0xED] = e0, ed
        for byte in range(0xF1, 0xF4):
            rows[between][byte] = three
        rows[between][0xF0], rows[between][0xF4] = f0, f4
        continuations = {
            one: (0x80, 0xC0, between),
            two: (0x80, 0xC0, one),
            three: (0x80, 0xC0, two),
            e0: (0xA0, 0xC0, one),
            ed: (0x80, 0xA0, one),
            f0: (0x90, 0xC0, two),
            f4: (0x80, 0x90, two),
        }
        for state, (begin, end, after) in continuations.items():
            for byte in range(begin, end):
                rows[state][byte] = after
        moves = {
            escape: ((b'"\\/bfnrt', between), (b"u", hex4)),
            hex4: ((_HEX_DIGITS, hex3),),
            hex3: ((_HEX_DIGITS, hex2),),
            hex2: ((_HEX_DIGITS, hex1),),
            hex1: ((_HEX_DIGITS, between),),
        }
        if escapes == "characters":
            moves |= {
                hex4: ((_HEX_DIGITS, hex3), (b"dD", extra)),
                extra: ((b"01234567", hex2), (b"89abAB", high2)),
                high2: ((_HEX_DIGITS, high1),),  # D83D, say, and DE00 after it
                high1: ((_HEX_DIGITS, low_escape),),
                low_escape: ((b"\\", low_u),),
                low_u: ((b"u", low_d),),
                low_d: ((b"dD", low_half),),
                low_half: ((b"cdefCDEF", hex2),),
            }
        elif escapes == "needed":
            moves |= {
                escape: ((b'"\\bfnrt', between), (b"u", hex4)),
                hex4: ((b"0", hex3),),
                hex3: ((b"0", hex2),),
                hex2: ((b"0", extra), (b"1", hex1)),
                hex1: ((b"0123456789abcdef", between),),
                extra: ((b"01234567bef", between),),
            }
        for state, ways in moves.items():
            for among, after in ways:
                for byte in among:
                    rows[state][byte] = after
        self.rows = rows
        self.table = np.array(rows, np.int32)
        # Loops without checks follow it.
        assert self.table.min() >= -2 and self.table.max() < len(rows)
        self.first = [byte_set(row != -1) for row in self.table]
        self._inside = np.unique(self.table[self.table >= 0]).tolist()
        """The states that a string can be in."""
        self._rest = self._as_dfa()

    def rest(self, index: int) -> Dfa:
        """The rest of a string of any length from a state on, up to its closing quote."""
        terminal = self._rest.terminal(self._inside.index(index))
        assert terminal is not None
        return terminal

    def _as_dfa(self) -> ByteDfa:
        number = np.full(len(self.table) + 2, -1, np.int32)
        number[self._inside] = np.arange(len(self._inside))
        number[-2] = end = len(self._inside)
        accepting = np.zeros(end + 1, np.bool_)
        accepting[end] = True
        nothing = np.full((1, 256), -1, np.int32)
        return ByteDfa.of_table(
            np.concatenate([number[self.table[self._inside]], nothing]), accepting
        )


STRING = StringBody("any")
COUNTED_STRING = StringBody("characters")
NAME_STRING = StringBody("needed")
RAW_STRING = StringBody("raw")


@lru_cache(maxsize=16)
def dfa_of_length(low: int, high: int | None) -> ByteDfa:
    """The automaton of JSON strings, quotes included, of `low` to `high` characters (None: any
    number). Cost: one copy of the states of `STRING` (half a KiB) for each character up to the
    limits.

        "           a           b          "
    (0) ---> (1, 0) ---> (1, 1) ---> (1, 2) ---> ((end))     the second number counts characters
    """
    counted = high if high is not None else low
    inside = np.unique(STRING.table[STRING.table >= 0])  # its start is state 0
    assert inside[0] == 0
    size = len(inside)
    number = np.full(STRING.table.max() + 1, -1)
    number[inside] = np.arange(size)
    classes, firsts = column_classes(STRING.table)
    body = STRING.table[np.ix_(inside, firsts)]
    quote = classes[QUOTE]
    step = np.where(body > 0, number[body], -1)
    end = 1 + counted * size + (1 if high is not None else size)
    table = np.full((end + 1, len(firsts)), -1, np.int32)
    # The same rows for each number of characters, only moved.
    counts = np.arange(counted + (high is None)).reshape(-1, 1, 1)
    rows = np.where(step >= 0, 1 + counts * size + step, -1)
    rows = np.where(body == 0, 1 + np.minimum(counts + 1, counted) * size, rows)
    table[1 : 1 + rows.shape[0] * size] = rows.reshape(-1, len(firsts))
    table[0, quote] = 1
    table[1 + np.arange(low, counted + 1) * size, quote] = end
    accepting = np.zeros(end + 1, np.bool_)
    accepting[end] = True
    return ByteDfa(table, classes, accepting)
