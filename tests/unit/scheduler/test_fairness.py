"""Fair shares among clients: what the counters promise, and what comes of it in a line."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from sgl_vllm.radix.node import Match
from sgl_vllm.scheduler.fairness import MAX_DEBT_QUANTA, DeficitCounters
from sgl_vllm.scheduler.policy import Bound, WaitingQueue

LOOSE = Bound(max_passes=10**9, max_delay=1.0, min_delay_tokens=10**12)


def serve(fairness: DeficitCounters, wishes: list[tuple[str, int]]) -> Counter[str]:
    """Serve one wish after the other, a client's name and a number of tokens; a client without
    credit gives way to one with some. Both always wait."""
    served: Counter[str] = Counter()
    for name, num_tokens in wishes:
        last = fairness.without_credit(["a", "b"])
        assert last < {"a", "b"}, "never all of them"
        if name in last:
            (name,) = {"a", "b"} - last
        fairness.charge(name, num_tokens)
        served[name] += num_tokens
    return served


WISHES = st.lists(st.tuples(st.sampled_from("aaab"), st.integers(0, 500)), max_size=200)


@given(st.integers(1, 300), WISHES, st.integers(0, 100))
def test_of_two_clients_that_always_wait_none_is_far_ahead(quantum, wishes, num_before):
    fairness = DeficitCounters(quantum)
    serve(fairness, wishes[:num_before])  # whatever was before
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
def test_never_do_all_who_wait_go_last(quantum, steps):
    fairness = DeficitCounters(quantum)
    for name, num_tokens, waiting in steps:
        fairness.charge(name, num_tokens)
        last = fairness.without_credit(waiting)
        assert last < waiting or not waiting
        assert fairness.without_credit(waiting) == last, "to ask again changes nothing"


def test_a_client_that_has_had_its_share_goes_last_until_the_other_has_had_as_much():
    fairness = DeficitCounters(100)
    fairness.charge("a", 100)
    assert fairness.without_credit({"a", "b"}) == {"a"}
    fairness.charge("b", 99)
    assert fairness.without_credit({"a", "b"}) == {"a"}
    fairness.charge("b", 1)
    assert fairness.without_credit({"a", "b"}) == set()


def test_who_waits_alone_never_goes_last_and_runs_up_no_debt():
    fairness = DeficitCounters(100)
    for _ in range(50):
        fairness.charge("a", 70)
        assert fairness.without_credit({"a"}) == set()
    assert serve(fairness, [("a", 10), ("b", 10)] * 100)["a"] >= 950


def test_an_absent_client_keeps_its_debt_until_others_have_paid_off_as_much():
    fairness = DeficitCounters(100)
    fairness.charge("a", 350)  # 250 more than its credit
    fairness.charge("b", 100)
    assert fairness.without_credit({"b"}) == set()  # a hundred for all
    assert fairness.without_credit({"a", "b"}) == {"a"}
    fairness.charge("b", 200)  # and two more
    assert fairness.without_credit({"b"}) == set()
    assert fairness.without_credit({"a", "b"}) == set()


def test_an_absent_client_does_not_save_up():
    fairness = DeficitCounters(100)
    fairness.charge("b", 50)
    for _ in range(1000):
        fairness.charge("a", 100)
        fairness.without_credit({"a"})
    assert serve(fairness, [("b", 10)] * 40) == {"b": 200, "a": 200}


def test_who_is_gone_and_owes_nothing_is_forgotten():
    fairness = DeficitCounters(100)
    for number in range(1000):
        fairness.charge(str(number), 10)
    fairness.charge("a", 100)
    fairness.without_credit({"a"})
    assert fairness._credit.keys() == {"a"}


def test_a_quantum_is_a_number_of_tokens():
    with pytest.raises(ValueError, match="at least 1"):
        DeficitCounters(0)


class Loop:
    """A line that admits `per_step` a step, and charges what they compute: all of their tokens,
    or as many as `cached` says less."""

    def __init__(self, quantum: int, per_step: int, window: int = 1000) -> None:
        self.line: WaitingQueue[tuple[str, int]] = WaitingQueue("lpm", LOOSE, window)
        self.fairness = DeficitCounters(quantum)
        self.per_step = per_step
        self.num_sent = 0
        self.served: Counter[str] = Counter()
        self.waits: dict[str, list[int]] = {}
        self.num_steps = 0
        self.sent_at: dict[tuple[str, int], tuple[int, int, int]] = {}

    def send(self, client: str, num_tokens: int, num_cached: int = 0) -> None:
        item = (client, self.num_sent)
        self.num_sent += 1
        self.line.add(item, num_tokens, client=client)
        self.line.score(item, Match(num_cached, None))
        self.sent_at[item] = (self.num_steps, num_tokens, num_cached)

    def step(self) -> None:
        last = self.fairness.without_credit(self.line.clients)
        for item in self.line.order(last_clients=last)[: self.per_step]:
            self.line.pop(item)
            client = item[0]
            since, num_tokens, num_cached = self.sent_at.pop(item)
            self.fairness.charge(client, num_tokens - num_cached)
            self.served[client] += num_tokens - num_cached
            self.waits.setdefault(client, []).append(self.num_steps - since)
        self.line.settle([0] * len(self.line.popped))
        self.num_steps += 1


def test_a_flood_does_not_starve_a_modest_client():
    loop = Loop(quantum=500, per_step=2)
    for _ in range(1000):
        loop.send("flood", 100, num_cached=50)
    for number in range(300):
        if number % 5 == 0:
            loop.send("modest", 100)
        loop.step()
    assert len(loop.waits["modest"]) == 60
    assert max(loop.waits["modest"]) <= 500 / 100 + 1, "the flood's credit lasts no longer"


def test_a_flood_longer_than_the_window_does_not_hide_a_modest_client():
    loop = Loop(quantum=500, per_step=2, window=10)
    for _ in range(300):
        loop.send("flood", 100)
    for number in range(60):
        if number % 5 == 0:
            loop.send("modest", 100)
        loop.step()
    assert max(loop.waits["modest"]) <= 500 / 100 + 1


def test_an_endless_row_of_new_clients_does_not_keep_out_an_old_one():
    fairness = DeficitCounters(100)
    fairness.charge("old", 101)
    served = Counter()
    for number in range(20_000):
        last = fairness.without_credit({"old", number})
        client = number if "old" in last else "old"
        fairness.charge(client, 10)
        served["old" if client == "old" else "new"] += 1
    assert served["old"] > 20_000 / 10
    assert len(fairness._credit) < 11_000


def test_a_debt_has_an_end():
    fairness = DeficitCounters(100)
    for _ in range(1000):
        fairness.charge("a", 100)
        assert fairness.without_credit({"a", "b"}) <= {"a"}, "b has credit, and cannot be admitted"
    assert serve(fairness, [("a", 10)] * 1000)["b"] <= 5000 + (MAX_DEBT_QUANTA + 2) * 100


def test_what_is_cached_costs_no_credit():
    loop = Loop(quantum=200, per_step=1)
    for _ in range(500):
        loop.send("repeats itself", 100, num_cached=90)
        loop.send("does not", 100)
    for _ in range(400):
        loop.step()
    assert abs(loop.served["repeats itself"] - loop.served["does not"]) <= 2 * (200 + 100)
    assert len(loop.waits["repeats itself"]) > 5 * len(loop.waits["does not"])


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 1000), st.integers(1, 4), st.lists(st.integers(1, 300), min_size=3))
def test_clients_that_always_wait_get_the_same(quantum, per_step, sizes):
    assume(per_step * max(sizes) <= MAX_DEBT_QUANTA * quantum)
    loop = Loop(quantum, per_step)
    for number in range(200):
        for client in "abc":
            loop.send(client, sizes[(number + ord(client)) % len(sizes)])
    for _ in range(50):
        loop.step()
    assert max(loop.served.values()) - min(loop.served[c] for c in "abc") <= 2 * (
        quantum + per_step * max(sizes)
    )
