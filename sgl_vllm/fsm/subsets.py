"""Nondeterministic automata over bytes -> transition tables: the subset construction.

Owns these loops, compiled by numba. The sets of states stand in one array, one behind the other,
and are found again by their hash. Pure.

numba checks no index, so each loop states how far it writes and why.
"""

from __future__ import annotations

import numpy as np

from sgl_vllm.fsm.tables import empty_slots, sorted_by, without_gil
from sgl_vllm.jit import compiled


@without_gil
def determinized(num_states, spans, empties, end, most, most_steps):  # type: ignore[no-untyped-def]
    """The sets of states that texts lead to together, from state 0.

    Args:
        spans: int32 (spans, 4): source, first and last byte, target.
        empties: int32 (transitions without text, 2): source, target.
        end: the state that accepts.
        most: the limit of sets.
        most_steps: the limit of transitions that are followed, and of members of all sets.

    Returns: the table over classes of bytes, int32 with the start first; which states accept; and
        the class of each byte. The table has no rows if a limit is exceeded.

    Bounds: at most `most` sets are added, which is checked for each, and a set has one row. It has
    each state once, and so each span. Members and targets get more room before they are written.
    There are at most as many intervals as classes.
    """
    assert num_states > 0 and 0 <= end < num_states and most > 0
    for i in range(len(spans)):
        assert 0 <= spans[i, 0] < num_states and 0 <= spans[i, 3] < num_states
        assert 0 <= spans[i, 1] <= spans[i, 2] < 256
    for i in range(len(empties)):
        assert 0 <= empties[i, 0] < num_states and 0 <= empties[i, 1] < num_states
    classes, num_classes = _classes(spans)
    span_begin, span_order = sorted_by(spans[:, 0], num_states)
    empty_begin, empty_order = sorted_by(empties[:, 0], num_states)
    low = np.empty(len(spans), np.int32)  # the first class of a span, and the one behind its last
    high = np.empty(len(spans), np.int32)
    to = np.empty(len(spans), np.int32)
    empty_to = np.empty(len(empties), np.int32)
    matters = np.zeros(num_states, np.bool_)  # whether anything but empty transitions follows
    matters[end] = True
    for i in range(len(spans)):
        source, first, last, target = spans[span_order[i]]
        matters[source] = True
        low[i], high[i], to[i] = classes[first], classes[last] + 1, target
    for i in range(len(empties)):
        empty_to[i] = empties[empty_order[i], 1]

    seen = np.zeros(num_states, np.int32)  # the last search that has reached a state
    found = np.empty(num_states, np.int32)
    alone = np.full(num_states, -1, np.int32)  # the set that a state leads to by itself
    slots = empty_slots(most)  # a hash table of sets
    members = np.empty(4 * num_states, np.int32)
    begin = np.empty(most + 1, np.int64)  # of each set in `members`
    begin[0] = 0
    accepting = np.empty(most, np.bool_)
    # Row r is what set r - 1 leads to. Row 0, before the first set, leads to the start only.
    table = np.empty((most + 1, num_classes), np.int32)
    row = 0
    own = np.empty(len(spans), np.int64)  # the spans of a set
    interval = np.zeros(num_classes + 1, np.int64)
    target_begin = np.zeros(num_classes + 2, np.int64)
    target_begin[1] = 1
    targets = np.zeros(1, np.int32)
    num_intervals = 1
    count, steps, searches = 0, 0, 0
    while True:
        c = 0
        for j in range(num_intervals):
            some = targets[target_begin[j] : target_begin[j + 1]]
            number = alone[some[0]] if len(some) == 1 else -1
            if len(some) and number < 0:
                searches += 1
                num_found, num_followed = _closure(
                    some, empty_begin, empty_to, matters, seen, searches, found
                )
                steps += num_found + num_followed
                slot = _slot(found, num_found, slots, members, begin, seen, searches)
                if slots[slot] < 0:
                    if count == most:
                        return table[:0].copy(), accepting[:0].copy(), classes
                    end_of_set = begin[count] + num_found
                    if len(members) < end_of_set:
                        longer = np.empty(2 * end_of_set, np.int32)
                        for m in range(begin[count]):
                            longer[m] = members[m]
                        members = longer
                    for m in range(num_found):
                        members[begin[count] + m] = found[m]
                    begin[count + 1] = end_of_set
                    accepting[count] = seen[end] == searches
                    slots[slot] = count
                    count += 1
                number = slots[slot]
                if len(some) == 1:
                    alone[some[0]] = number
                if steps > most_steps:
                    return table[:0].copy(), accepting[:0].copy(), classes
            while c < num_classes and interval[c] == j:
                table[row, c] = number
                c += 1
        if row == count:
            return table[1 : count + 1].copy(), accepting[:count].copy(), classes
        # Classes between two ends of the next set's spans lead to the same states.
        num_own = 0
        for state in members[begin[row] : begin[row + 1]]:
            for i in range(span_begin[state], span_begin[state + 1]):
                own[num_own] = i
                num_own += 1
        interval[:] = 0
        for i in own[:num_own]:
            interval[low[i]] = interval[high[i]] = 1
        interval[0] = 0
        for c in range(1, num_classes + 1):
            interval[c] += interval[c - 1]
        num_intervals = interval[num_classes - 1] + 1
        target_begin[:] = 0
        num_targets = 0
        for i in own[:num_own]:
            num_targets += interval[high[i] - 1] + 1 - interval[low[i]]
        steps += num_targets + num_classes
        if steps > most_steps:
            return table[:0].copy(), accepting[:0].copy(), classes
        if len(targets) < num_targets:
            targets = np.empty(2 * num_targets, np.int32)
        for i in own[:num_own]:
            for j in range(interval[low[i]], interval[high[i] - 1] + 1):
                target_begin[j + 2] += 1
        for j in range(2, num_intervals + 2):
            target_begin[j] += target_begin[j - 1]
        for i in own[:num_own]:
            for j in range(interval[low[i]], interval[high[i] - 1] + 1):
                targets[target_begin[j + 1]] = to[i]
                target_begin[j + 1] += 1
        row += 1


