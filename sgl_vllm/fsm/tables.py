"""Transition tables of automata over bytes: minimization and products.

Owns the loops over tables, compiled by numba. Pure. Elements are copied one by one: for a slice
that is assigned to a slice, numba compiles four seconds of checks and messages.

A table is int32 (states, columns); -1 is no transition. Columns are bytes, or classes of bytes
that no state distinguishes.

numba checks no index, so each loop states how far it writes and why. `check_table` asserts for each
new table that its transitions stay inside it.
"""

from __future__ import annotations

from functools import partial

import numpy as np
from numpy.typing import NDArray

from sgl_vllm.jit import compiled

without_gil = partial(compiled, nogil=True)
"""For loops that take up to some tenths of a second for a request's pattern."""

MAX_VISITS = 300_000_000
"""Transitions that are looked at to minimize an automaton, in about 0.3 s."""


def byte_set(flags: NDArray[np.bool_]) -> int:
    """The flagged bytes, of (256,) flags, as bits: bit b for byte b."""
    return int.from_bytes(np.packbits(flags, bitorder="little").tobytes(), "little")


@compiled
def check_table(table, accepting, classes):  # type: ignore[no-untyped-def]
    """Assert that all transitions lead to states of the table, and all bytes have columns."""
    num_states, num_columns = table.shape
    assert len(accepting) == num_states and num_states > 0 and len(classes) == 256
    highest, lowest = np.int32(-1), np.int32(-1)
    for state in range(num_states):
        for c in range(num_columns):
            highest, lowest = max(highest, table[state, c]), min(lowest, table[state, c])
    assert lowest >= -1 and highest < num_states
    for byte in range(256):
        assert 0 <= classes[byte] < num_columns


@compiled
def column_classes(table):  # type: ignore[no-untyped-def]
    """Group the columns into classes: equal ones share one.

    Returns: int32, the class of each column, and the first column of each class.

    Cost: one pass over the table, and a search for each class found.

    Bounds: there are at most as many classes as columns.
    """
    num_columns = table.shape[1]
    classes = np.zeros(num_columns, np.int32)
    first = np.zeros(num_columns, np.int32)
    count = 1
    values = np.empty(num_columns, np.int32)
    parents = np.empty(num_columns, np.int32)
    fresh = np.empty(num_columns, np.int32)
    for state in range(len(table)):
        if count == num_columns:
            break
        splits = False
        for column in range(num_columns):
            if table[state, column] != table[state, first[classes[column]]]:
                splits = True
                break
        if not splits:
            continue
        found = 0
        for column in range(num_columns):
            new = -1
            for c in range(found):
                if parents[c] == classes[column] and values[c] == table[state, column]:
                    new = c
                    break
            if new < 0:
                new = found
                parents[new] = classes[column]
                values[new] = table[state, column]
                first[new] = column
                found += 1
            fresh[column] = new
        for column in range(num_columns):
            classes[column] = fresh[column]
        count = found
    return classes, first[:count].copy()


