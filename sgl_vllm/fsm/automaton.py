"""The automaton of an expression, made deterministic as far as it is walked.

Owns which bytes may come next, and which must. Does not own tokens (`masks.py`), nor where
expressions come from (`regex.py`, `schema/`). Pure.

A *thread* is a terminal with its continuation, a linked list of expressions: the stack of a
pushdown automaton, so expressions may contain themselves. A *state* is the set of threads that the
bytes so far allow. States are made when a walk first reaches them, then kept, so a grammar costs
what its outputs visit, however much it could describe.

Compressed edges (arXiv 2312.07104, section 4): where only one byte may come next, again and again,
`State.forced` returns the whole run at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain, count
from typing import Any, TypeAlias  # Any: pairs of a flat tuple

from sgl_vllm.fsm.byte_dfa import ByteDfa, Dfa
from sgl_vllm.fsm.errors import TooComplexError
from sgl_vllm.fsm.expressions import EMPTY, Alt, Expression, Lazy, Literals, Seq, Terminal
from sgl_vllm.fsm.forecast import Forecast

MAX_THREADS = 4_000
"""A grammar that needs more threads in one state is refused while it runs."""

MAX_STATES = 20_000
MAX_BYTES = 64 << 20
"""An automaton keeps this many states, with their bitmasks, and this many bytes; then it starts
over."""

UNLIMITED = 1 << 62
"""`Automaton.allowance` where the work is not limited."""

_KEY_BYTES = 5
_STATE_BYTES = 500
_THREAD_BYTES = 200

_WALK_BYTES = 100
_RUN_BYTES, _RUN_TOKEN_BYTES = 400, 44
_MAX_RUNS = 8
"""So many runs of tokens are remembered from one state on."""

_MAX_THREADS_TRIED = 32
"""No forecast is made for a state with more threads. Each costs some microseconds."""

_MAX_FORCED_BYTES = 4_096
"""A longer run is returned in parts: walking and tokenizing it would hold up the engine."""


class Continuation:
    """A linked list of the expressions that follow a terminal."""

    __slots__ = ("expression", "next")

    def __init__(self, expression: Expression, next: Continuation | None) -> None:
        self.expression = expression
        self.next = next


Thread: TypeAlias = "tuple[Terminal, Continuation | None]"
Threads: TypeAlias = "tuple[Thread, ...]"


class State(Forecast):
    """What the bytes so far allow, and how often forced text has followed the next token.

    A state is a single object, because the garbage collector visits every object. Data of variable
    size is in flat tuples, or in tables of the automaton.

    Attributes:
        first: the bytes that may come next, as bits (bit b for byte b).
        accepting: whether the text may end here.
        bitmask: what `masks.py` found out about this state.
    """

    __slots__ = (
        *("_forced", "_key", "_others", "_runs", "_terminal", "_then"),
        *("accepting", "automaton", "bitmask", "first"),
    )

    def __init__(self, automaton: Automaton, threads: Threads, accepting: bool, key: bytes) -> None:
        super().__init__()
        self.automaton = automaton
        self.accepting = accepting
        self.first = first_of(threads)
        self._key = key
        self._terminal: Terminal | None = None
        self._then: Continuation | None = None
        if threads:
            self._terminal, self._then = threads[0]
        self._others = tuple(chain.from_iterable(threads[1:])) if len(threads) > 1 else ()
        self._forced: tuple[bytes, State | None] | None = None
        self._runs: dict[tuple[int, ...], tuple[State, ...]] | None = None
        self.bitmask: object = None

    @property
    def threads(self) -> Threads:
        if self._terminal is None:
            return ()
        if not self._others:
            return ((self._terminal, self._then),)
        others: Any = iter(self._others)
        return (self._terminal, self._then), *zip(others, others, strict=True)

    def step(self, byte: int) -> State | None:
        """The state after one more byte; None if that byte is not legal."""
        return self.walk(_BYTES[byte])

    def walk(self, piece: bytes) -> State | None:
        """The state after these bytes; None if they are not legal. No state is made in between."""
        if not piece:
            return self
        key = self._key + piece
        known = self.automaton.known_walk(key)
        if known is None:
            known = self._walk(piece)
            if known is not None:
                self.automaton.remember_walk(key, known)
        return known

    def _walk(self, piece: bytes) -> State | None:
        if not self.first >> piece[0] & 1:
            return None
        automaton, threads, accepting = self.automaton, self.threads, False
        position = 0
        while position < len(piece):
            literal = only_literal(threads)
            if literal is None:
                threads, accepting = automaton.step(threads, piece[position])
                position += 1
            else:
                (text,) = literal.texts
                end = min(len(text), literal.position + len(piece) - position)
                length = end - literal.position
                if text[literal.position : end] != piece[position : position + length]:
                    return None
                threads, accepting = automaton.along(threads, end)
                position += length
            if not threads and not accepting:
                if position == 1:
                    self.first &= ~(1 << piece[0])
                return None
        return automaton.state(threads, accepting)

    def is_mostly_forced(self, pieces: Callable[[], Iterable[bytes]]) -> bool:
        """Whether at least half of the legal ones among some pieces leave only one next byte, or
        only the end of the text."""
        if len(self._others) // 2 >= _MAX_THREADS_TRIED:
            return False
        try:
            following = [one for one in map(self.walk, pieces()) if one is not None]
        except TooComplexError:
            return False
        forced = [one for one in following if one.first.bit_count() + one.accepting == 1]
        return 2 * len(forced) >= len(following) > 0

    def known_run(self, tokens: tuple[int, ...]) -> tuple[State, ...] | None:
        """The states after each token of a run that begins here, if they are remembered."""
        return None if self._runs is None else self._runs.get(tokens)

    def remember(self, tokens: tuple[int, ...], states: tuple[State, ...]) -> None:
        """A run of tokens from here on leads through these states, one after each token."""
        if self._runs is None or len(self._runs) >= _MAX_RUNS:
            self._runs = {}
        self._runs[tokens] = states
        self.automaton.num_bytes += _RUN_BYTES + _RUN_TOKEN_BYTES * len(tokens)

    def forget(self) -> None:
        """Let go of the states that this one leads to."""
        self._runs = self._forced = None

    def forced(self) -> tuple[bytes, State]:
        """The longest run of bytes that must come next, and the state after it."""
        known = self._forced
        if known is None:
            run = bytearray()
            automaton, threads, accepting = self.automaton, self.threads, self.accepting
            first = self.first
            while not accepting and first.bit_count() == 1 and len(run) < _MAX_FORCED_BYTES:
                literal = only_literal(threads)
                if literal is None:
                    piece = _BYTES[first.bit_length() - 1]
                    following = automaton.step(threads, piece[0])
                else:
                    (text,), begin = literal.texts, literal.position
                    piece = text[begin : begin + _MAX_FORCED_BYTES - len(run)]
                    following = automaton.along(threads, begin + len(piece))
                if not following[0] and not following[1]:
                    break
                threads, accepting = following
                run += piece
                first = first_of(threads)
            known = (bytes(run), automaton.state(threads, accepting)) if run else _NOTHING_FORCED
            self._forced = known
        run_bytes, end = known
        return run_bytes, end or self


_NOTHING_FORCED: tuple[bytes, State | None] = (b"", None)
_BYTES = [bytes([byte]) for byte in range(256)]


def first_of(threads: Threads) -> int:
    """The bytes with which threads go on, as bits."""
    first = 0
    for terminal, _ in threads:
        first |= terminal.first
    return first


def only_literal(threads: Threads) -> Literals | None:
    """The only thing that may come next, if it is one text."""
    if len(threads) == 1:
        ((terminal, _),) = threads
        if isinstance(terminal, Literals) and len(terminal.texts) == 1:
            return terminal
    return None


class Automaton:
    """The states of one expression, as far as they have been reached.

    Construction makes the start state only; the others are made when a walk needs them.

    Args:
        counts_tables: whether what the tables of the expression take is counted, too, when a walk
            first reaches them.

    Attributes:
        allowance: what new states may still cost, in threads looked at (some microseconds each).
            Beyond it, `TooComplexError` is raised. Whoever walks sets it; states that are known
            cost nothing.
        num_bytes: about what the states and their bitmasks take.
    """

    def __init__(self, expression: Expression, *, counts_tables: bool = False) -> None:
        self.allowance = UNLIMITED
        self._counted: set[ByteDfa] | None = set() if counts_tables else None
        self.num_bytes = 0
        self._states: dict[object, State] = {}
        self._walks: dict[bytes, State] = {}
        """The state after each walk, by the key of its start and its bytes."""
        self._numbers = count()
        """For keys. `count` is atomic, so no two threads get the same number."""
        self._continuations: dict[int, Continuation] = {}
        """Keyed by the ids of the objects in each value, which the value keeps alive. The garbage
        collector visits tuples of objects, but not integers."""
        self._after: dict[Continuation | None, State] = {}
        self.expression = expression
        self._start: State | None = None
        self._make_start()

    @property
    def start(self) -> State:
        return self._start or self._make_start()

    def _make_start(self) -> State:
        threads: dict[Thread, None] = {}
        accepting = self.reach(self.expression, None, threads)
        self._start = self.state(tuple(threads), accepting)
        return self._start

    def step(self, threads: Threads, byte: int) -> tuple[Threads, bool]:
        """The threads after one more byte, and whether the text may end there. There are none if
        that byte is not legal."""
        self.spend(len(threads))
        found: dict[Thread, None] = {}
        accepting = False
        for terminal, then in threads:
            if terminal.first >> byte & 1:
                rest, done = terminal.step(byte)
                if rest is not None and rest.first:
                    found[rest, then] = None
                for expression in done:
                    accepting |= self.reach(expression, then, found)
        return tuple(found), accepting

    def along(self, threads: Threads, position: int) -> tuple[Threads, bool]:
        """As `step` along the only literal, up to a position of it."""
        self.spend(1)
        ((literal, then),) = threads
        assert isinstance(literal, Literals)
        rest, done = literal.at(position)
        if rest is not None:
            return ((rest, then),), False
        found: dict[Thread, None] = {}
        accepting = self.reach(done[0], then, found)
        return tuple(found), accepting

    def clear(self) -> None:
        """Start over. States that a grammar is in stay valid; what they lead to is made anew."""
        for state in [*self._states.values()]:  # others may be added by another thread
            state.forget()
        self.num_bytes = 0
        if self._counted is not None:
            self._counted.clear()
        self._states.clear()
        self._walks.clear()
        self._continuations.clear()
        self._after.clear()
        self._start = None

    def spend(self, num_threads: int) -> None:
        """Subtract from the allowance.

        Raises:
            TooComplexError: it is used up.
        """
        self.allowance -= num_threads
        if self.allowance < 0:
            raise TooComplexError(
                "the grammar has so many alternatives at once that its next token takes too long"
            )

    @property
    def num_states(self) -> int:
        return len(self._states)

    def state(self, threads: Threads, accepting: bool) -> State:
        """The state of these threads; the same object as long as it is kept."""
        if len(threads) == 1:
            ((terminal, then),) = threads
            key: object = (id(terminal) << 64 | id(then)) << 1 | accepting
        else:
            key = *sorted([id(terminal) << 64 | id(then) for terminal, then in threads]), accepting
        known = self._states.get(key)
        if known is None:
            if len(threads) > MAX_THREADS:
                raise TooComplexError(
                    f"the grammar has more than {MAX_THREADS} alternatives at one point"
                )
            if len(self._states) >= MAX_STATES or self.num_bytes > MAX_BYTES:
                self.clear()
            self.num_bytes += _STATE_BYTES + _THREAD_BYTES * len(threads)
            if self._counted is not None:
                self._count_tables(threads, self._counted)
            number = next(self._numbers).to_bytes(_KEY_BYTES)
            known = self._states[key] = State(self, threads, accepting, number)
        return known

    def known_walk(self, key: bytes) -> State | None:
        """The state after a walk: the key of its start, and its bytes."""
        return self._walks.get(key)

    def remember_walk(self, key: bytes, end: State) -> None:
        self.num_bytes += _WALK_BYTES + len(key)
        if self.num_bytes > MAX_BYTES:
            self.clear()
        self._walks[key] = end

    def _count_tables(self, threads: Threads, counted: set[ByteDfa]) -> None:
        for terminal, _ in threads:
            if isinstance(terminal, Dfa) and terminal.dfa not in counted:
                counted.add(terminal.dfa)
                self.num_bytes += terminal.dfa.table_bytes

    def after(self, then: Continuation | None) -> State:
        """The state in which a continuation begins."""
        known = self._after.get(then)
        if known is None:
            threads: dict[Thread, None] = {}
            accepting = self.reach(EMPTY, then, threads)
            known = self._after[then] = self.state(tuple(threads), accepting)
        return known

    def begin(self, expression: Expression, then: Continuation | None) -> State:
        """The state in which `expression`, followed by `then`, begins."""
        return self.after(then if expression is EMPTY else self._continuation(expression, then))

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
                        stack.append((then.expression, then.next))
                    continue
                for part in reversed(parts[1:]):
                    then = self._continuation(part, then)
                stack.append((parts[0], then))
            elif isinstance(expression, (Alt, Lazy)):  # `Alt | Lazy` would be built on every call
                if (expression, then) in seen:
                    continue
                seen.add((expression, then))
                if len(seen) > MAX_THREADS:
                    raise TooComplexError(
                        f"the grammar opens more than {MAX_THREADS} alternatives at one point"
                    )
                if isinstance(expression, Lazy):
                    stack.append((expression.get(), then))
                else:
                    stack.extend([(option, then) for option in reversed(expression.options)])
            elif expression.first:
                threads[expression, then] = None
        if len(seen) > 1:
            self.spend(len(seen))
        return accepting

    def _continuation(self, expression: Expression, then: Continuation | None) -> Continuation:
        key = id(expression) << 64 | id(then)
        known = self._continuations.get(key)
        if known is None:
            known = self._continuations[key] = Continuation(expression, then)
        return known
