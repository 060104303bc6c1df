"""Which tokens are legal in a state, as a row of bits.

Owns: the walk of a vocabulary's trie beside an automaton, and compact storage of what it finds.
Pure: numpy and numba only.

A terminal that most of the vocabulary passes through, such as the inside of a JSON string, is
walked once per vocabulary, whatever grammar it stands in: the tokens that end inside it are one
shared row of bits, and the nodes where longer tokens leave it are one set of nodes, from which
only what follows the terminal in *this* grammar is walked (xgrammar's context-independent and
context-dependent tokens, arXiv 2411.15100, section 3.1; here the second kind is exact and cached
per state).

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

from sgl_vllm.fsm.automaton import (
    EMPTY,
    QUOTE,
    Automaton,
    Continuation,
    Expression,
    JsonString,
    Literals,
    State,
    Terminal,
)
from sgl_vllm.fsm.vocabulary import (
    NO_IDS,
    TokenIds,
    TrieSet,
    Vocabulary,
    bits_of,
    or_words,
    walk,
    walk_counting,
)

Row = NDArray[np.uint32]


def only_bit(row: Row) -> int | None:
    """The number of the bit that is set in `row`; None if none or several are."""
    (used,) = row.nonzero()
    if len(used) != 1:
        return None
    bits = int(row[used[0]])
    return None if bits & (bits - 1) else int(used[0]) * 32 + bits.bit_length() - 1


class Entered(NamedTuple):
    """What a walk from a set of nodes into a terminal finds.

    Attributes:
        rows, ids: the tokens that end in the terminal or right after it, as bits and as a list.
        leaving: the nodes below which longer tokens go on, with what follows there.
    """

    rows: tuple[Row, ...]
    ids: TokenIds
    leaving: tuple[tuple[TrieSet, Expression], ...]


_DENSE_FROM = 512
"""So many tokens are kept as a row of bits rather than as a list."""

_NO_WORDS = np.zeros(0, np.uint16)
_NO_BITS = np.zeros(0, np.uint32)
_MAX_ROWS_BYTES = 64 << 20
_MAX_ROWS = 50_000
_MAX_ENTERED = 10_000
_MAX_CLOSING = 1_000
_MAX_COUNTED = 1_000


@dataclass(frozen=True, slots=True)
class Mask:
    """The legal tokens of a state: shared rows of bits, and some words of its own."""

    rows: tuple[Row, ...]
    words: NDArray[np.uint16]
    bits: Row

    def fill(self, row: Row) -> None:
        """Write the mask into `row`, uint32 (num_words,)."""
        if self.rows:
            row[:] = self.rows[0]
            for other in self.rows[1:]:
                row |= other
        else:
            row.fill(0)
        if len(self.words):
            or_words(row, self.words, self.bits)


class Masks:
    """Masks over one vocabulary. Every state keeps its own (`State.mask`); a repeated call is a
    look-up."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._lock = threading.Lock()
        self._rows: dict[object, Entered] = {}
        self._counted: dict[object, _Counted] = {}
        self._rows_bytes = 0

    def of(self, state: State) -> Mask:
        """The tokens that may come next in `state`; not whether the text may end.

        Cost: microseconds when known, tens of them in a new state, a walk of the whole vocabulary
        (about a millisecond for 131,000 tokens) in a new terminal.
        """
        mask = state.mask
        if mask is None:
            with self._lock:  # vLLM fills large batches in several threads
                mask = state.mask = self._make(state)
        assert isinstance(mask, Mask)
        return mask

    def _make(self, state: State) -> Mask:
        found = _Found()
        for terminal, then in state.threads:
            found.add(self._from_root(terminal), state.automaton, then)
        seen: set[tuple[TrieSet, State]] = set()
        while found.pending:
            reached = found.pending.pop()
            if reached in seen:
                continue
            seen.add(reached)
            trie_set, state = reached
            for terminal, then in state.threads:
                if terminal.first & trie_set.first:
                    found.add(self._enter(trie_set, terminal), state.automaton, then)
        return self._packed(tuple(found.rows.values()), found.lists)

    def _enter(self, trie_set: TrieSet, terminal: Terminal) -> Entered:
        """The tokens below `trie_set` that end in `terminal`, and where longer ones leave it."""
        known = trie_set.entered.get(terminal)
        if known is None:
            if len(trie_set.entered) > _MAX_ENTERED:
                trie_set.entered.clear()
            known = trie_set.entered[terminal] = self._walk(trie_set, terminal)
        return known

    def _from_root(self, terminal: Terminal) -> Entered:
        """As `_enter` from the root; there wide terminals cost the most, and are bounded."""
        root = self._vocabulary.root
        if isinstance(terminal, Literals):
            return _spelled(root, terminal)
        key: object = terminal
        if isinstance(terminal, JsonString):
            # Beyond the longest token, how many characters are left makes no difference.
            most = self._counted_walk(root, terminal).most_items
            high = terminal.high
            key = (
                terminal.body,
                terminal.index,
                min(terminal.low, most + 1),
                None if high is None or high > most else high,
                terminal.names,
            )
        known = self._rows.get(key)
        if known is None:
            known = self._walk(root, terminal)
            self._rows_bytes += sum(row.nbytes for row in known.rows)
            if self._rows_bytes > _MAX_ROWS_BYTES or len(self._rows) > _MAX_ROWS:
                self._rows.clear()
                self._rows_bytes = 0
            self._rows[key] = known
        return known

    def _walk(self, trie_set: TrieSet, terminal: Terminal) -> Entered:
        if isinstance(terminal, Literals):
            return _spelled(trie_set, terminal)
        if isinstance(terminal, JsonString):
            return self._counted_walk(trie_set, terminal).take(terminal, trie_set)
        dfa = terminal.dfa
        row, ids, nodes = walk(
            trie_set, dfa.by_class, dfa.classes, dfa.accepting, terminal.index, _DENSE_FROM
        )
        leaving = ((self._vocabulary.trie_set(nodes), EMPTY),) if len(nodes) else ()
        return Entered(() if row is None else (row,), ids, leaving)

    def _counted_walk(self, trie_set: TrieSet, terminal: JsonString) -> _Counted:
        key = trie_set, terminal.body, terminal.index
        known = self._counted.get(key)
        if known is None:
            if len(self._counted) > _MAX_COUNTED:
                self._counted.clear()
            walked = walk_counting(trie_set, terminal.body.table, terminal.index)
            known = self._counted[key] = _Counted(*walked)
        return known

    def _packed(self, rows: tuple[Row, ...], lists: list[TokenIds]) -> Mask:
        if not lists:
            return Mask(rows, _NO_WORDS, _NO_BITS)
        ids = np.concatenate(lists) if len(lists) > 1 else lists[0]
        own = self._vocabulary.row_of(ids)
        words = np.flatnonzero(own)
        if len(words) * 2 > len(own):
            for shared in rows:
                own |= shared
            return Mask((own,), _NO_WORDS, _NO_BITS)
        return Mask(rows, words.astype(np.uint16), own[words])


