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
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sgl_vllm.fsm.automaton import QUOTE, Dfa, Literals, State, Text
from sgl_vllm.fsm.vocabulary import (
    TokenIds,
    TrieSet,
    Vocabulary,
    bits_of,
    or_words,
    set_bits,
    walk,
    walk_counting,
)

Row = NDArray[np.uint32]
Entered = tuple[Row | None, TokenIds, TrieSet | None]
"""The tokens that end in a terminal, as bits or ids, and the nodes where longer ones leave it."""

_DENSE_FROM = 512
"""So many tokens are kept as a row of bits rather than as a list."""

_NO_WORDS = np.zeros(0, np.uint16)
_NO_BITS = np.zeros(0, np.uint32)
_MAX_ROWS_BYTES = 64 << 20
_MAX_ROWS = 50_000
_MAX_ENTERED = 10_000


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
        rows: dict[int, Row] = {}
        lists: list[TokenIds] = []
        pending: list[tuple[TrieSet, State]] = []
        narrow = []
        for thread in state.threads:
            terminal, then = thread
            if isinstance(terminal, Literals):
                narrow.append(thread)
                continue
            self._add(self._from_root(terminal), state, then, rows, lists, pending)
        root = self._vocabulary.root
        if narrow:
            self._spell(root, state, narrow, lists, pending)
        seen: set[tuple[TrieSet, State]] = set()
        while pending:
            reached = pending.pop()
            if reached in seen:
                continue
            seen.add(reached)
            self._beyond(*reached, rows, lists, pending)
        return self._packed(tuple(rows.values()), lists)

    def _beyond(
        self,
        trie_set: TrieSet,
        state: State,
        rows: dict[int, Row],
        lists: list[TokenIds],
        pending: list[tuple[TrieSet, State]],
    ) -> None:
        """The tokens below `trie_set` that are legal if it is reached in `state`."""
        narrow = []
        for thread in state.threads:
            terminal, then = thread
            if not terminal.first & trie_set.first:
                continue
            if isinstance(terminal, Literals):
                narrow.append(thread)
                continue
            self._add(self._enter(trie_set, terminal), state, then, rows, lists, pending)
        if narrow:
            self._spell(trie_set, state, narrow, lists, pending)

    @staticmethod
    def _add(
        entered: Entered,
        state: State,
        then: object,
        rows: dict[int, Row],
        lists: list[TokenIds],
        pending: list[tuple[TrieSet, State]],
    ) -> None:
        row, ids, leaving = entered
        if row is not None:
            rows[id(row)] = row
        else:
            lists.append(ids)
        if leaving is not None:
            pending.append((leaving, state.automaton.after(then)))

    def _spell(
        self,
        trie_set: TrieSet,
        state: State,
        narrow: list[tuple[Literals, object]],
        lists: list[TokenIds],
        pending: list[tuple[TrieSet, State]],
    ) -> None:
        """As `_beyond`, along literals: byte by byte."""
        automaton = state.automaton
        stack: list[tuple[TrieSet, Literals, object]] = [
            (trie_set, terminal, then) for terminal, then in narrow
        ]
        while stack:
            here, terminal, then = stack.pop()
            for byte in bits_of(here.first & terminal.first):
                there = here.step(byte)
                further, done = terminal.step(byte)
                if len(there.ids):
                    lists.append(there.ids)
                if not there.first:
                    continue
                if further is not None:
                    stack.append((there, further, then))
                for expression in done:
                    pending.append((there, automaton.begin(expression, then)))

    def _enter(self, trie_set: TrieSet, terminal: Dfa | Text) -> Entered:
        """The tokens below `trie_set` that end in `terminal`, and where longer ones leave it."""
        known = trie_set.entered.get(terminal)
        if known is None:
            if len(trie_set.entered) > _MAX_ENTERED:
                trie_set.entered.clear()
            known = trie_set.entered[terminal] = self._walk(trie_set, terminal)
        return known

    def _from_root(self, terminal: Dfa | Text) -> Entered:
        """As `_enter` from the root; there wide terminals cost the most, and are bounded."""
        root = self._vocabulary.root
        key: object = terminal
        if isinstance(terminal, Text):
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
            if known[0] is not None:
                self._rows_bytes += known[0].nbytes
            if self._rows_bytes > _MAX_ROWS_BYTES or len(self._rows) > _MAX_ROWS:
                self._rows.clear()
                self._rows_bytes = 0
            self._rows[key] = known
        return known

    def _walk(self, trie_set: TrieSet, terminal: Dfa | Text) -> Entered:
        row: Row | None = None
        if isinstance(terminal, Dfa):
            dfa = terminal.dfa
            row, ids, nodes = walk(
                trie_set, dfa.by_class, dfa.classes, dfa.accepting, terminal.index, _DENSE_FROM
            )
        else:
            ids, nodes = self._counted_walk(trie_set, terminal).take(terminal, trie_set)
            if len(ids) >= _DENSE_FROM:
                row, ids = self._row_of(ids), ids[:0]
        return row, ids, self._vocabulary.trie_set(nodes) if len(nodes) else None

    def _counted_walk(self, trie_set: TrieSet, terminal: Text) -> _Counted:
        key = trie_set, terminal.body, terminal.index
        known = self._counted.get(key)
        if known is None:
            if len(self._counted) > 1_000:
                self._counted.clear()
            walked = walk_counting(trie_set, terminal.body.table, terminal.index)
            known = self._counted[key] = _Counted(*walked)
        return known

    def _row_of(self, ids: TokenIds) -> Row:
        row = np.zeros(self._vocabulary.num_words, np.uint32)
        set_bits(ids, row)
        return row

    def _packed(self, rows: tuple[Row, ...], lists: list[TokenIds]) -> Mask:
        ids = np.concatenate(lists) if lists else np.zeros(0, np.int32)
        if len(ids) >= _DENSE_FROM * 4:
            row = self._row_of(ids)
            for shared in rows:
                row |= shared
            return Mask((row,), _NO_WORDS, _NO_BITS)
        if not len(ids):
            return Mask(rows, _NO_WORDS, _NO_BITS)
        ids = np.sort(ids)
        words = ids >> 5
        starts = np.flatnonzero(np.concatenate(([True], words[1:] != words[:-1])))
        bits = np.bitwise_or.reduceat(np.uint32(1) << (ids & 31).astype(np.uint32), starts)
        return Mask(rows, words[starts].astype(np.uint16), bits)


