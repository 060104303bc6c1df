"""What is known of formats: compiled automata, and which formats have none."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Hashable

from sgl_vllm.fsm.automaton import Automaton

MAX_GRAMMARS = 1_000
MAX_STATES = 100_000
MAX_BYTES = 96 << 20
_CHECK_EVERY = 4
_BYTES_PER_CHARACTER = 160
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
        self._automata: OrderedDict[Hashable, tuple[Automaton, int]] = OrderedDict()
        self._fixed_bytes = 0
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
            return known[0]

    def insert(
        self, key: Hashable, automaton: Automaton, num_characters: int = 0, num_bytes: int = 0
    ) -> None:
        """
        Args:
            num_characters: the length of the format, which says how large its expression is.
            num_bytes: what the expression takes beyond that.
        """
        fixed = _BYTES_PER_CHARACTER * num_characters + num_bytes
        with self._lock:
            before, replaced = self._automata.pop(key, (automaton, 0))
            if before is not automaton:
                before.clear()
            self._automata[key] = automaton, fixed
            self._fixed_bytes += fixed - replaced
            self._is_used()

    def remove(self, key: Hashable) -> None:
        """Forget an automaton, whether it is known or not."""
        with self._lock:
            if key in self._automata:
                self._fixed_bytes -= self._forget(key)[1]

    def clear(self) -> None:
        with self._lock:
            for key in [*self._automata]:
                self._forget(key)
            self._fixed_bytes = 0

    def _is_used(self) -> None:
        self._num_used += 1
        if (
            len(self._automata) > MAX_GRAMMARS
            or self._fixed_bytes > MAX_BYTES
            or self._num_used % _CHECK_EVERY == 0
        ):
            self._evict()

    def _evict(self) -> None:
        """Down to the bounds; the last automaton stays in any case."""
        kept = self._automata.values()
        num_states = sum(automaton.num_states for automaton, _ in kept)
        num_bytes = self._fixed_bytes + sum(automaton.num_bytes for automaton, _ in kept)
        while len(self._automata) > 1 and (
            len(self._automata) > MAX_GRAMMARS or num_states > MAX_STATES or num_bytes > MAX_BYTES
        ):
            oldest = next(iter(self._automata))
            num_states -= self._automata[oldest][0].num_states
            freed, fixed = self._forget(oldest)
            num_bytes -= freed + fixed
            self._fixed_bytes -= fixed

    def _forget(self, key: Hashable) -> tuple[int, int]:
        """What the states of an automaton took, and its expression. The states refer to each other:
        unless they let go of that, they would wait for the garbage collector."""
        automaton, fixed = self._automata.pop(key)
        num_bytes = automaton.num_bytes
        automaton.clear()
        return num_bytes, fixed
