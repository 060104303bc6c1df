"""The order of admission, and its bound on overtaking."""

from typing import Any
from weakref import WeakSet

import pytest

from sgl_vllm.radix.node import Match, Node
from sgl_vllm.scheduler.orders import ORDERS, depth_first_places
from sgl_vllm.scheduler.policy import Bound, WaitingQueue

LOOSE = Bound(max_overtakes=1000, max_delay=1.0, min_delay_tokens=10**9)


def queue_of(order: str = "lpm", *matched: int, bound: Bound = LOOSE) -> WaitingQueue[str]:
    """Requests a, b, c, ... of 100 tokens, with this many cached."""
    queue: WaitingQueue[str] = WaitingQueue(order, bound, window=100)
    for name, num_tokens in zip("abcdefgh", matched, strict=False):
        queue.add(name, 100)
        queue.score(name, Match(num_tokens, None))
    return queue


FORK = {"fork_group": "fork"}
FIRST = {"is_readmission": True}
# By name: how each request is added, and how much of its 100 tokens is cached.
WAITING: dict[str, tuple[str, dict[str, tuple[dict[str, Any], int]], str]] = {
    "the longest prefix goes first": ("lpm", {"a": ({}, 0), "b": ({}, 50), "c": ({}, 10)}, "bca"),
    "fcfs ignores the cache": ("fcfs", {"a": ({}, 0), "b": ({}, 50), "c": ({}, 10)}, "abc"),
    "an important request goes before a longer prefix": (
        "lpm",
        {"a": ({}, 0), "b": ({}, 50), "c": ({"priority": -1}, 0)},
        "cba",
    ),
    "preempted requests go first, the most recent one at the front": (
        "lpm",
        {"a": ({}, 0), "b": ({}, 50), "p": (FIRST, 0), "q": (FIRST, 0)},
        "qpba",
    ),
    "a fork group stands together at its best place": (
        "lpm",
        {"a": ({}, 10), "b": ({}, 30), "x": (FORK, 0), "y": (FORK, 20)},
        "bxya",
    ),
    "a preempted request does not pull its fork group to the front": (
        "fcfs",
        {"a": ({}, 0), "x": (FORK, 0), "y": (FORK, 0), "p": (FORK | FIRST, 0)},
        "paxy",
    ),
    "programs that have had the least go first": (
        "agents take turns",
        {name: ({"num_served": n}, 0) for name, n in zip("abcd", (9000, 40, 0, 600), strict=True)},
        "cbda",
    ),
    "among conversations with about as many computed tokens, the longest prefix": (
        "agents take turns",
        {
            "a": ({"num_served": 520}, 60),
            "b": ({"num_served": 1_000}, 70),
            "c": ({"num_served": 1_100}, 90),
        },
        "bac",
    ),
    "what is half cached goes first, then what is no agent's": (
        "agents take turns",
        {
            "a": ({"num_served": 10, "is_agent": True}, 49),
            "b": ({"num_served": 9_000, "is_agent": True}, 50),
            "c": ({"num_served": 20}, 0),
        },
        "bca",
    ),
    "a fork group goes where its conversation with the fewest computed tokens goes": (
        "agents take turns",
        {
            "a": ({"num_served": 500}, 0),
            "b": (FORK | {"num_served": 9_000}, 0),
            "c": (FORK | {"num_served": 20}, 0),
        },
        "bca",
    ),
}


@pytest.mark.parametrize(("order", "requests", "expected"), WAITING.values(), ids=WAITING)
def test_the_order_of_admission(order, requests, expected):
    takes_turns = order not in ORDERS
    queue = queue_of("lpm" if takes_turns else order)
    for name, (added, num_cached) in requests.items():
        queue.add(name, 100, **added)
        queue.score(name, Match(num_cached, None))
    assert "".join(queue.order(hold_s=60.0 if takes_turns else 0.0)) == expected


def test_a_random_order_is_neither_that_of_arrival_nor_that_of_the_cache():
    order = queue_of("random", *range(8)).order()
    assert sorted(order) == list("abcdefgh") != order
    assert queue_of("random", *range(7, -1, -1)).order() == order


def test_requests_with_the_same_next_tokens_stand_together_at_the_place_of_the_first():
    queue = queue_of("lpm", 7, 7, 7, 7)
    for name, branch in (("a", 1), ("b", 2), ("c", 1), ("d", 2)):
        queue.score(name, Match(7, None), branch)
    assert queue.order() == ["a", "c", "b", "d"]


