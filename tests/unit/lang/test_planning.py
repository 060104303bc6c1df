"""Orders of segments: what the search promises, against all orders there are."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_vllm.lang import planning
from sgl_vllm.lang.planning import OrderMemory, SharedOrders, by_frequency, plan, shared_weight

WEIGHTS = {segment: 1 + 7 * place % 10 for place, segment in enumerate("abcdefgh")}

a_set = st.lists(st.sampled_from("abcdefgh"), unique=True, max_size=6)


def weight_of_prefixes(orders: Sequence[Sequence[str]]) -> int:
    """What all orders share, by the set of all their beginnings."""
    beginnings = {tuple(order[:n]) for order in orders for n in range(1, len(order) + 1)}
    asked = sum(WEIGHTS[segment] for order in orders for segment in order)
    return asked - sum(WEIGHTS[beginning[-1]] for beginning in beginnings)


@given(st.lists(a_set, max_size=8))
def test_what_is_shared_is_what_is_not_in_the_trie(orders):
    assert shared_weight(orders, WEIGHTS) == weight_of_prefixes(orders)


@given(st.lists(a_set, max_size=12))
def test_a_plan_permutes_each_set_and_shares_no_less_than_the_sets_as_given(sets):
    orders = plan(sets, WEIGHTS)
    assert [sorted(order) for order in orders] == [sorted(one) for one in sets]
    assert weight_of_prefixes(orders) >= weight_of_prefixes(sets)
    assert plan([[*one] for one in sets], dict(WEIGHTS)) == orders


def test_of_a_few_small_sets_all_orders_there_are_share_hardly_more():
    rng = random.Random(2)
    planned = best = 0
    for _ in range(100):
        sets = [rng.sample("abcde", 3) for _ in range(3)]
        planned += weight_of_prefixes(plan(sets, WEIGHTS))
        everything = itertools.product(*(itertools.permutations(one) for one in sets))
        best += max(map(weight_of_prefixes, everything))
    assert 0.99 * best < planned <= best


def test_equal_sets_get_equal_orders():
    rng = random.Random(5)
    sets = [rng.sample("abcdefgh", 8) for _ in range(50)]
    assert len(set(map(tuple, plan(sets, WEIGHTS)))) == 1


def test_a_segment_twice_is_refused():
    with pytest.raises(ValueError, match="twice"):
        plan([["a", "b", "a"]], WEIGHTS)


@pytest.mark.parametrize(("num_sets", "size", "num_segments"), [(1000, 10, 40), (2000, 30, 200)])
def test_a_large_batch_is_planned_in_time(num_sets, size, num_segments):
    """Ten times what it takes alone on a machine."""
    rng = random.Random(7)
    sets = [rng.sample(range(num_segments), size) for _ in range(num_sets)]
    weights = dict.fromkeys(range(num_segments), 100)
    start = time.process_time()
    orders = plan(sets, weights)
    assert time.process_time() - start < 5
    assert shared_weight(orders, weights) > 2 * shared_weight(sets, weights)


def test_each_bound_of_the_search_leaves_a_plan_that_shares_less(monkeypatch):
    rng = random.Random(3)
    sets = [rng.sample(range(60), 12) for _ in range(300)]
    weights = dict.fromkeys(range(60), 5)
    bounds = (10_000, -1), (planning.MAX_WORK, -1), (planning.MAX_WORK, planning.MAX_REPLACED)
    shared = []
    for work, replaced in bounds:
        monkeypatch.setattr(planning, "MAX_WORK", work)
        monkeypatch.setattr(planning, "MAX_REPLACED", replaced)
        shared.append(shared_weight(plan(sets, weights), weights))
    assert shared_weight(by_frequency(sets, weights), weights) <= shared[0] < shared[1] < shared[2]


# -- one after the other


@given(st.lists(a_set, min_size=1, max_size=12))
def test_a_suggestion_begins_with_the_heaviest_beginning_that_was_sent(sets):
    orders: SharedOrders[str] = SharedOrders()
    sent: list[tuple[str, ...]] = []
    for one in sets:
        chosen = orders.suggest(one, WEIGHTS)
        assert sorted(chosen.order) == sorted(one)
        beginnings = {tuple(order[:n]) for order in sent for n in range(len(order) + 1)} | {()}
        heaviest = max(sum(WEIGHTS[s] for s in b) for b in beginnings if set(b) <= set(one))
        assert chosen.shared_weight == heaviest == orders.shared_weight(chosen.order, WEIGHTS)
        assert chosen.shared_weight >= orders.shared_weight(one, WEIGHTS)
        orders.add(chosen.order)
        assert orders.decided(one) is not None
        sent.append(chosen.order)


def test_a_memory_is_bounded_and_forgets_what_was_used_least_recently():
    memory: OrderMemory[str | int] = OrderMemory(max_segments=12)
    for beginning in ("one", "two"):
        memory.add(beginning, "abc")  # three in the trie, three in the set
    memory.add("one", "abc")
    memory.add("three", "ab")
    assert memory.after("two").decided("abc") is None
    assert memory.after("one").decided("abc") == ("a", "b", "c")
    assert memory.after("three").decided("ab") == ("a", "b")
    memory.add("large", range(20))
    assert all(memory.after(one).num_kept == 0 for one in ("one", "three", "large"))


def test_after_one_beginning_the_older_half_is_forgotten():
    memory: OrderMemory[str] = OrderMemory(max_segments=40)
    sets = [[f"{number}a", f"{number}b"] for number in range(50)]
    for number, one in enumerate(sets):
        memory.add("only", one)
        orders = memory.after("only")
        assert orders.num_kept <= 40
        assert all(orders.decided(recent) for recent in sets[max(0, number - 4) : number + 1])
    assert orders.decided(sets[0]) is None and orders.shared_weight(sets[0], {}) == 0
    assert orders.shared_weight(sets[-1], dict.fromkeys(sets[-1], 3)) == 6
