"""Loops over the nodes of a vocabulary's trie, and over bitmasks, compiled by numba.

Owns how a trie is built, and sets of its nodes. Does not own walks along automata
(`trie_walks.py`), nor any state: arrays in, arrays out. `vocabulary.py` describes the arrays.

numba checks no index. So each loop states how far it writes and why, and asserts its preconditions
before it begins. `make boundscheck` runs all of them with numba's bounds checks.
"""

from __future__ import annotations

import numpy as np

from sgl_vllm.jit import compiled


@compiled
def build_trie(data, lengths):  # type: ignore[no-untyped-def]
    """The trie of tokens in the order of their bytes, which stand one after another in `data`.

    Returns: byte, end, depth and first token of each node.

    Bounds: a node for each byte at most, and the root. A path is as long as the longest token.
    """
    num_tokens = len(lengths)
    longest = total = 0
    for t in range(num_tokens):
        assert lengths[t] >= 0
        longest = max(longest, lengths[t])
        total += lengths[t]
    assert total == len(data)
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
    # A node's tokens come before those of its children, so the next node says where they end.
    return byte[:num_nodes], end[:num_nodes], depth[:num_nodes], first_token[: num_nodes + 1]


@compiled
def children(nodes, byte, end, wanted):  # type: ignore[no-untyped-def]
    """The children of `nodes` that one byte leads to, in the order of `nodes`.

    Bounds: a node has at most one such child.
    """
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
def tokens_at(nodes, first_token, tokens):  # type: ignore[no-untyped-def]
    """The tokens that end at `nodes`.

    Bounds: counted before they are written.
    """
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
def extent(nodes, end):  # type: ignore[no-untyped-def]
    """How many nodes are below `nodes`, each counted once; and whether one of `nodes` is below
    another.

    Args:
        nodes: ascending, distinct.
    """
    count = beyond = 0
    is_nested = False
    for node in nodes:
        if node < beyond:
            is_nested = True
        else:
            count += end[node] - node - 1
            beyond = end[node]
    return count, is_nested


@compiled
def look_below(nodes, byte, end, present):  # type: ignore[no-untyped-def]
    """As `extent`, and flags the bytes that lead to a child of any of `nodes`.

    Bounds: `present` has an entry for each byte.
    """
    assert len(present) == 256
    for node in nodes:
        child = node + 1
        while child < end[node]:
            present[byte[child]] = True
            child = end[child]
    return extent(nodes, end)


@compiled
def joined(known, nodes):  # type: ignore[no-untyped-def]
    """Both together, and those of `nodes` that are not in `known`.

    Bounds: as many as both have, and as many as `nodes`.
    """
    both = np.empty(len(known) + len(nodes), np.int32)
    new = np.empty(len(nodes), np.int32)
    count = num_new = i = 0
    for node in nodes:
        while i < len(known) and known[i] < node:
            both[count] = known[i]
            count += 1
            i += 1
        if i == len(known) or known[i] != node:
            both[count] = node
            count += 1
            new[num_new] = node
            num_new += 1
    while i < len(known):
        both[count] = known[i]
        count += 1
        i += 1
    return both[:count].copy(), new[:num_new].copy()


@compiled
def set_bits(ids, words):  # type: ignore[no-untyped-def]
    """Set bit t of a bitmask's uint32 `words` for every token t of `ids`.

    Bounds: `words` has a bit for each token of the vocabulary.
    """
    for t in ids:
        words[t >> 5] |= np.uint32(1) << np.uint32(t & 31)


@compiled
def packed_bits(ids, words):  # type: ignore[no-untyped-def]
    """The bits of `ids` as the numbers of the words that have some, and these words.

    Args:
        words: a bitmask without any bits, to work in; it is left so.

    Bounds: each token brings at most one more word. The numbers are 16 bits wide.
    """
    assert len(words) <= 1 << 16
    used = np.empty(len(ids), np.int32)
    count = 0
    for t in ids:
        if words[t >> 5] == 0:
            used[count] = t >> 5
            count += 1
        words[t >> 5] |= np.uint32(1) << np.uint32(t & 31)
    numbers = np.empty(count, np.uint16)
    values = np.empty(count, np.uint32)
    for i in range(count):
        numbers[i] = used[i]
        values[i] = words[used[i]]
        words[used[i]] = 0
    return numbers, values


@compiled
def or_words(words, numbers, values):  # type: ignore[no-untyped-def]
    """Add the bits of `values` to the words of a bitmask with these `numbers`.

    Bounds: `numbers` are of words of a bitmask of this size; see `masks.fill`.
    """
    for i in range(len(numbers)):
        words[numbers[i]] |= values[i]


@compiled
def ids_in(words):  # type: ignore[no-untyped-def]
    """The tokens whose bits are set.

    Bounds: counted before they are written.
    """
    count = 0
    for bits in words:
        while bits:
            bits &= bits - np.uint32(1)
            count += 1
    ids = np.empty(count, np.int32)
    found = 0
    for number in range(len(words)):
        bits = words[number]
        if bits:
            for bit in range(32):
                if bits >> np.uint32(bit) & np.uint32(1):
                    ids[found] = number * 32 + bit
                    found += 1
    return ids
