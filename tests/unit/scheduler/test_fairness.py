"""Fair shares between tenants: what the counters promise, and what follows for a queue."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable

from hypothesis import given
from hypothesis import strategies as st

from sgl_vllm.radix.node import Match
from sgl_vllm.scheduler import fairness as fairness_module
from sgl_vllm.scheduler.fairness import MAX_DEBT_QUANTA, DeficitCounters
from sgl_vllm.scheduler.policy import Bound, WaitingQueue

LOOSE = Bound(max_overtakes=10**9, max_delay=1.0, min_delay_tokens=10**12)


def last_of(fairness: DeficitCounters, waiting: Collection[Hashable]) -> set[Hashable]:
    """The tenants that go last in the next step."""
    fairness.refill_if_due(waiting)
    return fairness.without_credit(waiting)


def serve(fairness: DeficitCounters, wishes: list[tuple[str, int]]) -> Counter[str]:
    """Serve wishes one by one: a tenant's name and a number of tokens. A tenant without credit
    gives way to the other. Both always wait."""
    served: Counter[str] = Counter()
    for name, num_tokens in wishes:
        last = last_of(fairness, ["a", "b"])
        assert last < {"a", "b"}, "never all of them"
        if name in last:
            (name,) = {"a", "b"} - last
        fairness.charge(name, num_tokens)
        served[name] += num_tokens
    return served


WISHES = st.lists(st.tuples(st.sampled_from("aaab"), st.integers(0, 500)), max_size=200)


@given(st.integers(1, 300), WISHES, st.integers(0, 100))
def test_of_two_tenants_that_always_wait_neither_gets_far_ahead(quantum, wishes, num_before):
    """While no request computes more than the largest debt."""
    wishes = [(name, min(num, MAX_DEBT_QUANTA * quantum)) for name, num in wishes]
    fairness = DeficitCounters(quantum)
    serve(fairness, wishes[:num_before])  # any history
    served = serve(fairness, wishes[num_before:])
    most = max((num_tokens for _, num_tokens in wishes), default=0)
    assert abs(served["a"] - served["b"]) <= 2 * (quantum + most)


@given(
    st.integers(1, 300),
    st.lists(
        st.tuples(st.sampled_from("abcd"), st.integers(0, 1000), st.sets(st.sampled_from("abcd"))),
        max_size=60,
    ),
)
def test_the_waiting_tenants_never_all_go_last(quantum, steps):
    fairness = DeficitCounters(quantum)
    for name, num_tokens, waiting in steps:
        fairness.charge(name, num_tokens)
        last = last_of(fairness, waiting)
        assert last < waiting or not waiting
        fairness.refill_if_due(waiting)  # again
        assert fairness.without_credit(waiting) == last


def test_an_absent_tenant_keeps_its_debt_until_others_have_paid_off_as_much():
    fairness = DeficitCounters(100)
    fairness.charge("a", 350)  # 250 more than its credit
    fairness.charge("b", 100)
    assert last_of(fairness, {"b"}) == set()  # all tenants get 100
    assert last_of(fairness, {"a", "b"}) == {"a"}
    fairness.charge("b", 200)  # and 200 more
    assert last_of(fairness, {"b"}) == set()
    assert last_of(fairness, {"a", "b"}) == set()


def test_an_absent_tenant_does_not_save_up():
    fairness = DeficitCounters(100)
    fairness.charge("b", 50)
    for _ in range(1000):
        fairness.charge("a", 100)
        fairness.refill_if_due({"a"})
    assert serve(fairness, [("b", 10)] * 40) == {"b": 200, "a": 200}


def test_of_too_many_absent_tenants_those_with_the_largest_debts_are_remembered(monkeypatch):
    monkeypatch.setattr(fairness_module, "MAX_ABSENT", 10)
    fairness = DeficitCounters(100)
    for number in range(14):
        fairness.charge(number, 200 + number)
    fairness.charge("a", 1)
    fairness.refill_if_due({"a"})
    assert fairness._credit.keys() == {"a", 9, 10, 11, 12, 13}


class Loop:
    """A queue that admits `per_step` requests per step and charges what they compute: their tokens
    minus the cached ones."""

    def __init__(self, quantum: int, per_step: int, window: int = 1000) -> None:
        self.queue: WaitingQueue[tuple[str, int]] = WaitingQueue("lpm", LOOSE, window)
        self.fairness = DeficitCounters(quantum)
        self.per_step = per_step
        self.num_sent = 0
        self.served: Counter[str] = Counter()
        self.waits: dict[str, list[int]] = {}
        self.num_steps = 0
        self.sent_at: dict[tuple[str, int], tuple[int, int, int]] = {}

    def send(self, tenant: str, num_tokens: int, num_cached: int = 0) -> None:
        item = (tenant, self.num_sent)
        self.num_sent += 1
        self.queue.add(item, num_tokens, tenant=tenant)
        self.queue.score(item, Match(num_cached, None))
        self.sent_at[item] = (self.num_steps, num_tokens, num_cached)

    def step(self) -> None:
        last = last_of(self.fairness, self.queue.tenants)
        for item in self.queue.order(last_tenants=last)[: self.per_step]:
            self.queue.pop(item)
            tenant = item[0]
            since, num_tokens, num_cached = self.sent_at.pop(item)
            self.fairness.charge(tenant, num_tokens - num_cached)
            self.served[tenant] += num_tokens - num_cached
            self.waits.setdefault(tenant, []).append(self.num_steps - since)
        self.queue.settle([0] * len(self.queue.popped))
        self.num_steps += 1


def test_a_flood_longer_than_the_window_does_not_hide_a_modest_tenant():
    loop = Loop(quantum=500, per_step=2, window=10)
    for _ in range(300):
        loop.send("flood", 100)
    for number in range(60):
        if number % 5 == 0:
            loop.send("modest", 100)
        loop.step()
    assert max(loop.waits["modest"]) <= 500 / 100 + 1


def test_an_endless_series_of_new_tenants_does_not_starve_an_old_one():
    fairness = DeficitCounters(100)
    fairness.charge("old", 101)
    served: Counter[str] = Counter()
    for number in range(5_000):
        last = last_of(fairness, {"old", number})
        tenant = number if "old" in last else "old"
        fairness.charge(tenant, 10)
        served["old" if tenant == "old" else "new"] += 1
    assert served["old"] > 5_000 / 10


def test_debts_are_bounded():
    fairness = DeficitCounters(100)
    for _ in range(1000):
        fairness.charge("a", 100)
        assert last_of(fairness, {"a", "b"}) <= {"a"}, "b has credit, and cannot be admitted"
    assert serve(fairness, [("a", 10)] * 1000)["b"] <= 5000 + (MAX_DEBT_QUANTA + 2) * 100
