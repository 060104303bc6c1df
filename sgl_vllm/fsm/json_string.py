"""The terminal for JSON strings of any or of bounded length.

Owns how characters of a JSON string are spelled in bytes, and their count; and the automaton that
counts them, to combine with those of patterns (`regex.json_string_search`). Pure.
"""

from __future__ import annotations

from functools import cached_property, lru_cache
from typing import ClassVar
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from sgl_vllm.fsm.byte_dfa import ByteDfa, Dfa
from sgl_vllm.fsm.expressions import EMPTY, Expression
from sgl_vllm.fsm.names import Names
from sgl_vllm.fsm.regex import of_pattern
from sgl_vllm.fsm.tables import byte_set

QUOTE = 0x22


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

    Args:
        plain: the pattern of a character that stands for itself.
        escapes: the pattern of what may follow a backslash. If empty, there are no escapes.

    Attributes:
        pattern: of the rest of a string of any length, its closing quote included.
    """

    def __init__(self, plain: str, escapes: str = "") -> None:
        escaped = rf"|\\(?:{escapes})" if escapes else ""
        self.pattern = f'(?:{plain}{escaped})*"'

    @cached_property
    def dfa(self) -> ByteDfa:
        """The automaton of `pattern`."""
        return of_pattern(self.pattern)

    @cached_property
    def table(self) -> NDArray[np.int32]:
        """(states, 256): the state that each byte leads to, -1 for none, -2 for the end."""
        dfa = self.dfa
        table = dfa.by_class[:, dfa.classes]
        return np.where((table >= 0) & dfa.accepting[table], -2, table).astype(np.int32)

    @cached_property
    def rows(self) -> list[list[int]]:
        """`table` as lists."""
        rows: list[list[int]] = self.table.tolist()
        return rows

    @cached_property
    def first(self) -> list[int]:
        """The bytes that lead on from each state, as bits."""
        return [byte_set(row != -1) for row in self.table]

    def rest(self, index: int) -> Dfa:
        """The rest of a string of any length from a state on, up to its closing quote."""
        terminal = self.dfa.terminal(index)
        assert terminal is not None
        return terminal


_PLAIN = r'[^"\\\x00-\x1f]'
_HEX = "[0-9a-fA-F]"
_UNPAIRED = f"(?:[0-9abcefABCEF]{_HEX}|[dD][0-7]){_HEX}{{2}}"
_PAIR = rf"[dD][89abAB]{_HEX}{{2}}\\u[dD][c-fC-F]{_HEX}{{2}}"

STRING = StringBody(_PLAIN, rf'["\\/bfnrt]|u{_HEX}{{4}}')
"""All of JSON's escapes are allowed."""

COUNTED_STRING = StringBody(_PLAIN, rf'["\\/bfnrt]|u(?:{_UNPAIRED}|{_PAIR})')
"""Escapes of whole characters are allowed: of a surrogate pair, but not of half of one."""

NAME_STRING = StringBody(_PLAIN, r'["\\bfnrt]|u00(?:0[0-7bef]|1[0-9a-f])')
"""Only the escapes that JSON requires are allowed, so every text has one spelling: that of
`json.dumps(..., ensure_ascii=False)`."""

RAW_STRING = StringBody(r'[^"\\\r\n]')
"""Escapes are not allowed. Control characters other than line breaks are, although JSON forbids
them."""


@lru_cache(maxsize=16)
def dfa_of_length(low: int, high: int | None) -> ByteDfa:
    """The automaton of JSON strings, quotes included, of `low` to `high` characters (None: any
    number). Cost: one copy of the states of `STRING` (half a KiB) for each character up to the
    limits.

        "           a           b          "
    (0) ---> (1, 0) ---> (1, 1) ---> (1, 2) ---> ((end))     the second number counts characters
    """
    counted = high if high is not None else low
    dfa, size = STRING.dfa, STRING.dfa.num_states
    inside, quote = dfa.by_class, dfa.class_of[QUOTE]
    end = 1 + counted * size + (1 if high is not None else size)
    table = np.full((end + 1, inside.shape[1]), -1, np.int32)
    # The same rows for each number of characters, only moved.
    counts = np.arange(counted + (high is None)).reshape(-1, 1, 1)
    rows = np.where(inside > 0, 1 + counts * size + inside, -1)
    rows = np.where(inside == 0, 1 + np.minimum(counts + 1, counted) * size, rows)
    table[1 : 1 + rows.shape[0] * size] = rows.reshape(-1, inside.shape[1])
    table[1 : 1 + low * size : size, quote] = -1
    table[1 + low * size : end : size, quote] = end
    table[0, quote] = 1
    accepting = np.zeros(end + 1, np.bool_)
    accepting[end] = True
    return ByteDfa(table, dfa.classes, accepting)
