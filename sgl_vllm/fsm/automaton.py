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

from typing import TypeAlias

from sgl_vllm.fsm.errors import TooComplexError
from sgl_vllm.fsm.expressions import EMPTY, Alt, Expression, Lazy, Seq, Terminal

MAX_THREADS = 4_000
"""A grammar that needs more threads in one state is refused while it runs."""

MAX_STATES = 20_000
MAX_BYTES = 64 << 20
"""An automaton keeps this many states, with their bitmasks, and this many bytes; then it starts
over."""

UNLIMITED = 1 << 62
"""`Automaton.allowance` where the work is not limited."""

_STATE_BYTES = 800
_THREAD_BYTES = 260

_RUN_BYTES, _RUN_TOKEN_BYTES = 400, 44
_MAX_RUNS = 8
"""So many runs of tokens are remembered from one state on."""

_MAX_FORCED_BYTES = 4_096
"""A longer run is returned in parts: walking and tokenizing it would hold up the engine."""


class Continuation:
    """A linked list of the expressions that follow a terminal."""

    __slots__ = ("expression", "next")

    def __init__(self, expression: Expression, next: Continuation | None) -> None:
        self.expression = expression
        self.next = next


Thread: TypeAlias = "tuple[Terminal, Continuation | None]"


class State:
    """What the bytes so far allow.

    Attributes:
        first: the bytes that may come next, as bits (bit b for byte b).
        accepting: whether the text may end here.
        runs: by the tokens of a run that begins here, the states after each of them.
        bitmask: what `masks.py` found out about this state.
        forecast: what `forecast.py` knows about it.
    """

    __slots__ = (
        *("_forced", "_next", "accepting", "automaton"),
        *("bitmask", "first", "forecast", "runs", "threads"),
    )

    def __init__(self, automaton: Automaton, threads: tuple[Thread, ...], accepting: bool) -> None:
        self.automaton = automaton
        self.threads = threads
        self.accepting = accepting
        self.first = 0
        for terminal, _ in threads:
            self.first |= terminal.first
        self._next: dict[int, State] = {}
        self._forced: tuple[bytes, State] | None = None
        self.runs: dict[tuple[int, ...], tuple[State, ...]] = {}
        self.bitmask: object = None
        self.forecast: object = None

    def step(self, byte: int) -> State | None:
        """The state after one more byte; None if that byte is not legal."""
        known = self._next.get(byte)
        if known is not None:
            return known
        if not self.first >> byte & 1:
            return None
        threads: dict[Thread, None] = {}
        accepting = False
        automaton = self.automaton
        automaton.spend(len(self.threads))
        for terminal, then in self.threads:
            if terminal.first >> byte & 1:
                rest, done = terminal.step(byte)
                if rest is not None and rest.first:
                    threads[rest, then] = None
                for expression in done:
                    accepting |= automaton.reach(expression, then, threads)
        known = automaton.state(threads, accepting)
        if not known.first and not known.accepting:
            self.first &= ~(1 << byte)
            return None
        self._next[byte] = known
        return known

    def walk(self, piece: bytes) -> State | None:
        """The state after these bytes; None if they are not legal."""
        state: State | None = self
        for byte in piece:
            if state is None:
                break
            state = state.step(byte)
        return state

    def remember(self, tokens: tuple[int, ...], states: tuple[State, ...]) -> None:
        """A run of tokens from here on leads through these states, one after each token."""
        if len(self.runs) >= _MAX_RUNS:
            self.runs.clear()
        self.runs[tokens] = states
        self.automaton.num_bytes += _RUN_BYTES + _RUN_TOKEN_BYTES * len(tokens)

    def forget(self) -> None:
        """Let go of the states that this one leads to."""
        self._next.clear()
        self.runs.clear()
        self._forced = None

    def forced(self) -> tuple[bytes, State]:
        """The longest run of bytes that must come next, and the state after it."""
        if self._forced is None:
            run = bytearray()
            state = self
            while not state.accepting and state.first.bit_count() == 1:
                byte = state.first.bit_length() - 1
                following = state.step(byte)
                if following is None or len(run) >= _MAX_FORCED_BYTES:
                    break
                run.append(byte)
                state = following
            self._forced = bytes(run), state
        return self._forced


class Automaton:
    """The states of one expression, as far as they have been reached.

    Construction makes the start state only; the others are made when a walk needs them.

    Attributes:
        allowance: what new states may still cost, in threads looked at (some microseconds each).
            Beyond it, `TooComplexError` is raised. Whoever walks sets it; states that are known
            cost nothing.
        num_bytes: about what the states and their bitmasks take.
    """

    def __init__(self, expression: Expression) -> None:
        self.allowance = UNLIMITED
        self.num_bytes = 0
        self._states: dict[tuple[frozenset[Thread], bool], State] = {}
        self._continuations: dict[tuple[Expression, Continuation | None], Continuation] = {}
        self._after: dict[Continuation | None, State] = {}
        self._expression = expression
        self._start: State | None = None
        self._make_start()

    @property
    def start(self) -> State:
        return self._start or self._make_start()

    def _make_start(self) -> State:
        threads: dict[Thread, None] = {}
        accepting = self.reach(self._expression, None, threads)
        self._start = self.state(threads, accepting)
        return self._start

    def clear(self) -> None:
        """Start over. States that a grammar is in stay valid; what they lead to is made anew."""
        for state in self._states.values():
            state.forget()
        self.num_bytes = 0
        self._states.clear()
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

    def state(self, threads: dict[Thread, None], accepting: bool) -> State:
        """The state of these threads; the same object as long as it is kept."""
        key = frozenset(threads), accepting
        known = self._states.get(key)
        if known is None:
            if len(threads) > MAX_THREADS:
                raise TooComplexError(
                    f"the grammar has more than {MAX_THREADS} alternatives at one point"
                )
            if len(self._states) >= MAX_STATES or self.num_bytes > MAX_BYTES:
                self.clear()
            self.num_bytes += _STATE_BYTES + _THREAD_BYTES * len(threads)
            known = self._states[key] = State(self, tuple(threads), accepting)
        return known

    def after(self, then: Continuation | None) -> State:
        """The state in which a continuation begins."""
        known = self._after.get(then)
        if known is None:
            threads: dict[Thread, None] = {}
            accepting = self.reach(EMPTY, then, threads)
            known = self._after[then] = self.state(threads, accepting)
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
        key = expression, then
        known = self._continuations.get(key)
        if known is None:
            known = self._continuations[key] = Continuation(expression, then)
        return known
