"""The legal tokens of a state, as a bitmask.

Owns the walk of a vocabulary's trie along an automaton, and compact storage of what it finds.
Does not own the trie (`vocabulary.py`) or the automaton (`automaton.py`). Pure: numpy and numba.

A terminal that most of the vocabulary passes through, such as the inside of a JSON string, is
walked once per vocabulary, whatever grammar it stands in: the tokens that end inside it are one
shared bitmask, and the nodes where longer tokens leave it are one set of nodes, from which only
what follows the terminal in *this* grammar is walked. (xgrammar's context-independent and
context-dependent tokens, arXiv 2411.15100, section 3.1; here the second kind is exact and cached
per state.) The states of one pattern differ in few tokens: a bitmask is made from that of another.

    tokens from the root:     a  the  ...      ."   ",   "}   ":   ...
                              \\____________/   \\_________________/
                               inside: shared    leave through the quote: walked with what follows
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sgl_vllm.fsm.automaton import Automaton, Continuation, State
from sgl_vllm.fsm.byte_dfa import ByteDfa, Dfa
from sgl_vllm.fsm.expressions import EMPTY, Expression, Literals, Terminal
from sgl_vllm.fsm.json_string import QUOTE, JsonString
from sgl_vllm.fsm.trie_walks import or_words, packed_bits
from sgl_vllm.fsm.vocabulary import (
    NO_IDS,
    TokenIds,
    TrieSet,
    Vocabulary,
    Words,
    walk,
    walk_counting,
    walk_difference,
)

_DENSE_FROM = 512
"""This many tokens are kept as a bitmask rather than as a list."""

_NO_NUMBERS = np.zeros(0, np.uint16)
_NO_WORDS = np.zeros(0, np.uint32)
_MAX_ROOT_BYTES = 64 << 20
_MAX_ROOT_WALKS = 50_000
_MAX_ENTERED = 10_000
_MAX_CLOSING = 1_000
_MAX_COUNTED = 1_000
_MAX_SHARED = 8
"""A state keeps at most this many shared bitmasks apart: each is read whenever it is filled in."""

_MAX_DIFFERENCE = 1 / 16
"""How much of what a walk may visit is searched for the difference to another state, instead."""

_NODES_PER_THREAD = 1_500
"""Nodes of the trie that a walk visits in the time in which the automaton looks at a thread."""


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


class Bitmasks:
    """Makes the bitmasks of states over one vocabulary. Thread-safe.

    Each state keeps its own (`State.bitmask`), so a repeated call is a look-up.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._lock = threading.Lock()
        self._from_root: dict[object, _Walked] = {}
        self._root_bytes = 0
        self._counted: dict[object, _CountedWalk] = {}
        self._latest: dict[ByteDfa, _Latest] = {}
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
            found.add(self._walked_from_root(terminal, automaton), automaton, then)
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
                    found.add(self._walked(trie_set, terminal, automaton), automaton, then)
        bitmask = self._packed(tuple(found.shared.values()), found.lists)
        own = [words.nbytes for words in bitmask.shared if id(words) not in found.shared]
        automaton.num_bytes += bitmask.numbers.nbytes + bitmask.words.nbytes + sum(own)
        return bitmask

    def _walked(self, trie_set: TrieSet, terminal: Terminal, automaton: Automaton) -> _Walked:
        """The tokens below `trie_set` that end in `terminal`, and where longer ones leave it."""
        known = trie_set.entered.get(terminal)
        if known is None:
            if len(trie_set.entered) > _MAX_ENTERED:
                trie_set.entered.clear()
            ends = self._vocabulary.end[trie_set.nodes]
            automaton.spend(int((ends - trie_set.nodes).sum()) // _NODES_PER_THREAD)
            known = trie_set.entered[terminal] = self._walk(trie_set, terminal)
        return known

    def _walked_from_root(self, terminal: Terminal, automaton: Automaton) -> _Walked:
        """As `_walked` from the root, where wide terminals cost most; bounded by bytes."""
        root = self._vocabulary.root
        if isinstance(terminal, Literals):
            return _spelled(root, terminal)
        key: object = terminal
        if isinstance(terminal, JsonString):
            # Beyond the longest token, the number of characters left makes no difference.
            most = self._counted_walk(root, terminal).most_items
            high = terminal.high
            key = (
                terminal.body,
                terminal.index,
                min(terminal.low, most + 1),
                None if high is None or high > most else high,
                terminal.names,
            )
        known = self._from_root.get(key)
        if known is None:
            automaton.spend(len(self._vocabulary.byte) // _NODES_PER_THREAD)
            known = self._walk(root, terminal)
            self._root_bytes += sum(words.nbytes for words in known.shared)
            if self._root_bytes > _MAX_ROOT_BYTES or len(self._from_root) > _MAX_ROOT_WALKS:
                self._from_root.clear()
                self._latest.clear()
                self._root_bytes = 0
            self._from_root[key] = known
        return known

    def _walk(self, trie_set: TrieSet, terminal: Terminal) -> _Walked:
        if isinstance(terminal, Literals):
            return _spelled(trie_set, terminal)
        if isinstance(terminal, JsonString):
            return self._counted_walk(trie_set, terminal).take(terminal, trie_set)
        assert isinstance(terminal, Dfa)
        if trie_set is self._vocabulary.root:
            return self._walk_from_latest(terminal)
        words, ids, nodes = self._walk_table(trie_set, terminal)
        return _Walked(() if words is None else (words,), ids, self._leaving(nodes))

    def _walk_table(
        self, trie_set: TrieSet, terminal: Dfa
    ) -> tuple[Words | None, TokenIds, NDArray[np.int32]]:
        dfa = terminal.dfa
        return walk(trie_set, dfa.by_class, dfa.classes, dfa.accepting, terminal.index, _DENSE_FROM)

    def _walk_from_latest(self, terminal: Dfa) -> _Walked:
        """A walk from the root; where it can, by the difference to the latest in this automaton."""
        dfa, vocabulary = terminal.dfa, self._vocabulary
        latest = self._latest.get(dfa)
        difference = None
        if latest is not None:
            difference = walk_difference(
                vocabulary,
                dfa.by_class,
                dfa.classes,
                dfa.accepting,
                terminal.index,
                latest.index,
                int(vocabulary.num_below[dfa.table[terminal.index] >= 0].sum() * _MAX_DIFFERENCE),
            )
        if latest is None or difference is None:
            words, ids, nodes = self._walk_table(vocabulary.root, terminal)
            if words is None:
                return _Walked((), ids, self._leaving(nodes))
            self._latest[dfa] = _Latest(terminal.index, words, nodes)
            return _Walked((words,), ids, self._leaving(nodes))
        changed, nodes = difference
        words = latest.words
        if len(changed):
            words = words ^ vocabulary.words_of(changed)
        if len(nodes):
            nodes = np.setxor1d(latest.nodes, nodes, assume_unique=True)
        else:
            nodes = latest.nodes
        return _Walked((words,), NO_IDS, self._leaving(nodes))

    def _leaving(self, nodes: NDArray[np.int32]) -> tuple[tuple[TrieSet, Expression], ...]:
        return ((self._vocabulary.trie_set(nodes), EMPTY),) if len(nodes) else ()

    def _counted_walk(self, trie_set: TrieSet, terminal: JsonString) -> _CountedWalk:
        key = trie_set, terminal.body, terminal.index
        known = self._counted.get(key)
        if known is None:
            if len(self._counted) > _MAX_COUNTED:
                self._counted.clear()
            walked = walk_counting(trie_set, terminal.body.table, terminal.index)
            known = self._counted[key] = _CountedWalk(*walked)
        return known

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


class _Latest(NamedTuple):
    """What the latest walk of the whole trie in an automaton found.

    Attributes:
        index: the automaton's state at the root.
        words: the tokens that end in it.
        nodes: the nodes below which longer tokens go on.
    """

    index: int
    words: Words
    nodes: NDArray[np.int32]


class _Walked(NamedTuple):
    """What a walk from a set of nodes into a terminal finds.

    Attributes:
        shared, ids: the tokens that end in the terminal or right after it, as bitmasks and as a
            list.
        leaving: the nodes below which longer tokens go on, with what follows there.
    """

    shared: tuple[Words, ...]
    ids: TokenIds
    leaving: tuple[tuple[TrieSet, Expression], ...]


class _Found:
    """What the walks of one state have found so far, and where others must begin."""

    __slots__ = ("lists", "pending", "shared")

    def __init__(self) -> None:
        self.shared: dict[int, Words] = {}
        self.lists: list[TokenIds] = []
        self.pending: list[tuple[TrieSet, State]] = []

    def add(self, walked: _Walked, automaton: Automaton, then: Continuation | None) -> None:
        for words in walked.shared:
            self.shared[id(words)] = words
        if len(walked.ids):
            self.lists.append(walked.ids)
        for trie_set, expression in walked.leaving:
            self.pending.append((trie_set, automaton.begin(expression, then)))


def _spelled(trie_set: TrieSet, terminal: Literals) -> _Walked:
    """Along literals."""
    lists: list[TokenIds] = []
    leaving: list[tuple[TrieSet, Expression]] = []
    longest = trie_set.vocabulary.max_token_bytes
    for text, following in terminal.entries:
        rest = text[terminal.position : terminal.position + longest + 1]
        known = trie_set.entered.get(rest)
        if known is None:
            if len(trie_set.entered) > _MAX_ENTERED:
                trie_set.entered.clear()
            known = trie_set.entered[rest] = _along(trie_set, rest)
        ids, end = known
        if len(ids):
            lists.append(ids)
        if end is not None:
            leaving.append((end, following or EMPTY))
    ids = lists[0] if len(lists) == 1 else np.concatenate(lists) if lists else NO_IDS
    return _Walked((), ids, tuple(leaving))


def _along(trie_set: TrieSet, text: bytes) -> tuple[TokenIds, TrieSet | None]:
    """The tokens that end on the way along a text, and where longer ones leave it."""
    lists: list[TokenIds] = []
    for byte in text:
        if not trie_set.first >> byte & 1:
            return np.concatenate(lists) if lists else NO_IDS, None
        trie_set = trie_set.step(byte)
        if len(trie_set.ids):
            lists.append(trie_set.ids)
    ids = np.concatenate(lists) if lists else NO_IDS
    return ids, trie_set if trie_set.first else None


class _CountedWalk:
    """A walk into string bodies, from which `take` picks by the number of characters left."""

    def __init__(
        self,
        ids: TokenIds,
        begun: NDArray[np.int16],
        leaving: NDArray[np.int32],
        completed: NDArray[np.int16],
    ) -> None:
        order = np.argsort(begun, kind="stable")
        self._ids = ids[order]
        self._begun = begun[order]
        self._leaving = leaving
        self._completed = completed
        self.most_items = int(max(begun.max(initial=0), completed.max(initial=0)))
        self._inside: dict[int, Words] = {}
        self._closing: dict[bytes, Words] = {}

    def take(self, terminal: JsonString, trie_set: TrieSet) -> _Walked:
        vocabulary = trie_set.vocabulary
        high = self.most_items if terminal.high is None else min(terminal.high, self.most_items)
        ids = self._ids[: np.searchsorted(self._begun, high, side="right")]
        shared: tuple[Words, ...] = ()
        if len(ids) >= _DENSE_FROM:
            if high not in self._inside:
                self._inside[high] = vocabulary.words_of(ids)
            shared, ids = (self._inside[high],), NO_IDS
        closing = self._leaving
        if high < self.most_items or terminal.low:
            closing = closing[(self._completed <= high) & (self._completed >= terminal.low)]
        if terminal.names:
            excluded = [_nodes_of((*name, QUOTE), trie_set) for name in terminal.names]
            if any(map(len, excluded)):
                closing = closing[~np.isin(closing, np.concatenate(excluded))]
        closed = vocabulary.tokens_at(closing)
        if len(closed) >= _DENSE_FROM:
            key = closing.tobytes()
            if key not in self._closing:
                if len(self._closing) > _MAX_CLOSING:
                    self._closing.clear()
                self._closing[key] = vocabulary.words_of(closed)
            shared = (*shared, self._closing[key])
        else:
            ids = np.concatenate((ids, closed))
        inner = closing[vocabulary.end[closing] > closing + 1]
        leaving = ((vocabulary.trie_set(inner), EMPTY),) if len(inner) else ()
        return _Walked(shared, ids, leaving)


def _nodes_of(text: Iterable[int], trie_set: TrieSet) -> NDArray[np.int32]:
    """The nodes that spell `text` below a set."""
    for byte in text:
        if not trie_set.first >> byte & 1:
            return NO_IDS
        trie_set = trie_set.step(byte)
    return trie_set.nodes
