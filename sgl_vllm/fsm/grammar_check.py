"""Whether a parsed grammar can be walked: loops over its arrays, compiled by numba.

Owns no state: arrays in, arrays out. `parsed_grammar.py` describes the arrays. numba checks no
index, so each loop states how far it writes, and checks every number before it follows it.
"""

from __future__ import annotations

import numpy as np

from sgl_vllm.jit import compiled

GOOD, UNKNOWN, ENDLESS, TOO_LARGE = range(4)
"""What `check` says of a grammar."""

_MAX_PASSES = 100

_BYTES, _CLASS, _CLASS_STAR, _EMPTY, _RULE = range(5)
_SEQUENCE, _CHOICE, _TAGS, _REPEAT = range(5, 9)
_REGEX = 12
"""As `parsed_grammar.Kind`, whose members numba would look up one by one."""


@compiled
def check(data, begins, bodies, root):  # type: ignore[no-untyped-def]
    """Whether a grammar is `GOOD` or what else; and its patterns and free texts.

    Bounds: every number of an expression or a rule is checked before it is followed. Each
    expression is on a stack once.
    """
    num = len(begins) - 1
    none = np.empty(0, np.int32)
    if num < 1 or begins[0] != 0 or begins[num] != len(data) or not 0 <= root < len(bodies):
        return UNKNOWN, none
    for i in range(num):
        if begins[i + 1] < begins[i] + 2 or begins[i + 1] - begins[i] - 2 != data[begins[i] + 1]:
            return UNKNOWN, none
    order = np.empty(num, np.int32)  # each after what it contains, but for rules in themselves
    stack = np.empty(num, np.int32)
    position = np.zeros(num, np.int32)
    state = np.zeros(num, np.int8)
    count = depth = num_found = 0
    stack[0] = bodies[root]
    if not 0 <= stack[0] < num:
        return UNKNOWN, none
    state[stack[0]] = 1
    while depth >= 0:
        one = stack[depth]
        child = _child(data, begins, bodies, one, position[one])
        if child == -2:
            return UNKNOWN, none
        if child == -1:
            order[count] = one
            count += 1
            num_found += data[begins[one]] in (_TAGS, _REGEX)
            depth -= 1
            continue
        position[one] += 1
        if state[child] == 0:
            state[child] = 1
            depth += 1
            stack[depth] = child
    found = np.empty(num_found, np.int32)
    num_found = 0
    for i in range(count):
        if data[begins[order[i]]] in (_TAGS, _REGEX):
            found[num_found] = order[i]
            num_found += 1
    may_be_empty = np.zeros(num, np.bool_)
    for _ in range(_MAX_PASSES):
        has_changed = False
        for one in order[:count]:
            if not may_be_empty[one] and _is_empty(data, begins, bodies, one, may_be_empty):
                may_be_empty[one] = has_changed = True
        if not has_changed:
            break
    else:
        return TOO_LARGE, none
    # The options `r ...` and `... r` of a rule r are loops, and no recursion.
    begins_again = np.zeros(num, np.bool_)
    ends_again = np.zeros(num, np.bool_)
    for rule in range(len(bodies)):
        body = bodies[rule]
        if not (0 <= body < num and state[body] and data[begins[body]] == _CHOICE):
            continue
        for i in range(data[begins[body] + 1]):
            option = data[begins[body] + 2 + i]
            begin, size = begins[option], data[begins[option] + 1]
            if data[begin] == _SEQUENCE and size > 1:  # `r ::= r` is no loop
                first, last = begins[data[begin + 2]], begins[data[begin + 1 + size]]
                begins_again[option] = data[first] == _RULE and data[first + 2] == rule
                ends_again[option] = data[last] == _RULE and data[last + 2] == rule
    state[:] = 0
    position[:] = 0
    for first in order[:count]:
        if state[first]:
            continue
        depth = 0
        stack[0] = first
        state[first] = 1
        while depth >= 0:
            one = stack[depth]
            child = -1
            if position[one] == 0 and begins_again[one]:
                position[one] = 1
            kind, at = data[begins[one]], position[one]
            # A sequence begins with its first part, and with the next if that may be empty.
            if kind != _TAGS and (
                kind != _SEQUENCE
                or at == 0
                or (
                    may_be_empty[data[begins[one] + 1 + at]]
                    and not (ends_again[one] and at == data[begins[one] + 1] - 1)
                )
            ):
                child = _child(data, begins, bodies, one, at)
            if child < 0:
                state[one] = 2
                depth -= 1
                continue
            position[one] += 1
            if state[child] == 1:
                return ENDLESS, none
            if state[child] == 0:
                state[child] = 1
                depth += 1
                stack[depth] = child
    return GOOD, found


@compiled
def _child(data, begins, bodies, one, index):  # type: ignore[no-untyped-def]
    """The expression that `one` contains at an index: -1 beyond the last, -2 if there is none."""
    num, begin = len(begins) - 1, begins[one]
    kind, size = data[begin], data[begin + 1]
    child = -1
    if kind in (_SEQUENCE, _CHOICE):
        if index >= size:
            return -1
        child = data[begin + 2 + index]
    elif kind in (_RULE, _REPEAT):
        if size != (1 if kind == _RULE else 3):
            return -2
        if index > 0:
            return -1
        rule = data[begin + 2]
        if not 0 <= rule < len(bodies):
            return -2
        child = bodies[rule]
    elif kind == _TAGS:
        if size % 2:
            return -2
        if index >= size:
            return -1
        child = data[begin + 2 + index]
        if index == size - 2:  # not an expression, but a flag
            child = data[begin + 1 + size]
        elif index % 2 and index < size - 1:
            if not 0 <= child < len(bodies):
                return -2
            child = bodies[child]
    elif kind in (_CLASS, _CLASS_STAR):
        return -1 if size % 2 == 1 else -2
    elif kind in (_BYTES, _EMPTY, _REGEX):
        return -1
    else:
        return -2
    return child if 0 <= child < num else -2


@compiled
def _is_empty(data, begins, bodies, one, may_be_empty):  # type: ignore[no-untyped-def]
    """Whether an expression may be empty, given what is known so far about the parts it contains.

    Bounds: the numbers of all expressions have been checked.
    """
    begin = begins[one]
    kind, size = data[begin], data[begin + 1]
    if kind == _BYTES:
        return size == 0
    if kind == _CLASS:
        return False
    if kind == _RULE:
        return may_be_empty[bodies[data[begin + 2]]]
    if kind == _REPEAT:
        return data[begin + 3] == 0 or may_be_empty[bodies[data[begin + 2]]]
    if kind == _SEQUENCE:
        return may_be_empty[data[begin + 2 : begin + 2 + size]].all()
    if kind == _CHOICE:
        return may_be_empty[data[begin + 2 : begin + 2 + size]].any()
    return True
