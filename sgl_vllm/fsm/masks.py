"""The legal tokens of a state, as a bitmask.

Owns the walk of a vocabulary's trie along an automaton, and compact storage of what it finds.
Does not own the walks into single terminals (`terminal_walks.py`), the trie (`vocabulary.py`) or
the automaton (`automaton.py`). Pure: numpy and numba.

A terminal that most of the vocabulary passes through, such as the inside of a JSON string, is
walked once per vocabulary, whatever grammar it stands in: the tokens that end inside it are one
shared bitmask, and the nodes where longer tokens leave it are one set of nodes, from which only
what follows the terminal in *this* grammar is walked. (xgrammar's context-independent and
context-dependent tokens, arXiv 2411.15100, section 3.1; here the second kind is exact and cached
per state.)

    tokens from the root:     a  the  ...      ."   ",   "}   ":   ...
                              \\____________/   \\_________________/
                               inside: shared    leave through the quote: walked with what follows
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sgl_vllm.fsm.automaton import Automaton, Continuation, State
from sgl_vllm.fsm.terminal_walks import TerminalWalks, Walked
from sgl_vllm.fsm.trie_walks import or_words, packed_bits
from sgl_vllm.fsm.vocabulary import TokenIds, TrieSet, Vocabulary, Words

_NO_NUMBERS = np.zeros(0, np.uint16)
_NO_WORDS = np.zeros(0, np.uint32)
_MAX_SHARED = 8
"""A state keeps at most this many shared bitmasks apart: each is read whenever it is filled in."""


def only_bit(words: Words) -> int | None:
    """The token whose bit is the only one set; None if none or several are set."""
    (used,) = words.nonzero()
    if len(used) != 1:
        return None
    bits = int(words[used[0]])
    return None if bits & (bits - 1) else int(used[0]) * 32 + bits.bit_length() - 1


@dataclass(frozen=True, slots=True)
class Bitmask:
    """The legal tokens of one state: bitmasks shared with other states, and some words of its own.

    Attributes:
        shared: whole bitmasks, to be combined.
        numbers, words: the numbers of the words with further bits, and these bits.
    """

    shared: tuple[Words, ...]
    numbers: NDArray[np.uint16]
    words: Words

    def fill(self, out: Words) -> None:
        """Write the bitmask to `out`, uint32 (num_words,)."""
        if self.shared:
            out[:] = self.shared[0]
            for other in self.shared[1:]:
                out |= other
        else:
            out.fill(0)
        if len(self.numbers):
            or_words(out, self.numbers, self.words)

    def some_tokens(self, count: int) -> list[int]:
        """At most `count` of the tokens in `words`, spread over the vocabulary. Empty for most free
        text, whose tokens are all in shared bitmasks."""
        chosen = slice(None, None, -(-len(self.numbers) // count) or 1)
        pairs = zip(self.numbers[chosen].tolist(), self.words[chosen].tolist(), strict=True)
        return [32 * number + word.bit_length() - 1 for number, word in pairs]


class Bitmasks:
    """Makes the bitmasks of states over one vocabulary. Thread-safe.

    Each state keeps its own (`State.bitmask`), so a repeated call is a look-up.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._lock = threading.Lock()
        self._walks = TerminalWalks(vocabulary)
        self._no_bits = np.zeros(vocabulary.num_words, np.uint32)

    def of(self, state: State) -> Bitmask:
        """The tokens that may come next in `state`. Whether the text may end is not part of it.

        Cost: microseconds when known, tens of them for a new state, a walk of the whole vocabulary
        (about a millisecond for 131,000 tokens) for a new terminal.
        """
        bitmask = state.bitmask
        if bitmask is None:
            with self._lock:  # vLLM fills large batches in several threads
                bitmask = state.bitmask = self._make(state)
        assert isinstance(bitmask, Bitmask)
        return bitmask

    def _make(self, state: State) -> Bitmask:
        found = _Found()
        automaton = state.automaton
        automaton.spend(len(state.threads))
        for terminal, then in state.threads:
            found.add(self._walks.from_root(terminal, automaton), automaton, then)
        seen: set[tuple[TrieSet, State]] = set()
        while found.pending:
            reached = found.pending.pop()
            if reached in seen:
                continue
            seen.add(reached)
            trie_set, state = reached
            automaton.spend(len(state.threads))
            for terminal, then in state.threads:
                if terminal.first & trie_set.first:
                    found.add(self._walks.below(trie_set, terminal, automaton), automaton, then)
        bitmask = self._packed(tuple(found.shared.values()), found.lists)
        own = [words.nbytes for words in bitmask.shared if id(words) not in found.shared]
        automaton.num_bytes += bitmask.numbers.nbytes + bitmask.words.nbytes + sum(own)
        return bitmask

    def _packed(self, shared: tuple[Words, ...], lists: list[TokenIds]) -> Bitmask:
        if len(shared) > _MAX_SHARED:
            shared = (np.bitwise_or.reduce(shared),)
        if not lists:
            return Bitmask(shared, _NO_NUMBERS, _NO_WORDS)
        ids = np.concatenate(lists) if len(lists) > 1 else lists[0]
        numbers, words = packed_bits(ids, self._no_bits)
        bitmask = Bitmask(shared, numbers, words)
        if len(numbers) * 2 > len(self._no_bits):
            whole = np.empty_like(self._no_bits)
            bitmask.fill(whole)
            return Bitmask((whole,), _NO_NUMBERS, _NO_WORDS)
        return bitmask


class _Found:
    """What the walks of one state have found so far, and where others must begin."""

    __slots__ = ("lists", "pending", "shared")

    def __init__(self) -> None:
        self.shared: dict[int, Words] = {}
        self.lists: list[TokenIds] = []
        self.pending: list[tuple[TrieSet, State]] = []

    def add(self, walked: Walked, automaton: Automaton, then: Continuation | None) -> None:
        for words in walked.shared:
            self.shared[id(words)] = words
        if len(walked.ids):
            self.lists.append(walked.ids)
        for trie_set, expression in walked.leaving:
            self.pending.append((trie_set, automaton.begin(expression, then)))
