"""The order of admission, and its bound on overtaking."""

from weakref import WeakSet

from sgl_vllm.radix.node import Match, Node
from sgl_vllm.scheduler.orders import depth_first_places
from sgl_vllm.scheduler.policy import Bound, WaitingQueue

LOOSE = Bound(max_overtakes=1000, max_delay=1.0, min_delay_tokens=10**9)


def queue_of(order: str = "lpm", *matched: int, bound: Bound = LOOSE) -> WaitingQueue[str]:
    """Requests a, b, c, ... of 100 tokens, with this many cached."""
    queue: WaitingQueue[str] = WaitingQueue(order, bound, window=100)
    for name, num_tokens in zip("abcdefgh", matched, strict=False):
        queue.add(name, 100)
        queue.score(name, Match(num_tokens, None))
    return queue


def test_the_longest_prefix_goes_first():
    assert queue_of("lpm", 0, 50, 10).order() == ["b", "c", "a"]


def test_of_programs_those_with_the_least_to_compute_go_first():
    queue = queue_of("program")
    for name, num_remaining in (("a", 9_000), ("b", 40), ("c", 0), ("d", 600)):
        queue.add(name, 100, num_remaining=num_remaining)
    assert queue.order(room_tokens=1_000) == ["c", "b", "d", "a"]


def test_of_programs_that_have_about_as_much_to_compute_the_longest_prefix_goes_first():
    queue = queue_of("program")
    for name, num_remaining, num_cached in (("a", 520, 60), ("b", 1_000, 70), ("c", 1_100, 90)):
        queue.add(name, 100, num_remaining=num_remaining)
        queue.score(name, Match(num_cached, None))
    assert queue.order() == ["b", "a", "c"]


def test_programs_of_which_less_than_half_is_cached_come_after_the_others():
    queue = queue_of("program")
    for name, num_remaining, num_cached in (("a", 10, 49), ("b", 9_000, 50), ("c", 20, 0)):
        queue.add(name, 100, num_remaining=num_remaining)
        queue.score(name, Match(num_cached, None))
    assert queue.order() == ["b", "a", "c"]


def test_a_fork_group_has_the_place_of_the_program_with_the_least_to_compute():
    queue = queue_of("program")
    for name, num_remaining, group in (("a", 500, None), ("b", 9_000, "f"), ("c", 20, "f")):
        queue.add(name, 100, num_remaining=num_remaining, fork_group=group)
    assert queue.order() == ["b", "c", "a"]


def test_requests_with_the_same_next_tokens_stand_together_at_the_place_of_the_first():
    queue = queue_of("lpm", 7, 7, 7, 7)
    for name, branch in (("a", 1), ("b", 2), ("c", 1), ("d", 2)):
        queue.score(name, Match(7, None), branch)
    assert queue.order() == ["a", "c", "b", "d"]


def test_a_fork_group_stands_together_at_its_best_place():
    queue = queue_of("lpm", 10, 30)
    queue.add("x", 100, fork_group="fork")
    queue.add("y", 100, fork_group="fork")
    queue.score("y", Match(20, None))
    assert queue.order() == ["b", "x", "y", "a"]


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


def test_a_request_that_has_waited_long_goes_first():
    bound = Bound(1000, 1.0, 10**9, max_wait_s=10.0)
    queue: WaitingQueue[str] = WaitingQueue("lpm", bound, window=100)
    queue.add("old", 100, arrival_s=0.0)
    queue.add("new", 100, arrival_s=9.0)
    queue.score("new", Match(50, None))
    assert queue.order(now_s=9.9) == ["new", "old"]
    assert queue.order(now_s=10.0) == ["old", "new"]


def test_preempted_requests_go_first_the_last_one_in_front():
    queue = queue_of("lpm", 0, 50)
    queue.add("p", 100, is_readmission=True)
    queue.add("q", 100, is_readmission=True)
    assert queue.order() == ["q", "p", "b", "a"]


def test_a_preempted_request_does_not_pull_its_fork_group_to_the_front():
    for order in ("fcfs", "lpm"):
        queue = queue_of(order, 0)
        for name in ("x", "y"):
            queue.add(name, 100, fork_group="fork")
        queue.add("preempted", 100, fork_group="fork", is_readmission=True)
        assert queue.order() == ["preempted", "a", "x", "y"], order


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


def test_an_important_request_goes_before_a_longer_prefix():
    queue = queue_of("lpm", 0, 50)
    queue.add("important", 100, priority=-1)
    assert queue.order() == ["important", "b", "a"]


def test_tenants_that_have_had_their_share_go_last():
    queue: WaitingQueue[str] = WaitingQueue("lpm", LOOSE, window=100)
    for name, tenant in (("a", "greedy"), ("b", "modest"), ("c", "greedy")):
        queue.add(name, 100, tenant=tenant)
    assert queue.order(last_tenants={"greedy"}) == ["b", "a", "c"]
    assert set(queue.tenants) == {"greedy", "modest"}


def test_a_request_that_is_put_back_keeps_its_place():
    queue = queue_of("lpm", 7, 7, 7)
    queue.pop("a")
    assert queue.order() == ["b", "c"]
    assert queue.put_back("a")
    assert queue.order() == ["a", "b", "c"]
    assert not queue.put_back("unknown")


def test_fcfs_and_random_ignore_the_cache():
    assert queue_of("fcfs", 0, 50, 10).order() == ["a", "b", "c"]
    orders = {
        tuple(queue_of("random", *matched).order()) for matched in ((0, 9, 1, 2), (9, 0, 3, 4))
    }
    assert len(orders) == 1


def test_a_random_order_is_not_that_of_arrival():
    order = queue_of("random", *range(8)).order()
    assert sorted(order) == list("abcdefgh") != order


def test_requests_beyond_the_window_go_in_order_of_arrival():
    queue: WaitingQueue[int] = WaitingQueue("lpm", LOOSE, window=3)
    for number in range(200):
        queue.add(number, 100)
        queue.score(number, Match(number, None))
    assert queue.order() == [2, 1, 0, *range(3, 200)]


def test_depth_first_goes_to_the_branch_with_most_requests_and_stays_there():
    root = Node(None, 0, b"", [], 0)
    heavy = Node(root, 0, b"hhhh", [], 0)
    light = Node(root, 0, b"llll", [], 0)
    below = Node(heavy, 1, b"bbbb", [], 0)
    nodes = [light, heavy, below, None, heavy]
    assert depth_first_places(nodes).tolist().index(min(depth_first_places(nodes))) == 2
    in_order = [nodes[i] for i in depth_first_places(nodes).argsort(kind="stable")]
    assert in_order == [below, heavy, heavy, light, None]


def test_a_request_added_twice_waits_once_at_the_end():
    queue = queue_of("fcfs", 0, 0)
    queue.add("a", 100)
    assert queue.order() == ["b", "a"]
    queue.discard("a")
    assert queue.order() == queue.by_arrival() == ["b"]


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
