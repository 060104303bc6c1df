"""Walks of the vocabulary's trie into one terminal: which tokens end there, and where others leave.

Owns these walks and what is remembered of them, whatever grammar the terminal stands in. Does not
own what follows a terminal (`masks.py`), nor the loops (`trie_walks.py`). Pure: numpy and numba.

The states of one automaton differ in few tokens. In one that searches a pattern, most bytes lead
all states back to the same one:

    pattern [0-9]{3}      after `a1`, tokens that go on with a digit differ from those after `a`;
                          the others need no walk
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sgl_vllm.fsm.automaton import Automaton
from sgl_vllm.fsm.byte_dfa import ByteDfa, Dfa
from sgl_vllm.fsm.expressions import EMPTY, Expression, Literals, Terminal
from sgl_vllm.fsm.json_string import QUOTE, JsonString
from sgl_vllm.fsm.vocabulary import (
    NO_IDS,
    Nodes,
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

_MAX_BYTES = 96 << 20
"""What is remembered of all walks. Beyond it, all of that is forgotten."""

_WALK_BYTES = 600
"""What a walk takes beside its bitmasks and lists."""

_MAX_DIFFERENCE = 1 / 16
"""The share of a walk's nodes that are searched for the difference to another state. Beyond it, the
walk itself costs less."""

_MANY_TEXTS = 4
"""A walk along so many texts is remembered. Along fewer, it costs less than an object."""

_STEPS_PER_THREAD = 1_000
"""This many look-ups of a walk, some 15 us, count as one thread that the automaton looks at."""


class Walked(NamedTuple):
    """What a walk from a set of nodes into a terminal finds.

    Attributes:
        shared, ids: the tokens that end in the terminal or right after it, as bitmasks and as a
            list.
        leaving: the nodes below which longer tokens go on, with what follows there.
    """

    shared: tuple[Words, ...]
    ids: TokenIds
    leaving: tuple[tuple[TrieSet, Expression], ...]


class TerminalWalks:
    """The walks over one vocabulary. Not thread-safe.

    Each costs look-ups where it is known. Otherwise it is charged to the automaton's allowance.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._from_root: dict[object, Walked] = {}
        self._counted: dict[object, _CountedWalk] = {}
        self._latest: dict[ByteDfa, _Latest] = {}
        self._owners: set[object] = set()
        """What terminals of remembered walks share, each counted once."""
        self._num_steps = 0
        """Look-ups that have not been charged."""

    def forget_if_full(self) -> None:
        """Called between two bitmasks, because the sets that one of them reaches are compared with
        each other. One bitmask adds at most some 100 MB, as its walks are charged for."""
        if self._vocabulary.num_cached_bytes > _MAX_BYTES:
            self._vocabulary.clear()
            self._from_root.clear()
            self._counted.clear()
            self._latest.clear()
            self._owners.clear()

    def below(self, trie_set: TrieSet, terminal: Terminal, automaton: Automaton) -> Walked:
        """The tokens below `trie_set` that end in `terminal`, and where longer ones leave it."""
        if isinstance(terminal, Literals) and len(terminal.texts) < _MANY_TEXTS:
            return _spelled(trie_set, terminal)
        terminal = self._uncounted(terminal)
        known = trie_set.entered.get(terminal)
        if known is None:
            known = trie_set.entered[terminal] = self._walk(trie_set, terminal)
            self._charge(automaton)
        return known

    def from_root(self, terminal: Terminal, automaton: Automaton) -> Walked:
        """As `below` from the root, where wide terminals cost most; bounded by bytes."""
        root = self._vocabulary.root
        if isinstance(terminal, Literals):
            return _spelled(root, terminal)
        terminal = self._uncounted(terminal)
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
            known = self._from_root[key] = self._walk(root, terminal)
            self._charge(automaton)
        return known

    def _uncounted(self, terminal: Terminal) -> Terminal:
        """The same terminal, or an automaton if no token is as long as the string may be."""
        if (
            isinstance(terminal, JsonString)
            and (terminal.low, terminal.names) == (0, None)
            and (terminal.high is None or terminal.high > self._vocabulary.max_token_bytes)
        ):
            return terminal.body.rest(terminal.index)
        return terminal

    def _charge(self, automaton: Automaton) -> None:
        num_threads, self._num_steps = divmod(self._num_steps, _STEPS_PER_THREAD)
        automaton.spend(num_threads)

    def _walk(self, trie_set: TrieSet, terminal: Terminal) -> Walked:
        if isinstance(terminal, Literals):
            walked = _spelled(trie_set, terminal)
            kept = sum(map(len, terminal.texts))
        elif isinstance(terminal, JsonString):
            walked = self._counted_walk(trie_set, terminal).take(terminal, trie_set)
            names = terminal.names
            kept = self._new_bytes(names.list, names.list.num_bytes) if names is not None else 0
        else:
            assert isinstance(terminal, Dfa)
            walked = self._in_table(trie_set, terminal)
            kept = self._new_bytes(terminal.dfa, terminal.dfa.table_bytes)
        num_bytes = walked.ids.nbytes + sum(words.nbytes for words in walked.shared)
        self._vocabulary.num_cached_bytes += _WALK_BYTES + num_bytes + kept
        return walked

    def _new_bytes(self, owner: object, num_bytes: int) -> int:
        """What a terminal keeps alive that is shared by others; 0 if it has been counted."""
        if owner in self._owners:
            return 0
        self._owners.add(owner)
        return num_bytes

    def _in_table(self, trie_set: TrieSet, terminal: Dfa) -> Walked:
        if trie_set is self._vocabulary.root:
            return self._walk_from_latest(terminal)
        words, ids, nodes = self._walk_table(trie_set, terminal)
        return Walked(() if words is None else (words,), ids, self._leaving(nodes))

    def _walk_table(self, trie_set: TrieSet, terminal: Dfa) -> tuple[Words | None, TokenIds, Nodes]:
        dfa = terminal.dfa
        words, ids, nodes, num_steps = walk(
            trie_set, dfa.by_class, dfa.classes, dfa.accepting, terminal.index, _DENSE_FROM
        )
        self._num_steps += num_steps
        return words, ids, nodes

    def _walk_from_latest(self, terminal: Dfa) -> Walked:
        """A walk from the root; where it can, by the difference to the latest in this automaton."""
        dfa, vocabulary = terminal.dfa, self._vocabulary
        latest = self._latest.get(dfa)
        difference = None
        if latest is not None:
            difference, num_visited = walk_difference(
                vocabulary,
                dfa.by_class,
                dfa.classes,
                dfa.accepting,
                terminal.index,
                latest.state,
                int(vocabulary.num_below[dfa.row(terminal.index) >= 0].sum() * _MAX_DIFFERENCE),
            )
            self._num_steps += num_visited
        if latest is None or difference is None:
            words, ids, nodes = self._walk_table(vocabulary.root, terminal)
            if words is None:
                return Walked((), ids, self._leaving(nodes))
            self._latest[dfa] = _Latest(terminal.index, words, nodes)
            return Walked((words,), ids, self._leaving(nodes))
        changed, nodes = difference
        words = latest.words
        if len(changed):
            words = words ^ vocabulary.words_of(changed)
        if len(nodes):
            nodes = np.setxor1d(latest.nodes, nodes, assume_unique=True)
        else:
            nodes = latest.nodes
        return Walked((words,), NO_IDS, self._leaving(nodes))

    def _leaving(self, nodes: Nodes) -> tuple[tuple[TrieSet, Expression], ...]:
        return ((self._vocabulary.trie_set(nodes), EMPTY),) if len(nodes) else ()

    def _counted_walk(self, trie_set: TrieSet, terminal: JsonString) -> _CountedWalk:
        key = trie_set, terminal.body, terminal.index
        known = self._counted.get(key)
        if known is None:
            *walked, num_steps = walk_counting(trie_set, terminal.body.table, terminal.index)
            self._num_steps += num_steps
            known = self._counted[key] = _CountedWalk(*walked)
            num_bytes = sum(found.nbytes for found in walked)
            self._vocabulary.num_cached_bytes += _WALK_BYTES + num_bytes
        return known