@compiled
def _distances(table, accepting):  # type: ignore[no-untyped-def]
    """How many transitions each state is from acceptance.

    Returns: the fewest, -1 if there is no way; and the most, -1 if there is no limit.

    Bounds: sources are counted by target before they are written. A state is queued once: for the
    fewest, when it gets a distance; for the most, when its last transition has been counted.
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


@without_gil
def _equal_blocks(table, block):  # type: ignore[no-untyped-def]
    """Group the states into blocks that accept the same texts: Moore's refinement. In each round
    states separate that lead to different blocks.

    Args:
        block: int64, of each state; states in different ones do not accept the same texts.

    Returns: the block of each state, and the number of blocks, which is 0 if it would take more
        than `MAX_VISITS`.

    Cost: a visit to all transitions in each round. Chains take a round for each of their states,
        unless `block` tells these apart.

    Bounds: there are at most as many blocks as states, and twice as many slots.
    """
    num_states, num_columns = table.shape
    numbers = _empty_slots(num_states)  # a hash table of blocks
    first = np.empty(num_states, np.int64)
    count = 0
    num_visits = 0
    while True:
        num_visits += num_states * num_columns
        if num_visits > MAX_VISITS:
            return block, 0
        numbers[:] = -1
        fresh = np.empty(num_states, np.int64)
        found = 0
        for state in range(num_states):
            key = block[state]
            for c in range(num_columns):
                target = table[state, c]
                key = key * 0x5851F42D4C957F2D + (block[target] + 1 if target >= 0 else 0)
            slot = (key ^ (key >> 32)) & (len(numbers) - 1)
            while numbers[slot] >= 0 and not _leads_alike(
                table, block, state, first[numbers[slot]]
            ):
                slot = (slot + 1) & (len(numbers) - 1)
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
def _empty_slots(most):  # type: ignore[no-untyped-def]
    """A hash table of -1 that `most` entries fill by half at most, so that every search ends."""
    size = 16
    while size < 2 * most:
        size *= 2
    return np.full(size, -1, np.int32)


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
def _reachable(table, start):  # type: ignore[no-untyped-def]
    """The reachable states, `start` first, in order of discovery; and the number of each state in
    that order, -1 for the others.

    Bounds: each state is found once.
    """
    assert 0 <= start < len(table)
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


@without_gil
def merged(table, accepting):  # type: ignore[no-untyped-def]
    """Equal states made one, and transitions to states that lead nowhere removed.

    Returns: the table, which states accept, and int64, the new number of each state, -1 for those
        that lead nowhere. The table has no rows if it would take more than `MAX_VISITS`.

    Bounds: blocks are numbered from 0 to `count`.
    """
    num_states, num_columns = table.shape
    fewest, most = _distances(table, accepting)
    alive = np.empty((num_states, num_columns), np.int32)
    block = np.empty(num_states, np.int64)
    for state in range(num_states):
        for c in range(num_columns):
            target = table[state, c]
            alive[state, c] = target if target >= 0 and fewest[target] >= 0 else -1
        # States at different distances from acceptance do not accept the same texts.
        block[state] = np.int64(fewest[state]) * (num_states + 1) + most[state]
    block, count = _equal_blocks(alive, block)
    smaller = np.empty((count, num_columns), np.int32)
    flags = np.empty(count, np.bool_)
    if not count:
        return smaller, flags, block
    for state in range(num_states):
        flags[block[state]] = accepting[state]
        for c in range(num_columns):
            target = alive[state, c]
            smaller[block[state], c] = block[target] if target >= 0 else -1
    for state in range(num_states):
        if fewest[state] < 0:
            block[state] = -1
    return smaller, flags, block


@without_gil
def minimal(table, accepting, start):  # type: ignore[no-untyped-def]
    """As `merged`, with only the states that `start` leads to, which is the first one; and equal
    columns made one.

    Returns: the table, which states accept, and int32, the new number of each column.

    Bounds: all arrays have the size of what was counted.
    """
    assert 0 <= start < len(table)
    smaller, flags, number = merged(table, accepting)
    if not len(smaller):
        return smaller, flags, np.zeros(table.shape[1], np.int32)
    first = number[start]
    if first < 0:  # nothing is accepted
        smaller, flags = np.full((1, table.shape[1]), -1, np.int32), np.zeros(1, np.bool_)
        first = np.int64(0)
    order, position = _reachable(smaller, first)
    columns, firsts = column_classes(smaller)
    found = np.empty((len(order), len(firsts)), np.int32)
    final = np.empty(len(order), np.bool_)
    for i in range(len(order)):
        final[i] = flags[order[i]]
        for c in range(len(firsts)):
            target = smaller[order[i], firsts[c]]
            found[i, c] = position[target] if target >= 0 else -1
    return found, final, columns


@without_gil
def product(table_a, classes_a, start_a, table_b, classes_b, start_b, needs_b, most):  # type: ignore[no-untyped-def]
    """The pairs of states that two tables over classes of bytes reach together.

    Args:
        classes_a, classes_b: the class of each byte.
        needs_b: whether a pair ends where `b` does; otherwise it continues with -1 for `b`.
        most: the limit of pairs.

    Returns: int32 (pairs, 2) with the start first; the table over them; and int32, the class of
        each byte in it. There are no pairs if there would be more than `most`.

    Bounds: at most `most` pairs are added, which is checked for each, and no more than there are
    pairs of states. A byte brings at most one more column.
    """
    assert most > 0 and 0 <= start_a < len(table_a) and 0 <= start_b < len(table_b)
    joint = np.full((table_a.shape[1], table_b.shape[1]), -1, np.int32)
    columns = np.empty((256, 2), np.int32)
    classes = np.empty(256, np.int32)
    num_columns = 0
    for byte in range(256):
        a, b = classes_a[byte], classes_b[byte]
        if joint[a, b] < 0:
            joint[a, b] = num_columns
            columns[num_columns, 0], columns[num_columns, 1] = a, b
            num_columns += 1
        classes[byte] = joint[a, b]
    room = min(most, len(table_a) * (len(table_b) + 1))
    slots = _empty_slots(room)  # a hash table of pairs
    pairs = np.empty((room, 2), np.int32)
    table = np.empty((room, num_columns), np.int32)
    pairs[0, 0], pairs[0, 1] = start_a, start_b
    slots[_slot(start_a, start_b, slots, pairs)] = 0
    count, next_ = 1, 0
    while next_ < count:
        state_a, state_b = pairs[next_, 0], pairs[next_, 1]
        for c in range(num_columns):
            to_a = table_a[state_a, columns[c, 0]]
            to_b = table_b[state_b, columns[c, 1]] if state_b >= 0 else -1
            if to_a < 0 or (needs_b and to_b < 0):
                table[next_, c] = -1
                continue
            slot = _slot(to_a, to_b, slots, pairs)
            if slots[slot] < 0:
                if count == most:
                    return pairs[:0].copy(), table[:0].copy(), classes
                pairs[count, 0], pairs[count, 1] = to_a, to_b
                slots[slot] = count
                count += 1
            table[next_, c] = slots[slot]
        next_ += 1
    return pairs[:count].copy(), table[:count].copy(), classes


@compiled
def _slot(a, b, slots, pairs):  # type: ignore[no-untyped-def]
    """Where in the hash table a pair is, or will be."""
    key = np.int64(a) * 0x5851F42D4C957F2D + np.int64(b) * 0x14057B7EF767814F
    slot = (key ^ (key >> 31)) & (len(slots) - 1)
    while slots[slot] >= 0 and (pairs[slots[slot], 0] != a or pairs[slots[slot], 1] != b):
        slot = (slot + 1) & (len(slots) - 1)
    return slot
