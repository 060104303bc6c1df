"""A vocabulary as a trie of bytes, and walks over it.

Owns which tokens begin with which bytes. Does not own what is legal (`automaton.py`), nor how the
legal tokens of a state become a bitmask (`masks.py`). Pure: numpy and numba only.

The trie is flat. Nodes are in depth-first order, so the subtree of node `i` is `[i, end[i])`, and a
walk that meets a dead end continues at `end[i]`.

     tokens: "a" "ab" "b"          node   0    1   2   3
          (root)                   byte   -    a   b   b
          /    \\                   end    4    3   3   4
         a      b                  depth  0    1   2   1
         |
         b
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any  # Any: terminal_walks.py is above this module

import numpy as np
from numpy.typing import NDArray

from sgl_vllm.fsm import trie_nodes, trie_walks
from sgl_vllm.fsm.tables import byte_set

Nodes = NDArray[np.int32]
"""Nodes of the trie, ascending and distinct."""

TokenIds = NDArray[np.int32]
Words = NDArray[np.uint32]
"""A bitmask over tokens: bit t % 32 of word t // 32 says whether token t is legal."""

NO_IDS: TokenIds = np.zeros(0, np.int32)
MAX_SIZE = 1 << 21
_SET_BYTES = 700
"""What a `TrieSet` takes beside its nodes."""


class Vocabulary:
    """The tokens of a model that stand for text, as a trie of their bytes.

    Built once per vocabulary: 131,000 tokens take about 0.3 s and 6 MB.

    Args:
        token_bytes: what each token id decodes to; empty for tokens that are not text (special
            ones).
        size: bits of a bitmask, at least the number of tokens; the rest are never set.

    Attributes:
        num_cached_bytes: what the cached sets take; others add what they remember of walks.
    """

    def __init__(self, token_bytes: Sequence[bytes], size: int) -> None:
        if size > MAX_SIZE:
            raise ValueError(f"a vocabulary of {size} tokens; at most {MAX_SIZE} are supported")
        if size < len(token_bytes):
            raise ValueError(f"{len(token_bytes)} tokens do not fit into a bitmask of {size}")
        self.token_bytes = token_bytes
        self.size = size
        order = sorted((i for i, b in enumerate(token_bytes) if b), key=token_bytes.__getitem__)
        lengths = np.array([len(token_bytes[i]) for i in order], np.int64)
        data = np.frombuffer(b"".join([token_bytes[i] for i in order]), np.uint8)
        self.byte, self.end, self.depth, self.first_token = trie_nodes.build_trie(data, lengths)
        self.tokens = np.array(order, np.int32)
        """Ids in the order of their bytes; those of node i are `first_token[i : i + 2]`."""
        self.num_below = np.zeros(256, np.int64)
        """How many nodes there are in tokens that begin with a byte."""
        top = np.flatnonzero(self.depth == 1)
        self.num_below[self.byte[top]] = self.end[top] - top
        self.num_words = (size + 31) // 32
        self.max_token_bytes = int(lengths.max(initial=0))
        self._sets: dict[int, TrieSet] = {}
        self.clear()

    def trie_set(self, nodes: Nodes) -> TrieSet:
        """The set of these nodes; the same object for the same nodes, as long as it is cached."""
        data = nodes.tobytes()
        key = hash(data)
        known = self._sets.get(key)
        if known is None or known.nodes.tobytes() != data:
            known = self._sets[key] = TrieSet(self, nodes)
            self.num_cached_bytes += _SET_BYTES + nodes.nbytes
        return known

    def tokens_at(self, nodes: Nodes) -> TokenIds:
        """The tokens that end at `nodes`."""
        return trie_nodes.tokens_at(nodes, self.first_token, self.tokens)

    def words_of(self, ids: TokenIds) -> Words:
        """A bitmask with the bits of `ids` set."""
        words = np.zeros(self.num_words, np.uint32)
        trie_nodes.set_bits(ids, words)
        return words

    def clear(self) -> None:
        """Empty the cache of sets, with what is remembered of each. They are made again when
        needed."""
        self._sets.clear()
        self.num_cached_bytes = 0
        self.root = self.trie_set(np.zeros(1, np.int32))