class _Counted:
    """What a walk of string bodies found, to be taken by how many characters are left."""

    def __init__(
        self,
        ids: TokenIds,
        begun: NDArray[np.int16],
        leaving: NDArray[np.int32],
        completed: NDArray[np.int16],
    ) -> None:
        self._ids = ids
        self._begun = begun
        self._leaving = leaving
        self._completed = completed
        self.most_items = int(max(begun.max(initial=0), completed.max(initial=0)))

    def take(self, terminal: Text, trie_set: TrieSet) -> tuple[TokenIds, NDArray[np.int32]]:
        """The tokens below `trie_set` that end in `terminal` or right after its closing quote, and
        the nodes after the quote below which longer tokens go on."""
        ids, leaving = self._ids, self._leaving
        keep = np.ones(len(leaving), np.bool_)
        if terminal.high is not None:
            ids = ids[self._begun <= terminal.high]
            keep &= self._completed <= terminal.high
        if terminal.low:
            keep &= self._completed >= terminal.low
        for name in terminal.names:
            spelt: TrieSet | None = trie_set
            for byte in (*name, QUOTE):
                spelt = spelt.step(byte) if spelt is not None and spelt.first >> byte & 1 else None
            if spelt is not None:
                keep &= ~np.isin(leaving, spelt.nodes)
        leaving = leaving[keep]
        vocabulary = trie_set.vocabulary
        closing = vocabulary.tokens_at(leaving)
        inner = leaving[vocabulary.end[leaving] > leaving + 1]
        return np.concatenate((ids, closing)), inner