def test_requests_of_tenants_that_had_their_share_and_those_that_are_not_overdue_go_last():
    queue: WaitingQueue[str] = WaitingQueue(
        "lpm", Bound(1000, 1.0, 10**9, max_wait_s=10.0), window=100
    )
    for name, tenant in (("a", "greedy"), ("b", "modest"), ("c", "greedy")):
        queue.add(name, 100, tenant=tenant, arrival_s=ord(name) - ord("a"))
    queue.score("b", Match(50, None))
    assert queue.order(now_s=9.9) == ["b", "a", "c"]
    assert queue.order(now_s=10.0) == ["a", "b", "c"]
    assert queue.order(now_s=10.0, last_tenants={"greedy"}) == ["b", "a", "c"]
    assert set(queue.tenants) == {"greedy", "modest"}


def test_while_agents_take_turns_a_request_is_overdue_by_its_wait_and_not_by_what_others_compute():
    queue = queue_of("lpm", 0, bound=Bound(1000, 0.0, 0, max_wait_s=30.0))
    for number in range(3):
        queue.add(str(number), 100)
        queue.pop(str(number))
        queue.settle([0])
    queue.add("cached", 100, arrival_s=1.0)
    queue.score("cached", Match(90, None))
    assert queue.order(now_s=9.9, hold_s=10.0) == ["cached", "a"]
    assert queue.order(now_s=10.0, hold_s=10.0) == ["a", "cached"]
    assert queue.order(now_s=10.0, hold_s=60.0) == ["cached", "a"]
    assert queue.order(now_s=30.0, hold_s=60.0) == ["a", "cached"]
    assert queue.order(now_s=10.0) == ["a", "cached"]


def test_a_fork_group_keeps_its_place_while_one_of_its_requests_waits():
    queue = queue_of("fcfs")
    for name, group in (("a", 1), ("b", 2), ("c", 1), ("d", 2), ("e", None), ("f", 1)):
        queue.add(name, 100, fork_group=group)
    admitted = []
    while queue:
        admitted.append(queue.order()[0])
        queue.pop(admitted[-1])
        queue.settle([0])
    assert "".join(admitted) == "acfbde"
    queue.add("g", 100)
    queue.add("h", 100, fork_group=1)
    assert queue.order() == ["g", "h"], "the place is gone once all have been admitted"


def test_requests_without_known_next_tokens_are_alone():
    queue = queue_of("lpm", 0)
    queue.add("preempted", 100, is_readmission=True)
    queue.score("preempted", Match(0, None))
    for name in ("a", "preempted"):
        assert queue.next_tokens_key_of(name) < 0 and queue.num_with_same_next_tokens(name) == 1


def test_an_empty_queue_keeps_no_request_alive():
    class Request:
        pass

    queue: WaitingQueue[Request] = WaitingQueue("lpm", LOOSE, window=100)
    requests = [Request(), Request()]
    alive = WeakSet(requests)
    for request in requests:
        queue.add(request, 100)
    queue.order()
    queue.pop(requests[0])
    queue.settle([0])
    queue.discard(requests[1])
    del request, requests
    assert not alive


def test_depth_first_goes_to_the_branch_with_most_requests_and_stays_there():
    root = Node(None, 0, b"", [], 0)
    heavy = Node(root, 0, b"hhhh", [], 0)
    light = Node(root, 0, b"llll", [], 0)
    below = Node(heavy, 1, b"bbbb", [], 0)
    nodes = [light, heavy, below, None, heavy]
    assert depth_first_places(nodes).tolist().index(min(depth_first_places(nodes))) == 2
    in_order = [nodes[i] for i in depth_first_places(nodes).argsort(kind="stable")]
    assert in_order == [below, heavy, heavy, light, None]


def test_the_table_shrinks_after_a_burst():
    queue = queue_of("lpm", 0, 50, bound=Bound(2, 1.0, 10**9))
    for number in range(5000):
        queue.add(str(number), 100)
    for number in range(5000):
        queue.pop(str(number))
    queue.settle([0] * 5000)
    assert len(queue._items) < 300
    assert queue.order() == ["a", "b"], "their overtakes survive the move of their rows"
    queue.add("c", 100)
    queue.pop("b")
    queue.settle([50])
    assert queue.order() == ["a", "c"]
