"""The order of admission, and its bound on overtaking."""

from hypothesis import given
from hypothesis import strategies as st

from sgl_vllm.scheduler.policy import Candidate, LongestPrefixFirst

POLICY = LongestPrefixFirst(max_passes=3, max_wait_s=10.0)


def candidates(*entries: tuple[int, float]) -> list[Candidate]:
    return [Candidate(matched_tokens=tokens, arrival_s=arrival) for tokens, arrival in entries]


def test_the_longest_prefix_goes_first():
    assert POLICY.order(candidates((0, 0.0), (50, 1.0), (10, 2.0)), now_s=3.0) == [1, 2, 0]


def test_equal_prefixes_go_in_order_of_arrival():
    assert POLICY.order(candidates((7, 2.0), (7, 1.0), (7, 3.0)), now_s=4.0) == [1, 0, 2]


def test_who_was_overtaken_often_goes_first():
    waiting = [Candidate(0, 0.0, passes=3), *candidates((50, 1.0))]
    assert POLICY.order(waiting, now_s=2.0) == [0, 1]


def test_who_has_waited_long_goes_first():
    assert POLICY.order(candidates((50, 9.0), (0, 0.0)), now_s=10.0) == [1, 0]


def test_preempted_requests_keep_their_place_at_the_head():
    waiting = [Candidate(0, 5.0, goes_first=True), Candidate(0, 0.0, passes=9)]
    assert POLICY.order(waiting, now_s=6.0) == [0, 1]


@given(st.lists(st.tuples(st.integers(0, 99), st.floats(0, 20), st.integers(0, 5)), max_size=30))
def test_the_order_loses_nobody(entries):
    waiting = [Candidate(*entry) for entry in entries]
    assert sorted(POLICY.order(waiting, now_s=20.0)) == list(range(len(waiting)))


@given(
    arrivals=st.lists(st.lists(st.integers(0, 99), max_size=5), min_size=1, max_size=40),
    admitted_per_step=st.integers(1, 4),
)
def test_nobody_is_overtaken_more_often_than_the_bound(arrivals, admitted_per_step):
    """Whatever arrives when: overtaken at most max_passes - 1 + (admitted in one step) times."""
    waiting: list[tuple[int, float]] = []  # matched tokens, arrival
    passes: dict[float, int] = {}
    clock = 0.0
    for step in [*arrivals, *[[]] * 200]:
        for matched in step:
            clock += 1e-6
            waiting.append((matched, clock))
            passes[clock] = 0
        if not waiting:
            continue
        queue = [Candidate(m, arrival, passes[arrival]) for m, arrival in waiting]
        order = POLICY.order(queue, now_s=clock)
        admitted = [waiting[index] for index in order[:admitted_per_step]]
        waiting = [entry for entry in waiting if entry not in admitted]
        for _, arrival in waiting:
            passes[arrival] += sum(later > arrival for _, later in admitted)
    assert max(passes.values(), default=0) <= POLICY.max_passes - 1 + admitted_per_step
    assert not waiting