@compiled
def _classes(spans):  # type: ignore[no-untyped-def]
    """The class of each byte, so that no span has only a part of a class, and their number.

    Bounds: a span ends before byte 256.
    """
    begins = np.zeros(257, np.bool_)
    for i in range(len(spans)):
        begins[spans[i, 1]] = True
        begins[spans[i, 2] + 1] = True
    classes = np.zeros(256, np.int32)
    for byte in range(1, 256):
        classes[byte] = classes[byte - 1] + (1 if begins[byte] else 0)
    return classes, classes[255] + 1


@compiled
def _closure(targets, empty_begin, empty_to, matters, seen, search, found):  # type: ignore[no-untyped-def]
    """The states that are reached from some without text.

    Args:
        matters: the states that are to be found; others only lead on.
        seen: set to `search` for all states that are reached.
        found: filled from its beginning; from its end on, it holds what is still to visit.

    Returns: how many were found, and how many transitions were followed.

    Bounds: `found` has room for all states. `seen` lets each in once, and no more are found than
    have been visited, so the two ends do not meet.
    """
    count, left, num_followed = 0, len(found), len(targets)
    for state in targets:
        if seen[state] != search:
            seen[state] = search
            left -= 1
            found[left] = state
    while left < len(found):
        state = found[left]
        left += 1
        if matters[state]:
            found[count] = state
            count += 1
        num_followed += empty_begin[state + 1] - empty_begin[state]
        for i in range(empty_begin[state], empty_begin[state + 1]):
            if seen[empty_to[i]] != search:
                seen[empty_to[i]] = search
                left -= 1
                found[left] = empty_to[i]
    return count, num_followed


@compiled
def _slot(found, count, slots, members, begin, seen, search):  # type: ignore[no-untyped-def]
    """Where in the hash table the set is that has just been found, or will be. At least half of the
    slots are free, so the search ends."""
    key = np.int64(count)
    for i in range(count):
        key += (np.int64(found[i]) + 1) * 0x5851F42D4C957F2D ^ (np.int64(found[i]) << 17)
    slot = (key ^ (key >> 31)) & (len(slots) - 1)
    while slots[slot] >= 0:
        other = slots[slot]
        is_equal = begin[other + 1] - begin[other] == count
        m = begin[other]
        while is_equal and m < begin[other + 1]:
            is_equal = seen[members[m]] == search
            m += 1
        if is_equal:
            break
        slot = (slot + 1) & (len(slots) - 1)
    return slot
