"""Walks over a vocabulary's trie along the transitions of an automaton, compiled by numba.

Owns no state: arrays in, arrays out. `vocabulary.py` describes the arrays of the trie. As in
`trie_nodes.py`, each loop states how far it writes.
"""

from __future__ import annotations

import numpy as np

from sgl_vllm.fsm.trie_nodes import extent
from sgl_vllm.jit import compiled


@compiled
def walk_apart(  # type: ignore[no-untyped-def]
    nodes,
    byte,
    end,
    depth,
    first_token,
    tokens,
    deepest,
    table,
    classes,
    accepting,
    start,
    words,
    leaving,
):
    """`vocabulary.walk` from nodes of which none is below another: each node below them is reached
    in one state. Sets the bits of legal tokens in `words`, and writes to `leaving`.

    Args:
        deepest: the largest depth in the trie.

    Returns: how many tokens, how many nodes, and how many transitions were looked up.

    Bounds: a node below `nodes` is visited at most once, and `leaving` has room for all of these. A
    path has as many states as nodes.
    """
    num_below, is_nested = extent(nodes, end)
    assert len(leaving) >= num_below and not is_nested and 0 <= start < len(accepting)
    states = np.empty(deepest + 1, np.int32)
    flat = table.ravel()
    num_classes = table.shape[1]
    num_ids = num_leaving = num_steps = 0
    for root in nodes:
        states[depth[root]] = start
        node, stop = root + 1, end[root]
        while node < stop:
            num_steps += 1
            level = depth[node]
            state = flat[states[level - 1] * num_classes + classes[byte[node]]]
            if state < 0:
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
    return num_ids, num_leaving, num_steps


@compiled
def walk_nested(  # type: ignore[no-untyped-def]
    nodes,
    byte,
    end,
    depth,
    first_token,
    tokens,
    deepest,
    table,
    classes,
    accepting,
    start,
    words,
    leaving,
):
    """As `walk_apart`, from nodes some of which are below others. Each of `nodes` above a node may
    lead to it in another state. All these states advance together, so each node is visited once.

        path      o - o - o - o      the two inner nodes are in `nodes`
        states        s   t   u      from the first one
                          s   t      from the second one

    Bounds: as `walk_apart`. A node has at most as many states as the automaton, and at most as many
    as there are nodes above it.
    """
    assert len(leaving) >= extent(nodes, end)[0] and 0 <= start < len(accepting)
    states = np.empty((deepest + 2) * min(len(accepting), deepest + 1), np.int32)
    begin = np.zeros(deepest + 3, np.int64)  # level d has states[begin[d + 1] : begin[d + 2]]
    path = np.zeros(deepest + 1, np.int32)  # the node of each level that was visited last
    latest = np.full(len(accepting), -1, np.int32)  # the node that a state was reached at last
    flat = table.ravel()
    num_classes = table.shape[1]
    num_ids = num_leaving = num_steps = num_entered = 0
    node = nodes[0]
    level = depth[node]
    while node < len(byte):
        column = classes[byte[node]]
        first = top = begin[level + 1]
        num_steps += 1 + first - begin[level]
        leaves = False
        for i in range(begin[level], first):
            state = flat[states[i] * num_classes + column]
            if state >= 0 and latest[state] != node:
                latest[state] = node
                states[top] = state
                top += 1
                leaves |= accepting[state]
        if top > first:
            for t in range(first_token[node], first_token[node + 1]):
                token = tokens[t]
                words[token >> 5] |= np.uint32(1) << np.uint32(token & 31)
                num_ids += 1
            if leaves and end[node] > node + 1:
                leaving[num_leaving] = node
                num_leaving += 1
        if num_entered < len(nodes) and nodes[num_entered] == node:
            num_entered += 1
            if latest[start] != node:
                latest[start] = node
                states[top] = start
                top += 1
        begin[level + 2] = top
        path[level] = node
        node += 1
        while node < len(byte):
            level = depth[node]
            if begin[level] < begin[level + 1]:
                break  # the node above has states
            above = path[level - 1]
            if num_entered < len(nodes) and nodes[num_entered] < end[above]:
                node = nodes[num_entered]
                for between in range(level, depth[node]):
                    begin[between + 2] = begin[between + 1]
                    path[between] = above
                level = depth[node]
                break
            node = end[above]
    return num_ids, num_leaving, num_steps


@compiled
def _grown(array, count):  # type: ignore[no-untyped-def]
    """The array, or a longer one, that has room for one more than `count` values."""
    if count < len(array):
        return array
    longer = np.empty(2 * len(array), array.dtype)
    for i in range(count):  # not a slice: see tables.py
        longer[i] = array[i]
    return longer


@compiled
def walk_both(  # type: ignore[no-untyped-def]
    byte, end, depth, first_token, tokens, deepest, table, classes, accepting, start, other, most
):
    """`vocabulary.walk_difference`: where walks from the root differ that begin in two states.

    Returns: the tokens; the nodes; whether that is all, because no more than `most` nodes had to be
        visited; and how many were.

    Bounds: the states of a path are as many as its nodes. What is found grows as needed.
    """
    assert 0 <= start < len(accepting) and 0 <= other < len(accepting)
    states = np.empty(deepest + 1, np.int32)
    others = np.empty(deepest + 1, np.int32)
    states[0], others[0] = start, other
    ids = np.empty(64, np.int32)
    leaving = np.empty(64, np.int32)
    num_ids = num_leaving = num_visited = 0
    node = 1
    while node < end[0]:
        num_visited += 1
        if num_visited > most:
            return ids[:0].copy(), leaving[:0].copy(), False, num_visited
        level = depth[node]
        column = classes[byte[node]]
        state = table[states[level - 1], column] if states[level - 1] >= 0 else -1
        there = table[others[level - 1], column] if others[level - 1] >= 0 else -1
        if state == there:
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
    return ids[:num_ids].copy(), leaving[:num_leaving].copy(), True, num_visited


@compiled
def walk_items(  # type: ignore[no-untyped-def]
    nodes, byte, end, depth, first_token, tokens, deepest, table, start
):
    """`vocabulary.walk_counting`. A node is visited once for each of `nodes` above it, because the
    counts differ.

    Bounds: the states of a path are as many as its nodes. What is found grows as needed.
    """
    assert 0 <= start < len(table) and table.shape[1] == 256
    states = np.empty(deepest + 1, np.int32)
    items = np.empty(deepest + 1, np.int32)
    ids = np.empty(64, np.int32)
    begun = np.empty(64, np.int32)
    leaving = np.empty(64, np.int32)
    completed = np.empty(64, np.int32)
    num_ids = num_leaving = num_steps = 0
    for root in nodes:
        above = depth[root]
        states[above] = start
        items[above] = 0
        node = root + 1
        while node < end[root]:
            num_steps += 1
            level = depth[node]
            state = table[states[level - 1], byte[node]]
            if state == -1:
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
        num_steps,
    )
