"""Expressions over bytes: what a compiled format is made of.

Owns structure (`Seq`, `Alt`, `Lazy`), the terminal for literal text, and what every terminal can
do. Does not own the other terminals (`byte_dfa.py`, `json_string.py`), nor the walk over an
expression (`automaton.py`). Pure.

Terminals consume bytes; structure says in which order:

    Seq(literal(b'{"age": '), Dfa(-?[1-9][0-9]*), literal(b'}'))

Sets of bytes are integers: bit b is set if byte b is in the set.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol, TypeAlias

from sgl_vllm.fsm.small_cache import cached_if_few


class Terminal(Protocol):
    """Part of an expression that consumes bytes. Immutable, and compared by identity.

    Attributes:
        first: the bytes that `step` takes, as bits.
    """

    first: int

    def step(self, byte: int) -> tuple[Terminal | None, tuple[Expression, ...]]:
        """Consume one byte of `first`.

        Returns: the terminal that remains, if bytes may follow inside it; and, for each way in
            which the terminal may end here, the expression that continues it.
        """
        ...


class Seq:
    """One expression after another."""

    __slots__ = ("parts",)

    def __init__(self, *parts: Expression) -> None:
        self.parts = parts


class Alt:
    """Any one of several expressions."""

    __slots__ = ("options",)

    def __init__(self, options: Iterable[Expression]) -> None:
        self.options = tuple(options)


class Lazy:
    """An expression that is built when a walk first reaches it, so that it can contain itself."""

    __slots__ = ("_expression", "_make")

    def __init__(self, make: Callable[[], Expression]) -> None:
        self._make: Callable[[], Expression] | None = make
        self._expression: Expression | None = None

    def get(self) -> Expression:
        if self._expression is None:
            assert self._make is not None
            self._expression = self._make()
            self._make = None
        return self._expression


class Literals:
    """A terminal: one of several byte strings, each with its own continuation.

    Invariant: all entries are longer than `position` and share their first `position` bytes, which
    have been consumed.

    Args:
        tails: of a single entry, its terminals by position, which they share.
    """

    __slots__ = ("_next", "_tails", "entries", "first", "position")

    def __init__(
        self,
        entries: tuple[tuple[bytes, Expression | None], ...],
        position: int = 0,
        tails: dict[int, Literals] | None = None,
    ) -> None:
        self.entries = entries
        self.position = position
        self.first = 0
        for text, _ in entries:
            self.first |= 1 << text[position]
        self._next: dict[int, tuple[Literals | None, tuple[Expression, ...]]] | None = None
        self._tails = tails

    def step(self, byte: int) -> tuple[Literals | None, tuple[Expression, ...]]:
        if self._next is None:
            self._next = {}
        known = self._next.get(byte)
        if known is None:
            known = self._next[byte] = self._after(byte)
        return known

    def _after(self, byte: int) -> tuple[Literals | None, tuple[Expression, ...]]:
        if len(self.entries) == 1:
            return self.at(self.position + 1)
        position = self.position
        matching = [entry for entry in self.entries if entry[0][position] == byte]
        longer = tuple([entry for entry in matching if len(entry[0]) > position + 1])
        done = tuple([entry[1] or EMPTY for entry in matching if len(entry[0]) == position + 1])
        return Literals(longer, position + 1) if longer else None, done

    def at(self, position: int) -> tuple[Literals | None, tuple[Expression, ...]]:
        """As `step` along a single entry up to a position."""
        ((text, following),) = self.entries
        if position == len(text):
            return None, (following or EMPTY,)
        if self._tails is None:
            self._tails = {self.position: self}
        tail = self._tails.get(position)
        if tail is None:
            tail = self._tails[position] = Literals(self.entries, position, self._tails)
        return tail, ()


Expression: TypeAlias = "Seq | Alt | Lazy | Terminal"

EMPTY = Seq()
NEVER = Alt(())


@cached_if_few
def literal(text: bytes) -> Expression:
    """One text. The same expression for the same short text, so that walks are shared."""
    return Literals(((text, None),)) if text else EMPTY
