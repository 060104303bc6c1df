"""The loops over a vocabulary's trie, compiled by numba.

Owns no state: arrays in, arrays out. `vocabulary.py` describes the arrays of the trie.
"""

from __future__ import annotations

import numpy as np

from sgl_vllm.jit import compiled

MAX_TOKEN_BYTES = 1024
"""Bitmasks do not offer longer tokens."""


@compiled
def build_trie(data, lengths):  # type: ignore[no-untyped-def]
    """The trie of tokens in the order of their bytes, which stand one after another in `data`.

    Returns: byte, end, depth and first token of each node.
    """
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
    # A node's tokens come before those of its children, so the next node says where they end.
    return byte[:num_nodes], end[:num_nodes], depth[:num_nodes], first_token[: num_nodes + 1]


@compiled
def mark_children(nodes, byte, end, present):  # type: ignore[no-untyped-def]
    """Flag the bytes that lead to a child of any of `nodes`."""
    for node in nodes:
        child = node + 1
        while child < end[node]:
            present[byte[child]] = True
            child = end[child]


@compiled
def children(nodes, byte, end, wanted):  # type: ignore[no-untyped-def]
    """The children of `nodes` that one byte leads to."""
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
    """The tokens that end at `nodes`."""
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
def set_bits(ids, words):  # type: ignore[no-untyped-def]
    """Set bit t of a bitmask's uint32 `words` for every token t of `ids`."""
    for t in ids:
        words[t >> 5] |= np.uint32(1) << np.uint32(t & 31)


@compiled
def packed_bits(ids, words):  # type: ignore[no-untyped-def]
    """The bits of `ids` as the numbers of the words that have some, and these words.

    Args:
        words: a bitmask without any bits, to work in; it is left so.
    """
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
    """Add the bits of `values` to the words of a bitmask with these `numbers`."""
    for i in range(len(numbers)):
        words[numbers[i]] |= values[i]


@compiled
def _grown(array, count):  # type: ignore[no-untyped-def]
    if count < len(array):
        return array
    longer = np.empty(2 * len(array), array.dtype)
    for i in range(count):  # not a slice: see tables.py
        longer[i] = array[i]
    return longer


@compiled
def walk_table(  # type: ignore[no-untyped-def]
    nodes, byte, end, depth, first_token, tokens, table, classes, accepting, start, words, leaving
):
    """`vocabulary.walk`: sets the bits of legal tokens in `words` and writes to `leaving`.

    Returns: how many tokens, how many nodes.
    """
    states = np.empty(MAX_TOKEN_BYTES, np.int32)
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
            if state < 0 or level >= MAX_TOKEN_BYTES - 1:
                node = end[node]
                continue
            states[level] = state
            for t in range(first_token[node], first_token[node + 1]):
                token = tokens[t]
                words[token >> 5] |= np.uint32(1) << np.uint32(token & 31)
                num_ids += 1
            if accepting[state] and end[node] > node + 1:
                leaving[num_leaving] = node
                num_leaving += 1
            node += 1
    return num_ids, num_leaving


@compiled
def walk_both(  # type: ignore[no-untyped-def]
    byte, end, depth, first_token, tokens, table, classes, accepting, start, other, most
):
    """`vocabulary.walk_difference`: where walks from the root differ that begin in two states.

    Returns: the tokens, the nodes, and whether that is all: no more than `most` nodes were visited.
    """
    states = np.empty(MAX_TOKEN_BYTES, np.int32)
    others = np.empty(MAX_TOKEN_BYTES, np.int32)
    states[0], others[0] = start, other
    ids = np.empty(64, np.int32)
    leaving = np.empty(64, np.int32)
    num_ids = num_leaving = num_visited = 0
    node = 1
    while node < end[0]:
        num_visited += 1
        if num_visited > most:
            return ids[:0].copy(), leaving[:0].copy(), False
        level = depth[node]
        column = classes[byte[node]]
        state = table[states[level - 1], column] if states[level - 1] >= 0 else -1
        there = table[others[level - 1], column] if others[level - 1] >= 0 else -1
        if state == there or level >= MAX_TOKEN_BYTES - 1:
            node = end[node]
            continue
        states[level], others[level] = state, there
        if (state < 0) != (there < 0):
            for t in range(first_token[node], first_token[node + 1]):
                ids = _grown(ids, num_ids)
                ids[num_ids] = tokens[t]
                num_ids += 1
        leaves = state >= 0 and accepting[state]
        if leaves != (there >= 0 and accepting[there]) and end[node] > node + 1:
            leaving = _grown(leaving, num_leaving)
            leaving[num_leaving] = node
            num_leaving += 1
        node += 1
    return ids[:num_ids].copy(), leaving[:num_leaving].copy(), True


@compiled
def ids_in(words, count):  # type: ignore[no-untyped-def]
    """The tokens whose bits are set, `count` of them."""
    ids = np.empty(count, np.int32)
    found = 0
    for number in range(len(words)):
        bits = words[number]
        if bits:
            for bit in range(32):
                if bits >> np.uint32(bit) & np.uint32(1):
                    ids[found] = number * 32 + bit
                    found += 1
    return ids[:found]


@compiled
def walk_items(nodes, byte, end, depth, first_token, tokens, table, start):  # type: ignore[no-untyped-def]
    """`vocabulary.walk_counting`."""
    states = np.empty(MAX_TOKEN_BYTES, np.int32)
    items = np.empty(MAX_TOKEN_BYTES, np.int16)
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
            if state == -1 or level >= MAX_TOKEN_BYTES - 1:
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
