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
from typing import TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from sgl_vllm.fsm.automaton import Automaton, Continuation, State, Thread
from sgl_vllm.fsm.terminal_walks import TerminalWalks, Walked
from sgl_vllm.fsm.trie_nodes import joined, or_words, packed_bits
from sgl_vllm.fsm.vocabulary import Nodes, TokenIds, TrieSet, Vocabulary, Words

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


Bitmask: TypeAlias = "tuple[NDArray[np.uint16], Words, *tuple[Words, ...]]"
"""The legal tokens of one state: the numbers of some words, and their bits; and whole bitmasks,
shared with other states, to be combined with these. The garbage collector does not track tuples
that hold only arrays."""


def fill(bitmask: Bitmask, out: Words) -> None:
    """Write a bitmask to `out`, uint32 (num_words,): as many words as the vocabulary has."""
    numbers, words, *shared = bitmask
    if shared:
        out[:] = shared[0]
        for other in shared[1:]:
            out |= other
    else:
        out.fill(0)
    if len(numbers):
        or_words(out, numbers, words)


def some_tokens(bitmask: Bitmask, count: int) -> list[int]:
    """At most `count` of the tokens in a bitmask's own words, spread over the vocabulary. Empty for
    most free text, whose tokens are all in shared bitmasks."""
    numbers, words, *_ = bitmask
    chosen = slice(None, None, -(-len(numbers) // count) or 1)
    pairs = zip(numbers[chosen].tolist(), words[chosen].tolist(), strict=True)
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
                bitmask = state.bitmask
                if bitmask is None:
                    bitmask = state.bitmask = self._make(state)
        return cast(Bitmask, bitmask)

    def _make(self, state: State) -> Bitmask:
        self._walks.forget_if_full()
        automaton = state.automaton
        found = _Found(automaton)
        threads = state.threads
        automaton.spend(len(threads))
        for terminal, then in threads:
            found.add(self._walks.from_root(terminal, automaton), then)
        while found.reached:
            for (terminal, then), trie_set in found.next_round():
                found.add(self._walks.below(trie_set, terminal, automaton), then)
        bitmask = self._packed(tuple(found.shared.values()), found.lists)
        own = [words.nbytes for words in bitmask if id(words) not in found.shared]
        automaton.num_bytes += sum(own)
        return bitmask

    def _packed(self, shared: tuple[Words, ...], lists: list[TokenIds]) -> Bitmask:
        if len(shared) > _MAX_SHARED:
            shared = (np.bitwise_or.reduce(shared),)
        if not lists:
            return (_NO_NUMBERS, _NO_WORDS, *shared)
        ids = np.concatenate(lists) if len(lists) > 1 else lists[0]
        numbers, words = packed_bits(ids, self._no_bits)
        bitmask: Bitmask = numbers, words, *shared
        if len(numbers) * 2 > len(self._no_bits):
            whole = np.empty_like(self._no_bits)
            fill(bitmask, whole)
            return _NO_NUMBERS, _NO_WORDS, whole
        return bitmask


class _Found:
    """What the walks of one state have found so far, and where others must begin.

    Walks go in rounds. Each thread is walked from all nodes at once that the last round has
    reached, less those of earlier rounds. So it is walked once from each node, however many ways
    lead there:

        [^\\n]+ again and again      where the second one ends, the first one may have ended, too

    Attributes:
        reached: the sets of nodes where the last walks have ended, each with the state that begins.
    """

    __slots__ = ("_automaton", "_entered", "lists", "reached", "shared")

    def __init__(self, automaton: Automaton) -> None:
        self._automaton = automaton
        self._entered: dict[State | Thread, Nodes] = {}
        """The nodes from which each state or thread has been walked, or is in `reached`."""
        self.reached: list[tuple[TrieSet, State]] = []
        self.shared: dict[int, Words] = {}
        self.lists: list[TokenIds] = []

    def add(self, walked: Walked, then: Continuation | None) -> None:
        for words in walked.shared:
            self.shared[id(words)] = words
        if len(walked.ids):
            self.lists.append(walked.ids)
        for trie_set, expression in walked.leaving:
            self.reached.append((trie_set, self._automaton.begin(expression, then)))

    def next_round(self) -> list[tuple[Thread, TrieSet]]:
        """The threads of the states in `reached`, each with the nodes from which it is to be
        walked. Empties `reached`."""
        reached, self.reached = self.reached, []
        sets: dict[Thread, TrieSet] = {}
        for trie_set, state in reached:
            fresh = self._fresh(state, trie_set)
            if fresh is None:
                continue
            threads, first = state.threads, fresh.first
            self._automaton.spend(len(threads))
            for thread in threads:
                if thread[0].first & first:
                    other = sets.get(thread)
                    sets[thread] = fresh if other is None else _union(other, fresh)
        begun = [(thread, self._fresh(thread, trie_set)) for thread, trie_set in sets.items()]
        return [(thread, trie_set) for thread, trie_set in begun if trie_set is not None]

    def _fresh(self, begun: State | Thread, trie_set: TrieSet) -> TrieSet | None:
        """The nodes of a set from which a state or a thread has not been walked; None if there are
        none. Records them as walked."""
        nodes = self._entered.get(begun)
        if nodes is None:
            self._entered[begun] = trie_set.nodes
            return trie_set
        if nodes is trie_set.nodes:
            return None
        self._entered[begun], new = joined(nodes, trie_set.nodes)
        return trie_set.vocabulary.trie_set(new) if len(new) else None


def _union(a: TrieSet, b: TrieSet) -> TrieSet:
    return a if a is b else a.vocabulary.trie_set(joined(a.nodes, b.nodes)[0])
