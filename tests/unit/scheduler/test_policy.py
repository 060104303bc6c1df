"""The order of admission, and its bound on overtaking."""

from sgl_vllm.radix.node import Match, Node
from sgl_vllm.scheduler.policy import Bound, WaitingQueue, depth_first_places

LOOSE = Bound(max_passes=1000, max_delay=1.0, min_delay_tokens=10**9)


def line_of(order: str = "lpm", *matched: int, bound: Bound = LOOSE) -> WaitingQueue[str]:
    """Requests a, b, c, ... of 100 tokens, of which so many are cached."""
    line: WaitingQueue[str] = WaitingQueue(order, bound, window=100)
    for name, num_tokens in zip("abcdefgh", matched, strict=False):
        line.add(name, 100)
        line.score(name, Match(num_tokens, None))
    return line


def test_the_longest_prefix_goes_first():
    assert line_of("lpm", 0, 50, 10).order() == ["b", "c", "a"]


def test_equal_prefixes_go_in_order_of_arrival():
    assert line_of("lpm", 7, 9, 7).order() == ["b", "a", "c"]


def test_while_all_fit_into_the_cache_they_go_as_they_came():
    line = line_of("lpm", 0, 50, 10)
    assert line.order(room_tokens=300) == ["a", "b", "c"]
    assert line.order(room_tokens=299) == ["b", "c", "a"]


def test_what_goes_on_alike_stands_together_at_the_place_of_the_first():
    line = line_of("lpm", 7, 7, 7, 7)
    for name, branch in (("a", 1), ("b", 2), ("c", 1), ("d", 2)):
        line.score(name, Match(7, None), branch)
    assert line.order() == ["a", "c", "b", "d"]


def test_a_fork_group_stands_together_at_its_best_place():
    line = line_of("lpm", 10, 30)
    line.add("x", 100, fork_group="fork")
    line.add("y", 100, fork_group="fork")
    line.score("y", Match(20, None))
    assert line.order() == ["b", "x", "y", "a"]


def test_a_fork_group_keeps_its_place_while_one_of_it_waits():
    line = line_of("fcfs")
    for name, group in (("a", 1), ("b", 2), ("c", 1), ("d", 2), ("e", None), ("f", 1)):
        line.add(name, 100, fork_group=group)
    admitted = []
    while line:
        admitted.append(line.order()[0])
        line.pop(admitted[-1])
        line.settle([0])
    assert "".join(admitted) == "acfbde"
    line.add("g", 100)
    line.add("h", 100, fork_group=1)
    assert line.order() == ["g", "h"], "once all have gone, the place has gone too"


def test_who_was_overtaken_often_goes_first():
    line = line_of("lpm", 0, 50, 40, 30, bound=Bound(2, 1.0, 10**9))
    for name in ("b", "c"):
        line.pop(name)
    assert line.settle([50, 40]) == 2
    assert line.order() == ["a", "d"]


def test_who_was_delayed_by_a_share_of_the_backlog_goes_first():
    line = line_of("lpm", 0, 50, 40, 30, bound=Bound(1000, 0.1, 0))
    assert line.order()[0] == "b"
    line.pop("b")
    line.settle([50])
    assert line.order() == ["a", "c", "d"]


def test_who_has_waited_long_goes_first():
    line = WaitingQueue("lpm", Bound(1000, 1.0, 10**9, max_wait_s=10.0), window=100)
    line.add("old", 100, arrival_s=0.0)
    line.add("new", 100, arrival_s=9.0)
    line.score("new", Match(50, None))
    assert line.order(now_s=9.9) == ["new", "old"]
    assert line.order(now_s=10.0) == ["old", "new"]


def test_preempted_requests_go_first_the_last_one_before_the_others():
    line = line_of("lpm", 0, 50)
    line.add("p", 100, first=True)
    line.add("q", 100, first=True)
    assert line.order() == ["q", "p", "b", "a"]


def test_an_important_request_goes_before_a_longer_prefix():
    line = line_of("lpm", 0, 50)
    line.add("important", 100, priority=-1)
    assert line.order() == ["important", "b", "a"]


def test_clients_that_have_had_their_share_go_last():
    line: WaitingQueue[str] = WaitingQueue("lpm", LOOSE, window=100)
    for name, client in (("a", "greedy"), ("b", "modest"), ("c", "greedy")):
        line.add(name, 100, client=client)
    assert line.order(last_clients={"greedy"}) == ["b", "a", "c"]
    assert set(line.clients) == {"greedy", "modest"}


def test_who_is_put_back_keeps_the_place():
    line = line_of("lpm", 7, 7, 7)
    line.pop("a")
    assert line.order() == ["b", "c"]
    assert line.put_back("a")
    assert line.order() == ["a", "b", "c"]
    assert not line.put_back("somebody else")


def test_first_come_first_served_and_random_do_not_look_at_the_cache():
    assert line_of("fcfs", 0, 50, 10).order() == ["a", "b", "c"]
    orders = {
        tuple(line_of("random", *matched).order()) for matched in ((0, 9, 1, 2), (9, 0, 3, 4))
    }
    assert len(orders) == 1


def test_beyond_the_window_they_go_as_they_came():
    line: WaitingQueue[int] = WaitingQueue("lpm", LOOSE, window=3)
    for number in range(200):
        line.add(number, 100)
        line.score(number, Match(number, None))
    assert line.order() == [2, 1, 0, *range(3, 200)]


def test_depth_first_goes_to_where_most_wait_and_stays_there():
    root = Node(None, 0, b"", [], 0)
    heavy = Node(root, 0, b"hhhh", [], 0)
    light = Node(root, 0, b"llll", [], 0)
    below = Node(heavy, 1, b"bbbb", [], 0)
    nodes = [light, heavy, below, None, heavy]
    assert depth_first_places(nodes).tolist().index(min(depth_first_places(nodes))) == 2
    in_order = [nodes[i] for i in depth_first_places(nodes).argsort(kind="stable")]
    assert in_order == [below, heavy, heavy, light, None]


def test_who_comes_a_second_time_is_in_line_once_at_the_end():
    line = line_of("fcfs", 0, 0)
    line.add("a", 100)
    assert line.order() == ["b", "a"]
    line.discard("a")
    assert line.order() == line.by_arrival() == ["b"]


def test_after_a_burst_the_line_is_as_small_as_before():
    line = line_of("lpm", 0, 50, bound=Bound(2, 1.0, 10**9))
    for number in range(5000):
        line.add(str(number), 100)
    for number in range(5000):
        line.pop(str(number))
    line.settle([0] * 5000)
    assert len(line._rows) < 300
    assert line.order() == ["a", "b"], "both have been passed over, and are known by it"
    line.add("c", 100)
    line.pop("b")
    line.settle([50])
    assert line.order() == ["a", "c"]
