"""Trees of patterns -> minimal automata over bytes, by way of nondeterministic ones.

Owns Thompson's construction, with UTF-8 for characters. Does not own how a pattern is parsed
(`regex.py`), nor the loops that make an automaton deterministic (`subsets.py`) and minimal
(`tables.py`). Pure.

    "a" ([bc] "d")*     (0) a (1)    (1) -> (2)    (2) b-c (3)    (3) d (4)    (4) -> (2)
                        (2) -> ((5))

A request's pattern may need an automaton of any size, such as `(a|b)*a(a|b){40}`, so states and
steps are limited. The loops run outside the interpreter's lock.
"""

from __future__ import annotations

import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from sgl_vllm.fsm.byte_dfa import MAX_STATES, ByteDfa, minimal
from sgl_vllm.fsm.characters import Bytes
from sgl_vllm.fsm.errors import TooComplexError
from sgl_vllm.fsm.small_cache import cached_if_few
from sgl_vllm.fsm.subsets import determinized
from sgl_vllm.fsm.syntax import (
    Choice,
    Node,
    Repetition,
    Sequence,
    Spelled,
    Text,
)

MAX_PARTS = 200_000
"""States before an automaton is made deterministic: one to nine for each character, with what is
repeated counted as often."""

MAX_SPANS = 1_000_000
"""Transitions between these."""

MAX_STEPS = 30_000_000
"""Transitions that are followed to make it deterministic, and members of its sets of states. They
take about 0.3 s, and at most some 200 MB meanwhile."""

MAX_CACHED_BYTES = 32 << 20
_CACHED_BYTES_PER_CHARACTER = 4
"""At most, for a key: a pattern, or a tree."""


_Spans: TypeAlias = "list[tuple[int, int, int, int]]"
"""Source, first and last byte, target."""


@cached_if_few
def _of_spellings(spellings: tuple[Bytes, ...]) -> tuple[int, _Spans]:
    """Along some byte strings, from state 0 to state 1. Equal ends of them share their states.

    Returns: the number of states, and the spans.
    """
    after: dict[Bytes, int] = {(): 1}
    spans: _Spans = []
    for spelling in spellings:
        for i in range(len(spelling) - 1, 0, -1):
            rest = spelling[i:]
            if rest not in after:
                after[rest] = 1 + len(after)
                spans.append((after[rest], *rest[0], after[rest[1:]]))
        spans.append((0, *spelling[0], after[spelling[1:]]))
    return 1 + len(after), spans


