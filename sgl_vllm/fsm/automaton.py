"""Expressions over bytes, and the automaton of one, made deterministic as far as it is walked.

Owns: what may come next, byte by byte, and what must (compressed edges). Does not own tokens
(`masks.py`), nor where expressions come from (`regex.py`, `schema.py`). Pure.

An expression is made of terminals, which eat bytes, and of structure:

    Seq(Literals(b'{"age": '), Dfa(-?[1-9][0-9]*), Literals(b'}'))

A *thread* is a terminal with what follows it, a linked list of expressions: the stack of a
pushdown automaton, so that expressions may refer to themselves. A *state* is the set of threads
that the bytes so far allow. States are made when a walk first reaches them and kept, so a grammar
costs what its outputs visit, whatever it could describe.

Compressed edges (arXiv 2312.07104, section 4): where one byte only may come next, again and again,
`State.forced` gives the whole run at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import ClassVar, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from sgl_vllm.fsm.tables import byte_classes, byte_set

MAX_THREADS = 4_000
"""More threads in one state than this, and the grammar is refused while it runs."""

MAX_STATES = 20_000
"""So many states are kept; beyond, an automaton begins anew."""


class TooComplexError(ValueError):
    """A grammar whose states would grow without bound."""


# -- expressions ------------------------------------------------------------------------------


class Seq:
    """One expression after the other."""

    __slots__ = ("parts",)

    def __init__(self, *parts: Expression) -> None:
        self.parts = parts


class Alt:
    """Any one of several."""

    __slots__ = ("options",)

    def __init__(self, options: Iterable[Expression]) -> None:
        self.options = tuple(options)


class Lazy:
    """An expression that is made when it is first reached; so it can stand within itself."""

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

    All share their first `position` bytes, which have been eaten.
    """

    __slots__ = ("_next", "entries", "first", "position")

    def __init__(
        self, entries: tuple[tuple[bytes, Expression | None], ...], position: int = 0
    ) -> None:
        self.entries = entries
        self.position = position
        self.first = 0
        for text, _ in entries:
            self.first |= 1 << text[position]
        self._next: dict[int, tuple[Literals | None, tuple[Expression, ...]]] = {}

    def step(self, byte: int) -> tuple[Literals | None, tuple[Expression, ...]]:
        known = self._next.get(byte)
        if known is None:
            position = self.position
            passed = [entry for entry in self.entries if entry[0][position] == byte]
            longer = tuple(entry for entry in passed if len(entry[0]) > position + 1)
            done = tuple(entry[1] or EMPTY for entry in passed if len(entry[0]) == position + 1)
            known = self._next[byte] = (Literals(longer, position + 1) if longer else None, done)
        return known


class ByteDfa:
    """A deterministic automaton over bytes, all of whose states lead to acceptance.

             a          b
        (0) ---> (1) ------> ((2))       table[0, 97] == 1, table[1, 98] == 2, accepting[2]

    Attributes:
        table: (states, 256) int32: the next state, -1 for none.
        accepting: (states,) bool.
        by_class, classes: the same table with equal columns kept once, and each byte's column.
    """

    __slots__ = ("_states", "accepting", "by_class", "classes", "start", "table")

    def __init__(
        self, table: NDArray[np.int32], accepting: NDArray[np.bool_], start: int = 0
    ) -> None:
        self.table = np.ascontiguousarray(table, np.int32)
        self.accepting = np.ascontiguousarray(accepting, np.bool_)
        self.start = start
        classes, firsts = byte_classes(self.table)
        self.classes = classes.astype(np.uint8)
        self.by_class = np.ascontiguousarray(self.table[:, firsts])
        self._states: dict[int, Dfa] = {}

    @property
    def num_states(self) -> int:
        return len(self.accepting)

    @property
    def expression(self) -> Expression:
        """The automaton as an expression."""
        start = self.state(self.start)
        if start is None:
            return EMPTY if self.accepting[self.start] else NEVER
        return Alt((start, EMPTY)) if self.accepting[self.start] else start

    def state(self, index: int) -> Dfa | None:
        """The terminal that stands in a state; None if nothing leads on from it."""
        known = self._states.get(index)
        if known is None:
            known = Dfa(self, index)
            if not known.first:
                return None
            self._states[index] = known
        return known

    def accepts(self, data: bytes) -> bool:
        state = self.start
        for byte in data:
            state = int(self.table[state, byte])
            if state < 0:
                return False
        return bool(self.accepting[state])


