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
from copy import copy
from typing import Any, Protocol, TypeAlias  # Any: arguments of a function

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
    """An expression that is built when a walk first reaches it, so that it can contain itself.

    Args:
        make: builds it from `arguments`. Two threads that reach it at a time may both call it.
    """

    __slots__ = ("_call", "_expression")

    def __init__(self, make: Callable[..., Expression], *arguments: Any) -> None:
        self._call: tuple[Any, ...] | None = (make, *arguments)
        self._expression: Expression | None = None

    def get(self) -> Expression:
        call = self._call
        if call is not None:
            make, *arguments = call
            self._expression = make(*arguments)
            self._call = None
        assert self._expression is not None
        return self._expression

    def forget(self) -> Expression | None:
        """Take it apart.

        Returns: what was built.
        """
        expression, self._call, self._expression = self._expression, None, None
        return expression


class Literals:
    """A terminal: one of several byte strings, each with its own continuation.

    Invariant: all texts are longer than `position` and share their first `position` bytes, which
    have been consumed.

    Attributes:
        texts, followings: each text with its continuation.
    """

    __slots__ = ("_longer", "first", "followings", "position", "texts")

    def __init__(
        self, entries: Iterable[tuple[bytes, Expression | None]], position: int = 0
    ) -> None:
        self.texts, followings = zip(*entries, strict=True)
        self.followings: tuple[Expression, ...] = tuple([one or EMPTY for one in followings])
        self.position = position
        self.first = 0
        for text in self.texts:
            self.first |= 1 << text[position]
        self._longer: dict[int, Literals] = {}
        """The literals that remain, by the next byte; or by position if there is only one text."""

    def step(self, byte: int) -> tuple[Literals | None, tuple[Expression, ...]]:
        position = self.position
        if len(self.texts) == 1:
            return self.at(position + 1)
        matching = [
            entry
            for entry in zip(self.texts, self.followings, strict=True)
            if entry[0][position] == byte
        ]
        done = tuple([then for text, then in matching if len(text) == position + 1])
        if len(done) == len(matching):
            return None, done
        longer = self._longer.get(byte)
        if longer is None:
            rest = [entry for entry in matching if len(entry[0]) > position + 1]
            longer = self._longer[byte] = Literals(rest, position + 1)
        return longer, done

    def at(self, position: int) -> tuple[Literals | None, tuple[Expression, ...]]:
        """As `step` along a single text up to a position."""
        (text,) = self.texts
        if position == len(text):
            return None, self.followings
        tail = self._longer.get(position)
        if tail is None:
            tail = self._longer[position] = copy(self)  # all of them share their tails
            tail.position, tail.first = position, 1 << text[position]
        return tail, ()

    def forget_rests(self) -> Iterable[Literals]:
        """What remained after some of the bytes."""
        longer, self._longer = self._longer, {}
        return longer.values()


Expression: TypeAlias = "Seq | Alt | Lazy | Terminal"

EMPTY = Seq()
NEVER = Alt(())


def forget(expression: Expression) -> None:
    """Break the cycles of an expression that is no longer walked, so that it is freed at once.
    Otherwise a long garbage collection frees those of many formats."""
    pending: list[Expression] = [expression]
    seen: set[int] = set()
    while pending:
        one = pending.pop()
        if isinstance(one, Lazy):
            inside = one.forget()
            if inside is not None:
                pending.append(inside)
        elif isinstance(one, (Seq, Alt, Literals)) and id(one) not in seen:
            seen.add(id(one))
            if isinstance(one, Seq):
                pending += one.parts
            elif isinstance(one, Alt):
                pending += one.options
            else:
                pending += (*one.followings, *one.forget_rests())


@cached_if_few
def literal(text: bytes) -> Expression:
    """One text. The same expression for the same short text, so that walks are shared."""
    return Literals(((text, None),)) if text else EMPTY