class _Latest(NamedTuple):
    """What the latest walk of the whole trie in an automaton found.

    Attributes:
        state: the automaton's state at the root.
        words: the tokens that end in it.
        nodes: the nodes below which longer tokens go on.
    """

    state: int
    words: Words
    nodes: Nodes


def _spelled(trie_set: TrieSet, terminal: Literals) -> Walked:
    """Along literals."""
    lists: list[TokenIds] = []
    leaving: list[tuple[TrieSet, Expression]] = []
    longest = trie_set.vocabulary.max_token_bytes
    for text, following in zip(terminal.texts, terminal.followings, strict=True):
        rest = text[terminal.position : terminal.position + longest + 1]
        known = trie_set.entered.get(rest)
        if known is None:
            known = trie_set.entered[rest] = _along(trie_set, rest)
            trie_set.vocabulary.num_cached_bytes += _WALK_BYTES + known[0].nbytes
        ids, end = known
        if len(ids):
            lists.append(ids)
        if end is not None:
            leaving.append((end, following))
    ids = lists[0] if len(lists) == 1 else np.concatenate(lists) if lists else NO_IDS
    return Walked((), ids, tuple(leaving))


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
        begun: NDArray[np.int32],
        leaving: NDArray[np.int32],
        completed: NDArray[np.int32],
    ) -> None:
        order = np.argsort(begun, kind="stable")
        self._ids = ids[order]
        self._begun = begun[order]
        self._leaving = leaving
        self._completed = completed
        self.most_items = int(max(begun.max(initial=0), completed.max(initial=0)))
        self._inside: dict[int, Words] = {}
        self._closing: dict[bytes, Words] = {}

    def take(self, terminal: JsonString, trie_set: TrieSet) -> Walked:
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
        if terminal.names is not None:
            rests = terminal.names.rests(vocabulary.max_token_bytes - 1)
            excluded = [_nodes_of((*rest, QUOTE), trie_set) for rest in rests]
            if any(map(len, excluded)):
                closing = closing[~np.isin(closing, np.concatenate(excluded))]
        closed = vocabulary.tokens_at(closing)
        if len(closed) >= _DENSE_FROM:
            key = closing.tobytes()
            if key not in self._closing:
                self._closing[key] = vocabulary.words_of(closed)
                vocabulary.num_cached_bytes += len(key)
            shared = (*shared, self._closing[key])
        else:
            ids = np.concatenate((ids, closed))
        inner = closing[vocabulary.end[closing] > closing + 1]
        if trie_set.is_nested:
            inner = np.unique(inner)
        leaving = ((vocabulary.trie_set(inner), EMPTY),) if len(inner) else ()
        return Walked(shared, ids, leaving)


def _nodes_of(text: Iterable[int], trie_set: TrieSet) -> Nodes:
    """The nodes that spell `text` below a set."""
    for byte in text:
        if not trie_set.first >> byte & 1:
            return NO_IDS
        trie_set = trie_set.step(byte)
    return trie_set.nodes