class TrieSet:
    """A set of nodes, walked as one.

    After a JSON string, say, the nodes right after the closing quote of `."`, `")"`, ... form one
    set: whatever follows the string is looked for in all their subtrees at once.

    Attributes:
        first: the bytes that lead on from any of the nodes, as bits.
        ids: the tokens that end at the nodes.
        num_below: how many nodes there are below these, each counted once.
        is_nested: whether one of the nodes is below another one.
        entered: what `terminal_walks.py` found out about a walk from here into a terminal.
    """

    __slots__ = (
        *("_next", "entered", "first", "ids"),
        *("is_nested", "nodes", "num_below", "vocabulary"),
    )

    def __init__(self, vocabulary: Vocabulary, nodes: Nodes) -> None:
        self.vocabulary = vocabulary
        self.nodes = nodes
        present = np.zeros(256, np.bool_)
        self.num_below, self.is_nested = trie_nodes.look_below(
            nodes, vocabulary.byte, vocabulary.end, present
        )
        self.first = byte_set(present)
        self.ids = vocabulary.tokens_at(nodes)
        self._next: dict[int, TrieSet] = {}
        self.entered: dict[object, Any] = {}  # Any: terminal_walks.py is above this module

    def step(self, byte: int) -> TrieSet:
        """The nodes one `byte` further; `byte` must be in `first`."""
        known = self._next.get(byte)
        if known is None:
            v = self.vocabulary
            nodes = trie_nodes.children(self.nodes, v.byte, v.end, byte)
            if self.is_nested:
                nodes.sort()
            known = self._next[byte] = v.trie_set(nodes)
        return known


def walk(
    trie_set: TrieSet,
    table: NDArray[np.int32],
    classes: NDArray[np.uint8],
    accepting: NDArray[np.bool_],
    start: int,
    dense_from: int,
) -> tuple[Words | None, TokenIds, Nodes, int]:
    """All tokens below a set that stay inside a byte automaton.

    Cost: one table look-up for each node that is reached, some nanoseconds each; for a node that is
    below several nodes of the set, one for each of the states in which it is reached.

    Args:
        table: (states, classes of bytes): the next state, -1 for none. Every state must lead to
            acceptance.
        classes: (256,): the class of each byte.
        start: the state at the nodes of the set.
        dense_from: this many tokens are returned as a bitmask, fewer as a list.

    Returns: the tokens whose bytes below the set keep the automaton alive, as a bitmask or as ids;
        the nodes below the set where the automaton accepts and longer tokens go on; and the number
        of look-ups.
    """
    v = trie_set.vocabulary
    words = np.zeros(v.num_words, np.uint32)
    leaving = np.empty(trie_set.num_below, np.int32)
    loop = trie_walks.walk_nested if trie_set.is_nested else trie_walks.walk_apart
    num_ids, num_leaving, num_steps = loop(
        *(trie_set.nodes, v.byte, v.end, v.depth, v.first_token, v.tokens, v.max_token_bytes),
        *(table, classes, accepting, start, words, leaving),
    )
    leaving = leaving[:num_leaving].copy()
    if num_ids >= dense_from:
        return words, NO_IDS, leaving, num_steps
    return None, trie_nodes.ids_in(words), leaving, num_steps


def walk_difference(
    vocabulary: Vocabulary,
    table: NDArray[np.int32],
    classes: NDArray[np.uint8],
    accepting: NDArray[np.bool_],
    start: int,
    other: int,
    most_nodes: int,
) -> tuple[tuple[TokenIds, Nodes] | None, int]:
    """What `walk` from the root finds in one of the states `start` and `other` only.

    Cost: as `walk`, but only nodes are visited where the two are in different states. In an
    automaton that searches a pattern, most bytes lead all states back to the same one.

    Returns: the tokens, and the nodes below which longer tokens go on, or None if more than
        `most_nodes` have to be visited; and how many were visited.
    """
    v = vocabulary
    ids, leaving, is_all, num_visited = trie_walks.walk_both(
        *(v.byte, v.end, v.depth, v.first_token, v.tokens, v.max_token_bytes),
        *(table, classes, accepting, start, other, most_nodes),
    )
    return (ids, leaving) if is_all else None, num_visited


def walk_counting(
    trie_set: TrieSet, table: NDArray[np.int32], start: int
) -> tuple[TokenIds, NDArray[np.int32], NDArray[np.int32], NDArray[np.int32], int]:
    """As `walk`, over an automaton of repeated items, and counts the items in each token.

    Items begin and end in state 0, which the closing byte leaves to state -2.

    Returns: ids of tokens that do not close, with the items that each begins or completes;
        nodes right after the closing byte (with or without longer tokens below) and the items
        completed before it; and the number of look-ups. If the set is nested, some tokens and nodes
        come several times, with different counts.
    """
    v = trie_set.vocabulary
    return trie_walks.walk_items(
        *(trie_set.nodes, v.byte, v.end, v.depth, v.first_token, v.tokens, v.max_token_bytes),
        *(table, start),
    )
