"""The bound on overtaking, on random lives of a queue, against a history that the test keeps."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from sgl_vllm.radix.node import Match, Node
from sgl_vllm.scheduler.orders import CACHE_AWARE, ORDERS
from sgl_vllm.scheduler.policy import OVERHEAD_TOKENS, Bound, WaitingQueue
from tests.effort import examples

LOOSE = Bound(max_overtakes=10**9, max_delay=1.0, min_delay_tokens=10**12)


@dataclass(eq=False)
class Request:
    """A waiting request, as the test sees it. `came` orders all requests and is negative for those
    that were added first."""

    came: int
    tokens: int
    priority: int
    tenant: str | None
    arrival_s: float
    matched: int = 0
    limit: float = 0.0  # tokens: the largest that any order so far allowed
    is_overdue: bool = False  # when the order was last decided
    overtakes_before: int = 0  # before the last batch
    delay_before: int = 0
    overtakes: int = 0
    delay: int = 0

    @property
    def cost(self) -> int:
        return self.tokens - self.matched + OVERHEAD_TOKENS

    def came_before(self, other: Request) -> bool:
        is_alike = (self.priority, self.tenant) == (other.priority, other.tenant)
        return is_alike and self.came < other.came


def some_nodes() -> list[Node | None]:
    """A little tree."""
    root = Node(None, 0, b"", [], 0)
    left, right = Node(root, 0, b"llll", [], 0), Node(root, 0, b"rrrr", [], 0)
    below = Node(left, 1, b"bbbb", [], 0)
    for number, node in enumerate((left, right, below)):
        node.serial = number + 1
    return [None, left, right, below]


class QueueAgainstHistory(RuleBasedStateMachine):
    """Requests arrive, are scored repeatedly, and leave. Steps decide the order and pop some
    requests from the front, some of which are put back."""

    @initialize(
        order=st.sampled_from(sorted(ORDERS)),
        max_overtakes=st.integers(0, 5),
        max_delay=st.sampled_from([0.0, 0.1, 0.5]),
        min_delay_tokens=st.sampled_from([0, 200, 1000, 10**9]),
        max_wait_s=st.sampled_from([5.0, 50.0, float("inf")]),
        window=st.sampled_from([2, 5, 100]),
    )
    def start(self, order, max_overtakes, max_delay, min_delay_tokens, max_wait_s, window):
        self.bound = Bound(max_overtakes, max_delay, min_delay_tokens, max_wait_s)
        self.queue: WaitingQueue[Request] = WaitingQueue(order, self.bound, window)
        self.window = window
        self.nodes = some_nodes()
        self.waiting: list[Request] = []
        self.put_back: list[Request] = []
        self.now_s = 0.0
        self.numbers, self.first_numbers = count(1), count(1)

    # -- what happens to a queue --------------------------------------------------------------

    @rule(
        data=st.data(),
        num=st.integers(1, 6),
        priority=st.integers(0, 1),
        tenant=st.sampled_from([None, "x"]),
        fork_group=st.sampled_from([None, None, "f", "g"]),
        is_preempted=st.sampled_from([False, False, False, True]),
    )
    def add(self, data, num, priority, tenant, fork_group, is_preempted):
        for _ in range(num):
            came = -next(self.first_numbers) if is_preempted else next(self.numbers)
            tokens = data.draw(st.integers(1, 500))
            request = Request(came, tokens, priority, tenant, self.now_s)
            self.waiting.append(request)
            self.queue.add(
                request,
                tokens,
                arrival_s=self.now_s,
                priority=priority,
                tenant=tenant,
                fork_group=fork_group,
                is_readmission=is_preempted,
            )
            if data.draw(st.booleans()):
                self.score(data, request)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), num=st.integers(1, 4))
    def score_again(self, data, num):
        for _ in range(num):
            self.score(data, data.draw(st.sampled_from(self.waiting)))

    def score(self, data, request):
        request.matched = data.draw(st.integers(0, request.tokens))
        node = data.draw(st.sampled_from(self.nodes))
        key = data.draw(st.sampled_from([None, 10**9, 10**9 + 1]))
        self.queue.score(request, Match(request.matched, node), key)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def leave(self, data):
        request = data.draw(st.sampled_from(self.waiting))
        self.queue.discard(request)
        self.waiting.remove(request)

    @rule(seconds=st.floats(0, 20))
    def time_passes(self, seconds):
        self.now_s += seconds

    @rule(data=st.data(), num=st.integers(0, 6), room_tokens=st.sampled_from([0, 0, 1500]))
    def step(self, data, num, room_tokens):
        """Decide the order and admit some requests from the front, not all that are popped."""
        last = data.draw(st.sampled_from([(), ("x",)]))
        order = self.queue.order(self.now_s, room_tokens=room_tokens, last_tenants=last)
        assert len(order) == len(self.waiting) and set(order) == set(self.waiting)
        self.look_at(order, last)
        popped = order[:num]
        for request in popped:
            self.queue.pop(request)
        self.put_back = [r for r in popped if data.draw(st.integers(0, 3)) == 0]
        for request in self.put_back:
            assert self.queue.put_back(request)
            popped.remove(request)
        assert self.queue.popped == popped
        self.admit(data, popped)

    # -- what must hold -----------------------------------------------------------------------

    def look_at(self, order: list[Request], last: tuple[str, ...]) -> None:
        by_arrival = sorted(
            self.waiting, key=lambda r: (r.priority, r.came > 0 and r.tenant in last, r.came)
        )
        backlog = sum(request.cost for request in by_arrival[: self.window])
        for request in by_arrival[: self.window]:
            share = self.bound.max_delay * backlog
            request.limit = max(request.limit, share, self.bound.min_delay_tokens)
            request.is_overdue = (
                request.overtakes >= self.bound.max_overtakes
                or request.delay >= request.limit
                or self.now_s - request.arrival_s >= self.bound.max_wait_s
            )
        assert [r.priority for r in order] == sorted(r.priority for r in order)
        assert order[self.window :] == by_arrival[self.window :]
        for place, later in enumerate(order[: self.window]):
            for overtaken in order[place + 1 : self.window]:
                if overtaken.came_before(later):
                    assert not overtaken.is_overdue and later.came > 0, (
                        "an overdue request is not overtaken"
                    )
                if overtaken.tenant not in last and later.tenant in last:
                    assert later.came < 0 or later.priority < overtaken.priority

    def admit(self, data, popped: list[Request]) -> None:
        still = [request for request in self.waiting if request not in popped]
        for request in popped:
            request.matched = data.draw(st.integers(0, request.tokens))
        num_overtakes = 0
        for request in still:
            later = [other for other in popped if request.came_before(other)]
            request.overtakes_before, request.delay_before = request.overtakes, request.delay
            request.overtakes += len(later)
            request.delay += sum(other.cost for other in later)
            num_overtakes += len(later)
            # Before the last batch the request was below its limits, unless that batch did not
            # overtake it. A request that was put back had its turn in this step.
            if later and request not in self.put_back:
                assert request.overtakes_before <= self.bound.max_overtakes - 1
                assert request.delay_before < max(request.limit, self.bound.min_delay_tokens)
                assert request.overtakes <= self.bound.max_overtakes - 1 + len(popped)
        assert self.queue.settle([request.matched for request in popped]) == num_overtakes
        assert self.queue.popped == []
        self.waiting = still

    def teardown(self):
        """In the end all requests are admitted, and no row or name is left."""
        if not hasattr(self, "queue"):
            return
        num_left = len(self.waiting)
        for _ in range(num_left):
            front = self.queue.order(self.now_s)[0]
            self.queue.pop(front)
            self.queue.settle([0])
        assert len(self.queue) == 0 and self.queue.order() == []
        assert not self.queue.tenants


TestQueueAgainstHistory = QueueAgainstHistory.TestCase
TestQueueAgainstHistory.settings = settings(
    max_examples=examples(50), stateful_step_count=30, deadline=None
)


def with_scores(order: str, matches: list[int]) -> WaitingQueue[int]:
    queue: WaitingQueue[int] = WaitingQueue(order, LOOSE, window=100)
    nodes = some_nodes()
    for number, matched in enumerate(matches):
        queue.add(number, 100)
        queue.score(
            number, Match(matched, nodes[matched % len(nodes)]), next_tokens_key=matched % 3
        )
    return queue


MATCHES = st.lists(st.integers(0, 100), max_size=30)


@given(MATCHES, st.sampled_from(sorted(CACHE_AWARE)))
def test_cache_aware_orders_are_fcfs_while_all_requests_fit_into_the_cache(matches, order):
    queue = with_scores(order, matches)
    assert queue.order(room_tokens=100 * len(matches)) == list(range(len(matches)))


@given(st.integers(0, 8), st.integers(1, 3), st.sampled_from(sorted(ORDERS)))
def test_a_stream_of_better_requests_overtakes_a_request_up_to_the_bound(
    max_overtakes, per_step, order
):
    queue: WaitingQueue[int] = WaitingQueue(order, Bound(max_overtakes, 1.0, 10**12), window=100)
    numbers = count()
    queue.add(unlucky := next(numbers), 100)
    admitted: list[int] = []
    while unlucky in queue:
        for _ in range(2 * per_step):
            queue.add(number := next(numbers), 100)
            queue.score(number, Match(99, some_nodes()[1]))
        batch = queue.order()[:per_step]
        for number in batch:
            queue.pop(number)
        queue.settle([99] * per_step)
        admitted += batch
    assert len(admitted) <= max(0, max_overtakes - 1 + per_step) + per_step
    if order in CACHE_AWARE and max_overtakes:
        assert len(admitted) > max_overtakes, "the bound is used in full"


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from("abc")), max_size=30), st.data())
def test_by_arrival_is_the_order_of_arrival_within_each_priority(requests, data):
    queue: WaitingQueue[int] = WaitingQueue("lpm", LOOSE, window=100)
    for number, (priority, tenant) in enumerate(requests):
        queue.add(number, 100, priority=priority, tenant=tenant)
    for number in data.draw(st.permutations(range(len(requests)))):
        queue.pop(number)
        queue.put_back(number)
    queue.add(-1, 100, priority=0, is_readmission=True)
    in_order = sorted(range(len(requests)), key=lambda number: (requests[number][0], number))
    assert queue.by_arrival() == [-1, *in_order]


def after_overtaking(bound: Bound, num_cached: int, num_others: int = 0) -> list[str]:
    """The order after `first` was overtaken once, by a request with an estimated 50 of 100 tokens
    cached, while `num_others` waited too. Without the bound, `better` would go first."""
    queue: WaitingQueue[str] = WaitingQueue("lpm", bound, window=100)
    others = [f"other {number}" for number in range(num_others)]
    for name in ("first", "quick", *others):
        queue.add(name, 100)
    queue.score("quick", Match(50, None))
    assert queue.order()[0] == "quick"
    queue.pop("quick")
    queue.settle([num_cached])
    for name in others:
        queue.discard(name)
    queue.add("better", 100)
    queue.score("better", Match(40, None))
    return queue.order()


def test_the_delay_is_what_had_to_be_computed():
    bound = Bound(max_overtakes=1000, max_delay=0.0, min_delay_tokens=120)
    assert after_overtaking(bound, num_cached=50) == ["better", "first"]
    assert after_overtaking(bound, num_cached=0) == ["first", "better"]


def test_the_largest_backlog_counts():
    bound = Bound(max_overtakes=1000, max_delay=0.3, min_delay_tokens=0)
    assert after_overtaking(bound, num_cached=50) == ["first", "better"]
    assert after_overtaking(bound, num_cached=50, num_others=8) == ["better", "first"]
