"""Transition tables of automata over bytes: classes of bytes, minimization, products.

Owns the loops over tables, compiled by numba. Pure. Elements are copied one by one: for a slice
that is assigned to a slice, numba compiles four seconds of checks and messages.

A table is int32 (states, columns); -1 is no transition. Columns are bytes, or classes of bytes
that no state distinguishes.
"""

from __future__ import annotations

from functools import partial

import numpy as np
from numpy.typing import NDArray

from sgl_vllm.jit import compiled

_without_gil = partial(compiled, nogil=True)
"""For loops that take up to seconds for a request's pattern."""


def byte_set(flags: NDArray[np.bool_]) -> int:
    """The flagged bytes, of (256,) flags, as bits: bit b for byte b."""
    return int.from_bytes(np.packbits(flags, bitorder="little").tobytes(), "little")


@compiled
def byte_classes(table):  # type: ignore[no-untyped-def]
    """Group the 256 bytes into classes: bytes with equal columns share one.

    Returns: the class of each byte, and the first byte of each class.

    Cost: one pass over the table, and a search for each class found.
    """
    classes = np.zeros(256, np.int32)
    first = np.zeros(256, np.int32)
    count = 1
    values = np.empty(256, np.int32)
    parents = np.empty(256, np.int32)
    for state in range(len(table)):
        splits = False
        for byte in range(256):
            if table[state, byte] != table[state, first[classes[byte]]]:
                splits = True
                break
        if not splits:
            continue
        found = 0
        fresh = np.empty(256, np.int32)
        for byte in range(256):
            new = -1
            for c in range(found):
                if parents[c] == classes[byte] and values[c] == table[state, byte]:
                    new = c
                    break
            if new < 0:
                new = found
                parents[new] = classes[byte]
                values[new] = table[state, byte]
                first[new] = byte
                found += 1
            fresh[byte] = new
        for byte in range(256):
            classes[byte] = fresh[byte]
        count = found
    return classes, first[:count].copy()


@compiled
def distances(table, accepting):  # type: ignore[no-untyped-def]
    """How many transitions each state is from acceptance.

    Returns: the fewest, -1 if there is no way; and the most, -1 if there is no limit.
    """
    num_states, num_columns = table.shape
    counts = np.zeros(num_states + 1, np.int64)
    for state in range(num_states):
        for c in range(num_columns):
            if table[state, c] >= 0:
                counts[table[state, c] + 1] += 1
    begin = np.cumsum(counts)
    sources = np.empty(begin[-1], np.int32)
    filled = begin[:-1].copy()
    for state in range(num_states):
        for c in range(num_columns):
            target = table[state, c]
            if target >= 0:
                sources[filled[target]] = state
                filled[target] += 1
    fewest = np.full(num_states, -1, np.int32)
    queue = np.empty(num_states, np.int32)
    count, next_ = 0, 0
    for state in range(num_states):
        if accepting[state]:
            fewest[state] = 0
            queue[count] = state
            count += 1
    while next_ < count:
        state = queue[next_]
        next_ += 1
        for i in range(begin[state], begin[state + 1]):
            source = sources[i]
            if fewest[source] < 0:
                fewest[source] = fewest[state] + 1
                queue[count] = source
                count += 1
    most = np.full(num_states, -1, np.int32)
    num_left = np.zeros(num_states, np.int32)  # transitions, but those that lead nowhere
    longest = np.zeros(num_states, np.int32)
    count, next_ = 0, 0
    for state in range(num_states):
        for c in range(num_columns):
            target = table[state, c]
            if target >= 0 and fewest[target] >= 0:
                num_left[state] += 1
        if not num_left[state] and fewest[state] >= 0:
            queue[count] = state
            count += 1
    while next_ < count:
        state = queue[next_]
        next_ += 1
        most[state] = longest[state]
        for i in range(begin[state], begin[state + 1]):
            source = sources[i]
            longest[source] = max(longest[source], most[state] + 1)
            num_left[source] -= 1
            if not num_left[source]:
                queue[count] = source
                count += 1
    return fewest, most


@_without_gil
def equal_blocks(table, block):  # type: ignore[no-untyped-def]
    """Group the states into blocks that accept the same texts: Moore's refinement. In each round
    states separate that lead to different blocks.

    Args:
        block: int64, of each state; states in different ones do not accept the same texts. From 0
            on.

    Returns: the block of each state, and the number of blocks.

    Cost: a visit to all transitions in each round. Chains take a round for each of their states,
        unless `block` tells these apart.
    """
    num_states, num_columns = table.shape
    size = 16
    while size < 2 * num_states:
        size *= 2
    numbers = np.empty(size, np.int64)  # a hash table of blocks
    first = np.empty(num_states, np.int64)
    count = block.max() + 1
    while True:
        numbers[:] = -1
        fresh = np.empty(num_states, np.int64)
        found = 0
        for state in range(num_states):
            key = block[state]
            for c in range(num_columns):
                target = table[state, c]
                key = key * 0x5851F42D4C957F2D + (block[target] + 1 if target >= 0 else 0)
            slot = (key ^ (key >> 32)) & (size - 1)
            while numbers[slot] >= 0 and not _leads_alike(
                table, block, state, first[numbers[slot]]
            ):
                slot = (slot + 1) & (size - 1)
            if numbers[slot] < 0:
                numbers[slot] = found
                first[found] = state
                found += 1
            fresh[state] = numbers[slot]
        block = fresh
        if found == count:
            return block, count
        count = found


