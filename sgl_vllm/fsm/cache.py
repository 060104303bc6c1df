"""What is known of formats: compiled automata, and which formats have none."""

from __future__ import annotations

import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Hashable
from typing import NamedTuple

from sgl_vllm.fsm.automaton import Automaton
from sgl_vllm.fsm.expressions import forget

MAX_GRAMMARS = 1_000
MAX_BYTES = 96 << 20
MAX_STATES = 20_000
MAX_CHARACTERS = 400_000
"""Of all formats together. At these limits the cache holds about 100,000 objects, which a full
garbage collection visits in some 50 ms."""

_CHECK_EVERY = 4
_BYTES_PER_CHARACTER = 40
"""About what the expression of a format takes, for each character of the format."""

MAX_REFUSED = 10_000
RETRY_AFTER_S = 300.0
"""A refusal is remembered so long: some are by the clock, such as that of a tag with many parts."""


class RefusedFormats:
    """The formats for which no automaton was made lately. Thread-safe."""

    def __init__(self) -> None:
        self._since: OrderedDict[Hashable, float] = OrderedDict()
        self._lock = threading.Lock()

    def __contains__(self, key: Hashable) -> bool:
        since = self._since.get(key)
        return since is not None and time.monotonic() - since < RETRY_AFTER_S

    def add(self, key: Hashable) -> None:
        with self._lock:
            self._since[key] = time.monotonic()
            self._since.move_to_end(key)
            if len(self._since) > MAX_REFUSED:
                self._since.popitem(last=False)

    def clear(self) -> None:
        with self._lock:
            self._since.clear()


class AutomatonCache:
    """Automata by format, least recently used first out. Thread-safe.

    What an expression takes is known when it is inserted. Automata grow while they are used, so
    their states are counted at every fourth insertion or look-up, at a microsecond for four of
    them.
    """

    def __init__(self) -> None:
        self._automata: OrderedDict[Hashable, _Kept] = OrderedDict()
        self._fixed_bytes = 0
        self._num_characters = 0
        self._lock = threading.Lock()
        self._num_used = 0

    def __contains__(self, key: Hashable) -> bool:
        return key in self._automata

    def get(self, key: Hashable) -> Automaton | None:
        with self._lock:
            known = self._automata.get(key)
            if known is None:
                return None
            self._automata.move_to_end(key)
            self._is_used()
            return known.automaton

    def insert(
        self, key: Hashable, automaton: Automaton, num_characters: int = 0, num_bytes: int = 0
    ) -> None:
        """Keep an automaton. Its expression is taken apart when the automaton is freed, so no other
        automaton may use it.

        Args:
            num_characters: the length of the format, which says how large its expression is.
            num_bytes: what the expression takes beyond that.
        """
        fixed = _BYTES_PER_CHARACTER * num_characters + num_bytes
        weakref.finalize(automaton, forget, automaton.expression).atexit = False
        with self._lock:
            if key in self._automata:
                self._forget(key)
            self._automata[key] = _Kept(automaton, num_characters, fixed)
            self._fixed_bytes += fixed
            self._num_characters += num_characters
            self._is_used()

    def remove(self, key: Hashable) -> None:
        """Forget an automaton, whether it is known or not."""
        with self._lock:
            if key in self._automata:
                self._forget(key)

    def clear(self) -> None:
        with self._lock:
            for key in [*self._automata]:
                self._forget(key)

    def _is_used(self) -> None:
        self._num_used += 1
        if (
            len(self._automata) > MAX_GRAMMARS
            or self._num_characters > MAX_CHARACTERS
            or self._fixed_bytes > MAX_BYTES
            or self._num_used % _CHECK_EVERY == 0
        ):
            self._evict()

    def _evict(self) -> None:
        """Down to the bounds: first the states of the oldest automata go, which are made anew when
        they are needed, then the automata. The last one stays in any case."""
        *older, _ = kept = [one.automaton for one in self._automata.values()]
        num_states = sum(automaton.num_states for automaton in kept)
        num_bytes = self._fixed_bytes + sum(automaton.num_bytes for automaton in kept)
        for automaton in older:
            if num_states <= MAX_STATES and num_bytes <= MAX_BYTES:
                break
            num_states -= automaton.num_states
            num_bytes -= automaton.num_bytes
            automaton.clear()
        while len(self._automata) > 1 and (
            len(self._automata) > MAX_GRAMMARS
            or self._num_characters > MAX_CHARACTERS
            or num_bytes > MAX_BYTES
        ):
            num_bytes -= self._forget(next(iter(self._automata)))

    def _forget(self, key: Hashable) -> int:
        """What the expression of an automaton took. Its states refer to each other: unless they let
        go of that, they would wait for the garbage collector."""
        automaton, num_characters, fixed_bytes = self._automata.pop(key)
        automaton.clear()
        self._fixed_bytes -= fixed_bytes
        self._num_characters -= num_characters
        return fixed_bytes


class _Kept(NamedTuple):
    """An automaton, the length of its format, and the bytes that its expression takes."""

    automaton: Automaton
    num_characters: int
    fixed_bytes: int
