"""Compiled automata, least recently used first out."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable

from sgl_vllm.fsm.automaton import Automaton

MAX_GRAMMARS = 1_000
MAX_STATES = 100_000
_CHECK_EVERY = 32


class AutomatonCache:
    """Automata by format. Thread-safe.

    Automata grow while they are used, so their states are counted on every 32nd insertion only.
    """

    def __init__(self) -> None:
        self._automata: OrderedDict[Hashable, Automaton] = OrderedDict()
        self._lock = threading.Lock()
        self._num_inserted = 0

    def __contains__(self, key: Hashable) -> bool:
        return key in self._automata

    def get(self, key: Hashable) -> Automaton | None:
        with self._lock:
            known = self._automata.get(key)
            if known is not None:
                self._automata.move_to_end(key)
            return known

    def insert(self, key: Hashable, automaton: Automaton) -> None:
        with self._lock:
            self._automata[key] = automaton
            self._num_inserted += 1
            if self._num_inserted % _CHECK_EVERY == 0:
                self._evict()

    def clear(self) -> None:
        with self._lock:
            self._automata.clear()

    def _evict(self) -> None:
        num_states = sum(automaton.num_states for automaton in self._automata.values())
        while len(self._automata) > 1 and (
            len(self._automata) > MAX_GRAMMARS or num_states > MAX_STATES
        ):
            num_states -= self._automata.popitem(last=False)[1].num_states