class _Nfa:
    """A nondeterministic automaton that is being put together. Its spans and empty transitions are
    arrays, so that copies of a part cost little."""

    def __init__(self) -> None:
        self._num_states = 1
        self._spans = array("i")  # source, low, high, target
        self._empties = array("i")  # source, target

    def _new_state(self) -> int:
        self._check_size(1, 0)
        self._num_states += 1
        return self._num_states - 1

    def _check_size(self, more_states: int, more_spans: int) -> None:
        if (
            self._num_states + more_states > MAX_PARTS
            or len(self._spans) // 4 + more_spans > MAX_SPANS
        ):
            raise TooComplexError(
                f"the pattern is too long: it has more than {MAX_PARTS:,} states or "
                f"{MAX_SPANS:,} transitions"
            )

    def add(self, node: Node, source: int) -> int:
        """Add what a node allows after `source`.

        Returns: the state after it.
        """
        match node:
            case Text(data):
                for byte in data:
                    following = self._new_state()
                    self._spans.extend((source, byte, byte, following))
                    source = following
                return source
            case Spelled(spellings):
                return self._add_part(*_of_spellings(spellings), source)
            case Sequence(parts):
                for part in parts:
                    source = self.add(part, source)
                return source
            case Choice(options):
                target = self._new_state()
                for option in options:
                    begin = self._new_state()
                    self._empties.extend((source, begin))
                    self._empties.extend((self.add(option, begin), target))
                return target
            case Repetition(part, low, high):
                return self._add_repetition(part, low, high, source)

    def _add_part(self, num_states: int, spans: _Spans, source: int) -> int:
        self._check_size(num_states, len(spans))
        first = self._num_states - 1  # so that its state 1 is the next one
        self._num_states += num_states - 1
        numbers: list[int] = []
        for begin, low, high, end in spans:
            numbers += (first + begin if begin else source, low, high, first + end)
        self._spans.extend(numbers)
        return first + 1

    def _add_repetition(self, part: Node, low: int, high: int | None, source: int) -> int:
        most = max(low, 1) if high is None else high
        if most == 0:
            return source
        begin = self._new_state()
        self._empties.extend((source, begin))
        num_spans, num_empties = len(self._spans), len(self._empties)
        end = self.add(part, begin)
        size = self._num_states - begin
        if most > 1:
            copies = most - 1
            self._check_size(copies * size, copies * (len(self._spans) - num_spans) // 4)
            _add_copies(self._spans, num_spans, most, [size, 0, 0, size])
            _add_copies(self._empties, num_empties, most, [size, size])
            self._num_states += copies * size
        out = self._new_state()
        starts = range(begin, begin + most * size, size)
        ends = range(end, end + most * size, size)
        pairs = [*zip(ends, starts[1:], strict=False)]
        pairs += [(one, out) for one in ends[max(low, 1) - 1 :]]
        if low == 0:
            pairs.append((begin, out))
        if high is None:
            pairs.append((ends[-1], starts[-1]))
        self._empties.extend([state for pair in pairs for state in pair])
        return out

    def deterministic(self, end: int) -> ByteDfa:
        """The minimal automaton of the texts that lead from state 0 to `end`."""
        spans = np.frombuffer(self._spans, np.int32).reshape(-1, 4)
        empties = np.frombuffer(self._empties, np.int32).reshape(-1, 2)
        return dfa_of_transitions(self._num_states, spans, empties, end)


def dfa_of_transitions(
    num_states: int, spans: NDArray[np.int32], empties: NDArray[np.int32], end: int
) -> ByteDfa:
    """The minimal automaton of the texts that lead from state 0 to `end`.

    Args:
        spans: (spans, 4): source, first and last byte, target.
        empties: (transitions without text, 2): source, target.

    Raises TooComplexError: it needs more than `MAX_STATES` or `MAX_STEPS`.
    """
    table, accepting, classes = determinized(num_states, spans, empties, end, MAX_STATES, MAX_STEPS)
    if not len(table):
        raise TooComplexError(
            f"the pattern needs more than {MAX_STATES:,} states, or too long to make them"
        )
    return minimal(ByteDfa(table, classes, accepting))


def _add_copies(numbers: array[int], begin: int, most: int, shift: list[int]) -> None:
    """Have the rows that are there from `begin` on `most` times, each copy shifted against the last
    one."""
    rows = np.array(numbers[begin:], np.int32).reshape(1, -1, len(shift))
    counts = np.arange(1, most, dtype=np.int32).reshape(-1, 1, 1)
    numbers.frombytes((rows + counts * np.array(shift, np.int32)).tobytes())


def dfa_of(node: Node) -> ByteDfa:
    """The minimal automaton of a tree without references to rules.

    Cost: about 0.1 ms, and a microsecond or two for each state.

    Raises:
        TooComplexError: it needs more than `MAX_PARTS`, `MAX_STATES` or `MAX_STEPS`, or is nested
            too deeply.
    """
    nfa = _Nfa()
    try:
        end = nfa.add(node, 0)
    except RecursionError:
        raise TooComplexError("the pattern is nested too deeply") from None
    return nfa.deterministic(end)


class _Cache:
    """Automata by key, least recently used first out. Thread-safe."""

    def __init__(self) -> None:
        self._automata: OrderedDict[Hashable, tuple[ByteDfa, int]] = OrderedDict()
        self._num_bytes = 0
        self._lock = threading.Lock()

    def of(self, key: Hashable, make: Callable[[], ByteDfa], num_characters: int) -> ByteDfa:
        """What `make` returns; the same automaton for the same key, if it is still known.

        Args:
            num_characters: the length of the pattern that is the key.
        """
        with self._lock:
            known = self._automata.get(key)
            if known is not None:
                self._automata.move_to_end(key)
                return known[0]
        made = make()
        num_bytes = made.table_bytes + _CACHED_BYTES_PER_CHARACTER * (num_characters + 5)
        with self._lock:
            kept, _ = self._automata.setdefault(key, (made, num_bytes))
            if kept is made:
                self._num_bytes += num_bytes
                while self._num_bytes > MAX_CACHED_BYTES:
                    self._num_bytes -= self._automata.popitem(last=False)[1][1]
        return kept


cached_dfa = _Cache().of
