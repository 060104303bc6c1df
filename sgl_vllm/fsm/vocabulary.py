"""A vocabulary as a trie of bytes, and walks over it.

Owns: which tokens begin with which bytes. Does not own what is legal (`automaton.py`), nor how the
legal tokens of a state become a row of bits (`masks.py`). Pure: numpy and numba only.

The trie is flat: nodes in depth-first order, so the subtree of node `i` is `[i, end[i])`, and a
walk that finds a dead end jumps to `end[i]`.

     tokens: "a" "ab" "b"          node   0    1   2   3
          (root)                   byte   -    a   b   b
          /    \\                   end    4    3   3   4
         a      b                  depth  0    1   2   1
         |
         b
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sgl_vllm.fsm.tables import byte_set
from sgl_vllm.jit import compiled

Nodes = NDArray[np.int32]
TokenIds = NDArray[np.int32]

NO_IDS: TokenIds = np.zeros(0, np.int32)
MAX_SIZE = 1 << 21
_DEEPEST = 1024
"""Tokens of more bytes are not offered by masks."""
_MAX_REMEMBERED_NODES = 2_000_000


def bits_of(first: int) -> Iterator[int]:
    """The bytes in a set of bytes (bit b for byte b), in order."""
    while first:
        low = first & -first
        yield low.bit_length() - 1
        first ^= low


class Vocabulary:
    """The tokens of a model that stand for text, as a trie of their bytes.

    Built once per vocabulary: 131,000 tokens take some 0.3 s and 6 MB.

    Args:
        token_bytes: what each token id decodes to; empty where a token is no text (special ones).
        size: columns of a mask, at least the number of tokens; the rest are never legal.
    """

    def __init__(self, token_bytes: Sequence[bytes], size: int) -> None:
        if size > MAX_SIZE:
            raise ValueError(f"a vocabulary of {size} tokens; at most {MAX_SIZE} are supported")
        if size < len(token_bytes):
            raise ValueError(f"{len(token_bytes)} tokens do not fit into a mask of {size}")
        self.token_bytes = token_bytes
        self.size = size
        order = sorted((i for i, b in enumerate(token_bytes) if b), key=token_bytes.__getitem__)
        lengths = np.array([len(token_bytes[i]) for i in order], np.int64)
        data = np.frombuffer(b"".join([token_bytes[i] for i in order]), np.uint8)
        self.byte, self.end, self.depth, self.first_token = _build(data, lengths)
        self.tokens = np.array(order, np.int32)
        """Ids in the order of their bytes; those of node i are `first_token[i : i + 2]`."""
        self.num_words = (size + 31) // 32
        self._sets: dict[bytes, TrieSet] = {}
        self.forget()

    def trie_set(self, nodes: Nodes) -> TrieSet:
        """The set of these nodes; the same object for the same nodes, as long as it is known."""
        key = nodes.tobytes()
        known = self._sets.get(key)
        if known is None:
            if self._num_remembered > _MAX_REMEMBERED_NODES:
                self.forget()
            known = self._sets[key] = TrieSet(self, nodes)
            self._num_remembered += len(nodes)
        return known

    def tokens_at(self, nodes: Nodes) -> TokenIds:
        """The tokens that end at `nodes`."""
        return _tokens_at(nodes, self.first_token, self.tokens)

    def tokens_beginning_with(self, byte: int) -> TokenIds:
        if not self.root.first >> byte & 1:
            return NO_IDS
        (node,) = self.root.step(byte).nodes
        return self.tokens[self.first_token[node] : self.first_token[self.end[node]]]

    def row_of(self, ids: TokenIds) -> NDArray[np.uint32]:
        """A row of bits with those of `ids` set."""
        row = np.zeros(self.num_words, np.uint32)
        _set_bits(ids, row)
        return row

    def forget(self) -> None:
        """Let go of the sets that walks have met (they are made again when needed)."""
        self._sets.clear()
        self._num_remembered = 0
        self.root = self.trie_set(np.zeros(1, np.int32))


class TrieSet:
    """A set of nodes taken as one: what may follow after any of several beginnings of tokens.

    After a JSON string, say, the nodes right after the closing quote of `."`, `")"`, ... form one
    set: whatever follows the string is then looked for in all their subtrees at once.

    Attributes:
        first: the bytes that lead on from any of the nodes, as bits.
        ids: the tokens that end at the nodes.
    """

    __slots__ = ("_next", "entered", "first", "ids", "nodes", "vocabulary")

    def __init__(self, vocabulary: Vocabulary, nodes: Nodes) -> None:
        self.vocabulary = vocabulary
        self.nodes = nodes
        present = np.zeros(256, np.bool_)
        _mark_children(nodes, vocabulary.byte, vocabulary.end, present)
        self.first = byte_set(present)
        self.ids = vocabulary.tokens_at(nodes)
        self._next: dict[int, TrieSet] = {}
        self.entered: dict[object, Any] = {}
        """For `masks.py`: what it has found out about a walk from here into a terminal."""

    def step(self, byte: int) -> TrieSet:
        """The nodes one `byte` further; `byte` must be in `first`."""
        known = self._next.get(byte)
        if known is None:
            v = self.vocabulary
            known = self._next[byte] = v.trie_set(_children(self.nodes, v.byte, v.end, byte))
        return known


def walk(
    trie_set: TrieSet,
    table: NDArray[np.int32],
    classes: NDArray[np.uint8],
    accepting: NDArray[np.bool_],
    start: int,
    dense_from: int,
) -> tuple[NDArray[np.uint32] | None, TokenIds, Nodes]:
    """All tokens below a set that stay inside a byte DFA.

    Cost: one table look-up per node that is reached, some nanoseconds each.

    Args:
        table: (states, classes of bytes): the next state, -1 for none. Every state must lead to
            acceptance.
        classes: (256,): the class of each byte.
        start: the state at the nodes of the set.
        dense_from: so many tokens come as a row of bits, fewer as a list.

    Returns: the tokens whose bytes below the set keep the DFA alive, as a row of bits or as ids,
        and the nodes below the set where the DFA accepts and longer tokens go on.
    """
    v = trie_set.vocabulary
    row = np.zeros(v.num_words, np.uint32)
    leaving = np.empty(len(v.byte), np.int32)
    num_ids, num_leaving = _walk_table(
        trie_set.nodes,
        v.byte,
        v.end,
        v.depth,
        v.first_token,
        v.tokens,
        table,
        classes,
        accepting,
        start,
        row,
        leaving,
    )
    leaving = leaving[:num_leaving].copy()
    if num_ids >= dense_from:
        return row, NO_IDS, leaving
    return None, _ids_in(row, num_ids), leaving


def walk_counting(
    trie_set: TrieSet, table: NDArray[np.int32], start: int
) -> tuple[TokenIds, NDArray[np.int16], Nodes, NDArray[np.int16]]:
    """As `walk`, over a DFA of repeated items, telling how many of them each token holds.

    Items begin and end in state 0, which the closing byte leaves to state -2.

    Returns: ids of tokens that do not close, with the items that each begins or completes;
        nodes right after the closing byte (with or without longer tokens below) and the items
        completed before it.
    """
    v = trie_set.vocabulary
    return _walk_items(
        trie_set.nodes, v.byte, v.end, v.depth, v.first_token, v.tokens, table, start
    )


@compiled
def _build(data, lengths):  # type: ignore[no-untyped-def]
    num_tokens = len(lengths)
    longest = 0
    for t in range(num_tokens):
        longest = max(longest, lengths[t])
    byte = np.zeros(len(data) + 1, np.uint8)
    end = np.zeros(len(data) + 1, np.int32)
    depth = np.zeros(len(data) + 1, np.int32)
    first_token = np.zeros(len(data) + 2, np.int32)
    path = np.zeros(longest + 1, np.int32)
    num_nodes, top = 1, 0
    offset = before = 0
    for t in range(num_tokens):
        shared = 0
        while (
            shared < top and shared < lengths[t] and data[before + shared] == data[offset + shared]
        ):
            shared += 1
        while top > shared:
            end[path[top]] = num_nodes
            top -= 1
        while top < lengths[t]:
            byte[num_nodes] = data[offset + top]
            top += 1
            depth[num_nodes] = top
            path[top] = num_nodes
            first_token[num_nodes] = t
            num_nodes += 1
        before = offset
        offset += lengths[t]
    while top >= 0:
        end[path[top]] = num_nodes
        top -= 1
    first_token[num_nodes] = num_tokens
    # A node's tokens come before those of its children: its first child says where they end.
    return byte[:num_nodes], end[:num_nodes], depth[:num_nodes], first_token[: num_nodes + 1]


@compiled
def _mark_children(nodes, byte, end, present):  # type: ignore[no-untyped-def]
    for node in nodes:
        child = node + 1
        while child < end[node]:
            present[byte[child]] = True
            child = end[child]


@compiled
def _children(nodes, byte, end, wanted):  # type: ignore[no-untyped-def]
    found = np.empty(len(nodes), np.int32)
    count = 0
    for node in nodes:
        child = node + 1
        while child < end[node] and byte[child] < wanted:
            child = end[child]
        if child < end[node] and byte[child] == wanted:
            found[count] = child
            count += 1
    return found[:count].copy()


@compiled
def _tokens_at(nodes, first_token, tokens):  # type: ignore[no-untyped-def]
    count = 0
    for node in nodes:
        count += first_token[node + 1] - first_token[node]
    ids = np.empty(count, np.int32)
    count = 0
    for node in nodes:
        for t in range(first_token[node], first_token[node + 1]):
            ids[count] = tokens[t]
            count += 1
    return ids


@compiled
def _set_bits(ids, row):  # type: ignore[no-untyped-def]
    """Set bit t of `row`, uint32 words, for every t of `ids`."""
    for t in ids:
        row[t >> 5] |= np.uint32(1) << np.uint32(t & 31)


@compiled
def or_words(row, words, bits):  # type: ignore[no-untyped-def]
    """Set the `bits` of some `words` of a row."""
    for i in range(len(words)):
        row[words[i]] |= bits[i]


@compiled
def _grown(array, count):  # type: ignore[no-untyped-def]
    if count < len(array):
        return array
    longer = np.empty(2 * len(array), array.dtype)
    longer[:count] = array
    return longer


@compiled
def _walk_table(  # type: ignore[no-untyped-def]
    nodes, byte, end, depth, first_token, tokens, table, classes, accepting, start, row, leaving
):
    """Sets the bits of legal tokens in `row`; returns how many, and how many nodes leave."""
    states = np.empty(_DEEPEST, np.int32)
    flat = table.ravel()
    num_classes = table.shape[1]
    num_ids = num_leaving = 0
    for root in nodes:
        above = depth[root]
        states[0] = start
        node, stop = root + 1, end[root]
        while node < stop:
            level = depth[node] - above
            state = flat[states[level - 1] * num_classes + classes[byte[node]]]
            if state < 0 or level >= _DEEPEST - 1:
                node = end[node]
                continue
            states[level] = state
            for t in range(first_token[node], first_token[node + 1]):
                token = tokens[t]
                row[token >> 5] |= np.uint32(1) << np.uint32(token & 31)
                num_ids += 1
            if accepting[state] and end[node] > node + 1:
                leaving[num_leaving] = node
                num_leaving += 1
            node += 1
    return num_ids, num_leaving


@compiled
def _ids_in(row, count):  # type: ignore[no-untyped-def]
    """The bits that are set in `row`, `count` of them."""
    ids = np.empty(count, np.int32)
    found = 0
    for word in range(len(row)):
        bits = row[word]
        if bits:
            for bit in range(32):
                if bits >> np.uint32(bit) & np.uint32(1):
                    ids[found] = word * 32 + bit
                    found += 1
    return ids[:found]


@compiled
def _walk_items(nodes, byte, end, depth, first_token, tokens, table, start):  # type: ignore[no-untyped-def]
    states = np.empty(_DEEPEST, np.int32)
    items = np.empty(_DEEPEST, np.int16)
    ids = np.empty(64, np.int32)
    begun = np.empty(64, np.int16)
    leaving = np.empty(64, np.int32)
    completed = np.empty(64, np.int16)
    num_ids = num_leaving = 0
    for root in nodes:
        above = depth[root]
        states[0] = start
        items[0] = 0
        node = root + 1
        while node < end[root]:
            level = depth[node] - above
            state = table[states[level - 1], byte[node]]
            if state == -1 or level >= _DEEPEST - 1:
                node = end[node]
                continue
            if state == -2:
                leaving = _grown(leaving, num_leaving)
                completed = _grown(completed, num_leaving)
                leaving[num_leaving] = node
                completed[num_leaving] = items[level - 1]
                num_leaving += 1
                node = end[node]
                continue
            states[level] = state
            items[level] = items[level - 1] + (state == 0)
            for t in range(first_token[node], first_token[node + 1]):
                ids = _grown(ids, num_ids)
                begun = _grown(begun, num_ids)
                ids[num_ids] = tokens[t]
                begun[num_ids] = items[level] + (state != 0)
                num_ids += 1
            node += 1
    return (
        ids[:num_ids].copy(),
        begun[:num_ids].copy(),
        leaving[:num_leaving].copy(),
        completed[:num_leaving].copy(),
    )
