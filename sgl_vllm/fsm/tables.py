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
def _column_classes(table):  # type: ignore[no-untyped-def]
    """Group the columns into classes: equal ones share one.

    Returns: int32, the class of each column, and the first column of each class.

    Bounds: there are at most as many classes as columns.
    """
    num_columns = table.shape[1]
    keys = np.zeros(num_columns, np.int64)
    for state in range(len(table)):
        for c in range(num_columns):
            keys[c] = keys[c] * 0x5851F42D4C957F2D + table[state, c]
    classes = np.zeros(num_columns, np.int32)
    first = np.zeros(num_columns, np.int32)
    count = 0
    for column in range(num_columns):
        own = 0
        while own < count and not (
            keys[first[own]] == keys[column] and _are_equal(table, first[own], column)
        ):
            own += 1
        if own == count:
            first[own] = column
            count += 1
        classes[column] = own
    return classes, first[:count].copy()


@compiled
def _are_equal(table, a, b):  # type: ignore[no-untyped-def]
    """Whether two columns are equal."""
    state = 0
    while state < len(table) and table[state, a] == table[state, b]:
        state += 1
    return state == len(table)


@compiled
def sorted_by(keys, num_keys):  # type: ignore[no-untyped-def]
    """Sort indices by key (counting sort).

    Args:
        keys: of each index, from 0 to `num_keys` - 1.

    Returns: int32 (num_keys + 1,), where the indices of each key begin, and the end; and the
        indices, int32.

    Bounds: indices are counted by key before they are written.
    """
    begin = np.zeros(num_keys + 1, np.int32)
    for key in keys:
        assert 0 <= key < num_keys
        begin[key + 1] += 1
    for key in range(num_keys):
        begin[key + 1] += begin[key]
    filled = begin[:-1].copy()
    order = np.empty(len(keys), np.int32)
    for index in range(len(keys)):
        order[filled[keys[index]]] = index
        filled[keys[index]] += 1
    return begin, order


@compiled
def _equal_states(table, accepting):  # type: ignore[no-untyped-def]
    """Group the states into blocks that accept the same texts (Hopcroft, "An n log n algorithm for
    minimizing states in a finite automaton", 1971).

    Returns: the block of each state, and at the end that of a dead state, which is the target of
        all missing transitions.

    Cost: in proportion to columns times n log n.

    Bounds: there is one state more than in the table. Blocks are not empty, but for the first two,
    and each is pending once. A state is marked once in a pass.
    """
    size = len(table) + 1
    targets = np.full(table.shape[1] * size, size - 1, np.int32)  # of each column and state
    for c in range(table.shape[1]):
        for state in range(len(table)):
            if table[state, c] >= 0:
                targets[c * size + state] = table[state, c]
            targets[c * size + state] += c * size
        targets[c * size + size - 1] += c * size
    begin, sources = sorted_by(targets, len(targets))
    members = np.empty(size, np.int32)  # of all blocks, one behind the other
    position = np.empty(size, np.int32)  # of each state in `members`
    block = np.zeros(size, np.int32)
    middle, end = 0, size
    for state in range(size):
        if state < len(table) and accepting[state]:
            end -= 1
            position[state], block[state] = end, 1
        else:
            position[state] = middle
            middle += 1
        members[position[state]] = state
    first = np.zeros(size + 1, np.int32)  # of each block in `members`
    last = np.zeros(size + 1, np.int32)
    num_marked = np.zeros(size + 1, np.int32)  # its first members: they lead into the splitter
    last[0] = first[1] = middle
    last[1] = size
    count = 2
    pending = np.ones(size + 1, np.int32)
    num_pending = 1
    touched = np.empty(size + 1, np.int32)
    while num_pending:
        num_pending -= 1
        splitter = members[first[pending[num_pending]] : last[pending[num_pending]]].copy()
        for c in range(table.shape[1]):
            num_touched = 0
            for target in splitter:
                for i in range(begin[c * size + target], begin[c * size + target + 1]):
                    source = sources[i] - c * size
                    its = block[source]
                    marked = first[its] + num_marked[its]
                    if not num_marked[its]:
                        touched[num_touched] = its
                        num_touched += 1
                    other = members[marked]
                    members[position[source]], members[marked] = other, source
                    position[other], position[source] = position[source], marked
                    num_marked[its] += 1
            for its in touched[:num_touched]:
                middle = first[its] + num_marked[its]
                num_marked[its] = 0
                if middle == last[its]:
                    continue
                if middle - first[its] < last[its] - middle:  # the smaller part is the new block
                    first[count], last[count] = first[its], middle
                    first[its] = middle
                else:
                    first[count], last[count] = middle, last[its]
                    last[its] = middle
                for i in range(first[count], last[count]):
                    block[members[i]] = count
                pending[num_pending] = count
                num_pending += 1
                count += 1
    return block


@compiled
def empty_slots(most):  # type: ignore[no-untyped-def]
    """A hash table of -1 that `most` entries fill by half at most, so that every search ends."""
    size = 16
    while size < 2 * most:
        size *= 2
    return np.full(size, -1, np.int32)


@without_gil
def minimal(table, accepting, start):  # type: ignore[no-untyped-def]
    """The states that `start` leads to, which is the first one, without those that lead nowhere.
    Equal states are made one, and equal columns.

    Returns: the table, which states accept, and int32, the new number of each column.

    Bounds: there are at most as many blocks as states, and one more. A block is found once.
    """
    assert 0 <= start < len(table)
    num_columns = table.shape[1]
    block = _equal_states(table, accepting)
    nowhere = block[len(table)]
    number = np.full(len(block) + 1, -1, np.int32)  # of each block, in order of discovery
    some = np.empty(len(block) + 1, np.int32)  # a state of each
    rows = np.full((len(block) + 1, num_columns), -1, np.int32)
    number[block[start]], some[0] = 0, start
    count, next_ = 1, 0
    while next_ < count:
        for c in range(num_columns):
            target = table[some[next_], c]
            if target < 0 or block[target] == nowhere:
                continue
            if number[block[target]] < 0:
                number[block[target]], some[count] = count, target
                count += 1
            rows[next_, c] = number[block[target]]
        next_ += 1
    columns, firsts = _column_classes(rows[:count])
    found = np.empty((count, len(firsts)), np.int32)
    final = np.empty(count, np.bool_)
    for i in range(count):
        final[i] = accepting[some[i]]
        for c in range(len(firsts)):
            found[i, c] = rows[i, firsts[c]]
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
    slots = empty_slots(room)  # a hash table of pairs
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