class Dfa:
    """A terminal: a `ByteDfa` in one of its states."""

    __slots__ = ("_row", "dfa", "first", "index")

    def __init__(self, dfa: ByteDfa, index: int) -> None:
        self.dfa = dfa
        self.index = index
        row = dfa.table[index]
        self.first = byte_set(row >= 0)
        self._row: list[int] = row.tolist()

    def step(self, byte: int) -> tuple[Dfa | None, tuple[Expression, ...]]:
        index = self._row[byte]
        dfa = self.dfa
        return dfa.state(index), (EMPTY,) if dfa.accepting[index] else ()


class JsonString:
    """A terminal: the rest of a JSON string, counting its characters, to the closing quote.

    `low` more characters at least, `high` at most (None: any number). Shared by all grammars.

    Attributes:
        names: what the rest must not be: (name, bytes of it already seen).
    """

    __slots__ = ("body", "first", "high", "index", "low", "names")

    _known: ClassVar[dict[tuple[object, ...], JsonString]] = {}

    def __init__(
        self,
        body: StringBody,
        index: int,
        low: int,
        high: int | None,
        names: tuple[bytes, ...],
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
            if low > 0 or b"" in names:
                self.first &= ~(1 << QUOTE)

    @classmethod
    def of(
        cls,
        body: StringBody,
        index: int = 0,
        low: int = 0,
        high: int | None = None,
        names: tuple[bytes, ...] = (),
    ) -> JsonString:
        key = (body, index, low, high, names)
        known = cls._known.get(key)
        if known is None:
            if len(cls._known) > _MAX_KNOWN_TEXTS:
                cls._known.clear()
            known = cls._known[key] = JsonString(body, index, low, high, names)
        return known

    def step(self, byte: int) -> tuple[JsonString | None, tuple[Expression, ...]]:
        index = self.body.rows[self.index][byte]
        if index == -2:
            return None, (EMPTY,)
        low, high = self.low, self.high
        if index == 0:
            low = max(0, low - 1)
            high = None if high is None else high - 1
        names = tuple([n[1:] for n in self.names if n and n[0] == byte]) if self.names else ()
        return JsonString.of(self.body, index, low, high, names), ()


_MAX_KNOWN_TEXTS = 100_000
QUOTE = 0x22


class StringBody:
    """The inside of JSON strings as a DFA over UTF-8 (RFC 8259, section 7; RFC 3629, section 4).

    State 0 lies between characters; the closing quote leads from there to -2.
    """

    def __init__(self, escapes: Literal["any", "characters", "needed", "none"]) -> None:
        """`escapes`: which may stand in the string: any; those of whole characters, that is, no
        halves of surrogate pairs; only those without which JSON cannot write a character, so that
        every text has one spelling, that of `json.dumps(..., ensure_ascii=False)`; or none."""
        rows = [[-1] * 256 for _ in range(14)]
        between, one, two, three, e0, ed, f0, f4, escape, hex4, hex3, hex2, hex1, extra = range(14)
        for byte in range(0x20, 0x80):
            rows[between][byte] = between
        rows[between][QUOTE] = -2
        rows[between][0x5C] = escape if escapes != "none" else -1
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
            moves |= {hex4: ((_HEX_DIGITS, hex3), (b"dD", extra)), extra: ((b"01234567", hex2),)}
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
        self.first = [byte_set(row != -1) for row in self.table]


_HEX_DIGITS = b"0123456789abcdefABCDEF"
STRING = StringBody("any")
COUNTED_STRING = StringBody("characters")
NAME_STRING = StringBody("needed")
PLAIN_STRING = StringBody("none")

Terminal: TypeAlias = Literals | Dfa | JsonString
Expression: TypeAlias = Seq | Alt | Lazy | Terminal

EMPTY = Seq()
NEVER = Alt(())


@lru_cache(maxsize=4096)
def literal(text: bytes) -> Expression:
    """One text; the same expression for the same text, so that walks through it are shared."""
    return Literals(((text, None),)) if text else EMPTY


# -- states -----------------------------------------------------------------------------------


class Continuation:
    """A linked list of what follows a terminal."""

    __slots__ = ("expression", "then")

    def __init__(self, expression: Expression, then: Continuation | None) -> None:
        self.expression = expression
        self.then = then


Thread: TypeAlias = "tuple[Terminal, Continuation | None]"


class State:
    """What the bytes so far allow.

    Attributes:
        first: the bytes that may come next, as bits (bit b for byte b).
        accepting: whether the text may end here.
    """

    __slots__ = ("_next", "accepting", "automaton", "first", "forced_run", "mask", "threads")

    def __init__(self, automaton: Automaton, threads: tuple[Thread, ...], accepting: bool) -> None:
        self.automaton = automaton
        self.threads = threads
        self.accepting = accepting
        self.first = 0
        for terminal, _ in threads:
            self.first |= terminal.first
        self._next: dict[int, State] = {}
        self.forced_run: tuple[bytes, State] | None = None
        self.mask: object = None
        """For `masks.py`: what it has found out about this state."""

    def step(self, byte: int) -> State | None:
        """The state after one more byte; None if it may not come."""
        known = self._next.get(byte)
        if known is not None:
            return known
        if not self.first >> byte & 1:
            return None
        threads: dict[Thread, None] = {}
        accepting = False
        automaton = self.automaton
        for terminal, then in self.threads:
            if terminal.first >> byte & 1:
                further, done = terminal.step(byte)
                if further is not None and further.first:
                    threads[further, then] = None
                for expression in done:
                    accepting |= automaton.reach(expression, then, threads)
        known = automaton.state(threads, accepting)
        if not known.first and not known.accepting:
            self.first &= ~(1 << byte)
            return None
        self._next[byte] = known
        return known

    def forced(self) -> tuple[bytes, State]:
        """The longest run of bytes that must come next, and the state after it."""
        if self.forced_run is None:
            run = bytearray()
            state = self
            while not state.accepting and state.first.bit_count() == 1:
                byte = state.first.bit_length() - 1
                following = state.step(byte)
                if following is None or len(run) >= _MAX_FORCED_BYTES:
                    break
                run.append(byte)
                state = following
            self.forced_run = bytes(run), state
        return self.forced_run


_MAX_FORCED_BYTES = 4_096
"""A longer run is told in parts, so that nobody waits for it to be walked and tokenized."""


class Automaton:
    """The states of one expression, as far as they have been reached.

    Compiling is nothing: `start` is made from the expression, the others when a walk needs them.
    """

    def __init__(self, expression: Expression) -> None:
        self._states: dict[tuple[frozenset[Thread], bool], State] = {}
        self._thens: dict[tuple[Expression, Continuation | None], Continuation] = {}
        self._after: dict[Continuation | None, State] = {}
        self._expression = expression
        self._start: State | None = None
        self._begin()

    @property
    def start(self) -> State:
        return self._start or self._begin()

    def _begin(self) -> State:
        threads: dict[Thread, None] = {}
        accepting = self.reach(self._expression, None, threads)
        self._start = self.state(threads, accepting)
        return self._start

    def forget(self) -> None:
        """Begin anew. States that somebody stands in stay good, with those behind them."""
        self._states.clear()
        self._thens.clear()
        self._after.clear()
        self._start = None

    @property
    def num_states(self) -> int:
        return len(self._states)

    def state(self, threads: dict[Thread, None], accepting: bool) -> State:
        key = frozenset(threads), accepting
        known = self._states.get(key)
        if known is None:
            if len(threads) > MAX_THREADS:
                raise TooComplexError(
                    f"the grammar leaves more than {MAX_THREADS} ways open at one point"
                )
            if len(self._states) >= MAX_STATES:
                self.forget()
            known = self._states[key] = State(self, tuple(threads), accepting)
        return known

    def after(self, then: Continuation | None) -> State:
        """The state in which what follows a terminal begins."""
        known = self._after.get(then)
        if known is None:
            threads: dict[Thread, None] = {}
            accepting = self.reach(EMPTY, then, threads)
            known = self._after[then] = self.state(threads, accepting)
        return known

    def begin(self, expression: Expression, then: Continuation | None) -> State:
        """The state in which `expression`, followed by `then`, begins."""
        return self.after(then if expression is EMPTY else self._then(expression, then))

    def reach(
        self, expression: Expression, then: Continuation | None, threads: dict[Thread, None]
    ) -> bool:
        """Add the threads with which `expression`, followed by `then`, begins.

        Returns: whether the text may end here.
        """
        accepting = False
        stack = [(expression, then)]
        seen: set[tuple[Expression, Continuation | None]] = set()
        while stack:
            expression, then = stack.pop()
            if isinstance(expression, Seq):
                parts = expression.parts
                if not parts:
                    if then is None:
                        accepting = True
                    else:
                        stack.append((then.expression, then.then))
                    continue
                for part in reversed(parts[1:]):
                    then = self._then(part, then)
                stack.append((parts[0], then))
            elif isinstance(expression, (Alt, Lazy)):  # a union would be made anew each time
                if (expression, then) in seen:
                    continue
                seen.add((expression, then))
                if len(seen) > MAX_THREADS:
                    raise TooComplexError(
                        f"the grammar opens more than {MAX_THREADS} ways at one point"
                    )
                if isinstance(expression, Lazy):
                    stack.append((expression.get(), then))
                else:
                    stack.extend([(option, then) for option in reversed(expression.options)])
            elif expression.first:
                threads[expression, then] = None
        return accepting

    def _then(self, expression: Expression, then: Continuation | None) -> Continuation:
        key = expression, then
        known = self._thens.get(key)
        if known is None:
            known = self._thens[key] = Continuation(expression, then)
        return known