@compiled
def _leads_alike(table, block, a, b):  # type: ignore[no-untyped-def]
    """Whether two states of one block lead to the same blocks."""
    if block[a] != block[b]:
        return False
    for c in range(table.shape[1]):
        to_a, to_b = table[a, c], table[b, c]
        if to_a != to_b and (to_a < 0 or to_b < 0 or block[to_a] != block[to_b]):
            return False
    return True


@compiled
def reachable(table, start):  # type: ignore[no-untyped-def]
    """The reachable states, `start` first, in order of discovery; and the number of each state in
    that order, -1 for the others."""
    number = np.full(len(table), -1, np.int32)
    order = np.empty(len(table), np.int32)
    order[0] = start
    number[start] = 0
    count, next_ = 1, 0
    while next_ < count:
        state = order[next_]
        next_ += 1
        for c in range(table.shape[1]):
            target = table[state, c]
            if target >= 0 and number[target] < 0:
                number[target] = count
                order[count] = target
                count += 1
    return order[:count].copy(), number


def merged(
    table: NDArray[np.int32], accepting: NDArray[np.bool_]
) -> tuple[NDArray[np.int32], NDArray[np.bool_], NDArray[np.int64]]:
    """Equal states made one, and transitions to states that lead nowhere removed.

    Returns: the table, which states accept, and the new number of each state, -1 for those that
        lead nowhere.
    """
    fewest, most = distances(table, accepting)
    table = np.where((table >= 0) & (fewest[table] >= 0), table, -1)
    # States at different distances from acceptance do not accept the same texts.
    _, block = np.unique(fewest.astype(np.int64) * (len(table) + 1) + most, return_inverse=True)
    block, count = equal_blocks(table, block)
    representative = np.empty(count, np.int64)
    representative[block] = np.arange(len(block))
    smaller = table[representative]
    smaller = np.where(smaller >= 0, block[smaller], -1).astype(np.int32)
    return smaller, accepting[representative], np.where(fewest >= 0, block, -1)


def minimal(
    table: NDArray[np.int32], accepting: NDArray[np.bool_], start: int = 0
) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
    """As `merged`, with only the states that `start` leads to. It is the first one."""
    smaller, flags, number = merged(table, accepting)
    if number[start] < 0:  # nothing is accepted
        return np.full((1, table.shape[1]), -1, np.int32), np.zeros(1, np.bool_)
    order, position = reachable(smaller, int(number[start]))
    smaller = smaller[order]
    return np.where(smaller >= 0, position[smaller], -1).astype(np.int32), flags[order]


@compiled
def _twice_as_long(rows):  # type: ignore[no-untyped-def]
    longer = np.empty((2 * len(rows), rows.shape[1]), rows.dtype)
    for i in range(len(rows)):
        for j in range(rows.shape[1]):
            longer[i, j] = rows[i, j]
    return longer


@_without_gil
def product(table_a, start_a, table_b, start_b, needs_b, most):  # type: ignore[no-untyped-def]
    """The pairs of states that two tables with the same columns reach together.

    Args:
        needs_b: whether a pair ends where `b` does; otherwise it continues with -1 for `b`.
        most: the limit of pairs.

    Returns: int32 (pairs, 2) with the start first, and the table over them; no pairs at all if
        there would be more than `most`.
    """
    num_columns = table_a.shape[1]
    number = np.full((len(table_a), len(table_b) + 1), -1, np.int32)
    pairs = np.empty((64, 2), np.int32)
    table = np.empty((64, num_columns), np.int32)
    pairs[0, 0], pairs[0, 1] = start_a, start_b
    number[start_a, start_b + 1] = 0
    count, next_ = 1, 0
    while next_ < count:
        a, b = pairs[next_, 0], pairs[next_, 1]
        for c in range(num_columns):
            to_a = table_a[a, c]
            to_b = table_b[b, c] if b >= 0 else -1
            if to_a < 0 or (needs_b and to_b < 0):
                table[next_, c] = -1
                continue
            if number[to_a, to_b + 1] < 0:
                if count == most:
                    return pairs[:0].copy(), table[:0].copy()
                if count == len(pairs):
                    pairs, table = _twice_as_long(pairs), _twice_as_long(table)
                pairs[count, 0], pairs[count, 1] = to_a, to_b
                number[to_a, to_b + 1] = count
                count += 1
            table[next_, c] = number[to_a, to_b + 1]
        next_ += 1
    return pairs[:count].copy(), table[:count].copy()