class _Found:
    """What the walks of one state have found so far, and where others are to begin."""

    __slots__ = ("lists", "pending", "rows")

    def __init__(self) -> None:
        self.rows: dict[int, Row] = {}
        self.lists: list[TokenIds] = []
        self.pending: list[tuple[TrieSet, State]] = []

    def add(self, entered: Entered, automaton: Automaton, then: Continuation | None) -> None:
        for row in entered.rows:
            self.rows[id(row)] = row
        if len(entered.ids):
            self.lists.append(entered.ids)
        for trie_set, expression in entered.leaving:
            self.pending.append((trie_set, automaton.begin(expression, then)))


def _spelled(trie_set: TrieSet, terminal: Literals) -> Entered:
    """Along literals, byte by byte."""
    if len(terminal.entries) == 1:
        return _spelled_one(trie_set, terminal)
    lists: list[TokenIds] = []
    leaving: list[tuple[TrieSet, Expression]] = []
    stack = [(trie_set, terminal)]
    while stack:
        here, there = stack.pop()
        for byte in bits_of(here.first & there.first):
            nodes = here.step(byte)
            further, done = there.step(byte)
            if len(nodes.ids):
                lists.append(nodes.ids)
            if nodes.first:
                if further is not None:
                    stack.append((nodes, further))
                leaving.extend([(nodes, expression) for expression in done])
    ids = np.concatenate(lists) if lists else NO_IDS
    return Entered((), ids, tuple(leaving))


def _spelled_one(trie_set: TrieSet, terminal: Literals) -> Entered:
    """Along one literal, without a terminal for each of its bytes."""
    text, following = terminal.entries[0]
    lists: list[TokenIds] = []
    leaving: tuple[tuple[TrieSet, Expression], ...] = ()
    for byte in text[terminal.position :]:
        if not trie_set.first >> byte & 1:
            break
        trie_set = trie_set.step(byte)
        if len(trie_set.ids):
            lists.append(trie_set.ids)
    else:
        if trie_set.first:
            leaving = ((trie_set, following or EMPTY),)
    return Entered((), np.concatenate(lists) if lists else NO_IDS, leaving)


class _Counted:
    """What a walk of string bodies found, to be taken by how many characters are left."""

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
        self._inside: dict[int, Row] = {}
        self._closing: dict[bytes, Row] = {}

    def take(self, terminal: JsonString, trie_set: TrieSet) -> Entered:
        vocabulary = trie_set.vocabulary
        high = self.most_items if terminal.high is None else min(terminal.high, self.most_items)
        ids = self._ids[: np.searchsorted(self._begun, high, side="right")]
        rows: tuple[Row, ...] = ()
        if len(ids) >= _DENSE_FROM:
            if high not in self._inside:
                self._inside[high] = vocabulary.row_of(ids)
            rows, ids = (self._inside[high],), NO_IDS
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
                self._closing[key] = vocabulary.row_of(closed)
            rows = (*rows, self._closing[key])
        else:
            ids = np.concatenate((ids, closed))
        inner = closing[vocabulary.end[closing] > closing + 1]
        leaving = ((vocabulary.trie_set(inner), EMPTY),) if len(inner) else ()
        return Entered(rows, ids, leaving)


def _nodes_of(text: Iterable[int], trie_set: TrieSet) -> NDArray[np.int32]:
    """The nodes that spell `text` below a set."""
    for byte in text:
        if not trie_set.first >> byte & 1:
            return NO_IDS
        trie_set = trie_set.step(byte)
    return trie_set.nodes
