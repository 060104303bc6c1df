"""Which state is evicted first, as use and eviction teach it."""

from __future__ import annotations

import pytest

from sgl_vllm.radix.components.state_order import (
    MAX_OUTCOMES,
    MIN_CHANCE,
    TRY_EVERY,
    Kind,
    StateOrder,
)
from tests.unit.radix.trees import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def order(clock: Clock) -> StateOrder:
    return StateOrder(clock)


def leave(order: StateOrder, state: int, kind: Kind) -> None:
    """A request leaves a state, and ends."""
    order.add(state)
    order.mark(state, kind)
    order.put(state)


def teach(order: StateOrder, kind: Kind, num_used: int, num_evicted: int) -> None:
    """`num_used` states of a kind are used once, and `num_evicted` never."""
    for state in range(10_000, 10_000 + num_used + num_evicted):
        leave(order, state, kind)
    for state in range(10_000, 10_000 + num_used):
        order.used(state)
    for state in range(10_000 + num_used, 10_000 + num_used + num_evicted):
        order.remove(state)
    order.clear()


def take_all(order: StateOrder) -> list[int]:
    taken = []
    while (state := order.take_first()) is not None:
        taken.append(state)
    return taken


def test_of_one_kind_the_longest_unused_goes_first(order: StateOrder, clock: Clock) -> None:
    for state in (1, 2, 3):
        leave(order, state, Kind.END)
        clock.now += 1
    order.put(1)  # used, and given back
    assert take_all(order) == [2, 3, 1]


def test_what_is_used_stays_where_what_is_not_used_goes(order: StateOrder, clock: Clock) -> None:
    """Whatever the kind: here conversations go on from ends of prompts."""
    teach(order, Kind.PROMPT, 90, 10)
    teach(order, Kind.END, 0, 100)
    leave(order, 1, Kind.PROMPT)
    clock.now += 50
    leave(order, 2, Kind.END)
    clock.now += 10
    assert take_all(order) == [2, 1]


def test_a_likely_state_goes_when_it_is_out_of_use_for_long(
    order: StateOrder, clock: Clock
) -> None:
    """The chance of one is four times the other's, so it may be out of use four times as long."""
    teach(order, Kind.BRANCH, 80, 20)
    teach(order, Kind.END, 20, 80)
    for unused_s, first in ((25, 2), (35, 1)):
        leave(order, 1, Kind.BRANCH)
        clock.now += unused_s
        leave(order, 2, Kind.END)
        clock.now += 10
        assert take_all(order)[0] == first
        order.clear()


def test_states_that_were_used_are_another_class(order: StateOrder, clock: Clock) -> None:
    """A turn of a conversation that has gone on goes before the ends of others."""
    for state in range(100, 150):
        leave(order, state, Kind.END)
        order.used(state)
        order.remove(state)
    leave(order, 1, Kind.END)
    clock.now += 20
    leave(order, 2, Kind.END)
    order.used(2)
    order.put(2)
    clock.now += 10
    assert take_all(order) == [2, 1]


def test_what_counts_as_never_used_goes_first(order: StateOrder, clock: Clock) -> None:
    teach(order, Kind.END, 90, 10)
    teach(order, Kind.BLOCK, 0, 100)
    leave(order, 1, Kind.BLOCK)
    leave(order, 2, Kind.END)
    clock.now += 100
    leave(order, 3, Kind.END)
    order.count_as_never_used(3)
    assert take_all(order) == [3, 1, 2]
    order.put(3)
    order.put(1)
    clock.now += 100
    assert take_all(order) == [1, 3], "it counts again"


def test_a_kind_that_is_never_used_is_not_worth_a_state_but_tried_now_and_then(
    order: StateOrder,
) -> None:
    assert order.is_worth_a_state(Kind.PROMPT), "nothing is known yet"
    teach(order, Kind.PROMPT, 0, 30)
    asked = [order.is_worth_a_state(Kind.PROMPT) for _ in range(3 * TRY_EVERY)]
    assert sum(asked) == 3
    teach(order, Kind.PROMPT, int(60 * MIN_CHANCE), 0)
    assert all(order.is_worth_a_state(Kind.PROMPT) for _ in range(TRY_EVERY))


def test_old_outcomes_are_forgotten(order: StateOrder) -> None:
    """However many there were, a change is noticed after as many as are remembered."""
    teach(order, Kind.PROMPT, 0, 5000)
    teach(order, Kind.PROMPT, MAX_OUTCOMES, 0)
    assert all(order.is_worth_a_state(Kind.PROMPT) for _ in range(TRY_EVERY))
