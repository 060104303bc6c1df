"""Which contexts are expected to be continued, and how much of the cache they hold."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_vllm.programs.continuations import (
    MAX_KINDS,
    MAX_REMEMBERED,
    MAX_TENANTS,
    Continuations,
)
from sgl_vllm.programs.pauses import MAX_OUTCOMES, MIN_OUTCOMES, Pauses
from sgl_vllm.radix.node import Node
from sgl_vllm.radix.tokens import Tokens, pack
from sgl_vllm.radix.tree import RadixTree

SIZE = 4
HORIZON_S = 10.0


class Sessions:
    """Requests of several sessions, each with its own tokens, over one tree."""

    def __init__(self) -> None:
        self.tree = RadixTree(SIZE)
        self.continuations = Continuations(HORIZON_S)
        self._num_blocks = 0

    def prompt(self, session: int, num_tokens: int = 40) -> Tokens:
        return pack([1, 2, 3, 4, *(1000 * session + i for i in range(num_tokens - 4))])

    def end(
        self,
        session: int,
        now_s: float,
        num_tokens: int = 40,
        kind: str = "",
        tenant: str = "",
        promised_s: float | None = None,
    ) -> Node:
        """A request of this prompt ends, and leaves it unlocked in the tree."""
        prompt = self.prompt(session, num_tokens)
        blocks = list(range(self._num_blocks, self._num_blocks + num_tokens // SIZE))
        self._num_blocks += len(blocks)
        inserted = self.tree.insert(tenant, prompt, blocks)
        self.tree.unlock(blocks)
        leaf = inserted.own_leaf or self.tree.match_prefix(tenant, prompt).node
        assert leaf is not None
        self.continuations.ended(tenant, prompt, leaf, [kind], now_s, promised_s)
        return leaf

    def arrive(self, session: int, now_s: float, num_tokens: int = 44, tenant: str = "") -> None:
        self.continuations.arrived(tenant, self.prompt(session, num_tokens), now_s)

    def num_expected(self, now_s: float) -> int:
        return self.continuations.num_expected_blocks(self.tree.blocks, now_s)

    def learn(
        self, pause_s: float, kind: str = "", first_session: int = 1000, tenant: str = ""
    ) -> None:
        """As many sessions as are needed pause for so long, and are continued."""
        for session in range(first_session, first_session + MIN_OUTCOMES):
            self.end(session, 0.0, kind=kind, tenant=tenant)
            self.arrive(session, pause_s, tenant=tenant)
        self.tree.evict(10**6)


@pytest.fixture
def sessions() -> Sessions:
    return Sessions()


def test_after_short_pauses_a_context_is_expected_for_about_as_long(sessions: Sessions) -> None:
    sessions.learn(pause_s=1.0)
    sessions.end(1, now_s=100.0)
    assert sessions.num_expected(100.5) == 10
    assert sessions.num_expected(103.0) == 0


def test_kinds_of_endings_have_their_own_pauses(sessions: Sessions) -> None:
    sessions.learn(pause_s=1.0, kind="a tool is called")
    sessions.learn(pause_s=60.0, kind="a person is asked", first_session=2000)
    sessions.end(1, now_s=100.0, kind="a person is asked")
    assert sessions.num_expected(100.5) == 0
    sessions.end(2, now_s=100.0, kind="a tool is called")
    assert sessions.num_expected(100.5) == 9  # the first block is shared by now


def test_the_most_specific_kind_that_is_known_counts(sessions: Sessions) -> None:
    sessions.learn(pause_s=60.0)
    sessions.learn(pause_s=1.0, kind="general", first_session=2000)
    continuations, prompt = sessions.continuations, sessions.prompt(1)
    leaf = sessions.end(1, now_s=90.0)
    continuations.ended("", prompt, leaf, ["special", "general"], 100.0)
    assert sessions.num_expected(100.5) == 10
    continuations.ended("", prompt, leaf, ["special", "other"], 200.0)
    assert sessions.num_expected(200.5) == 0


def test_a_continued_context_is_expected_until_it_is_in_use(sessions: Sessions) -> None:
    sessions.learn(pause_s=1.0)
    leaf = sessions.end(1, now_s=100.0)
    assert sessions.num_expected(105.0) == 0
    sessions.arrive(1, now_s=105.0)
    assert sessions.num_expected(105.5) == 10
    sessions.tree.lock(leaf.block_ids)
    assert sessions.num_expected(105.5) == 0


def test_what_is_left_of_an_evicted_context_is_still_counted(sessions: Sessions) -> None:
    sessions.learn(pause_s=1.0)
    sessions.end(1, now_s=100.0, num_tokens=40)
    sessions.arrive(1, now_s=100.1)
    sessions.end(1, now_s=100.2, num_tokens=60)  # a leaf below the first
    assert sessions.num_expected(100.3) == 15
    sessions.tree.evict(7)
    assert sessions.num_expected(100.3) == 8
    sessions.tree.evict(100)
    assert sessions.num_expected(100.3) == 0


def test_a_remembered_context_keeps_no_evicted_node_alive(sessions: Sessions) -> None:
    contexts = [sessions.end(session, now_s=100.0).context for session in range(3)]
    sessions.tree.evict(9)
    assert sum(one is not None and one.leaf is None for one in contexts) == 1
    sessions.tree.evict_block(0)  # which all of them begin with
    assert all(one is not None and one.leaf is None for one in contexts)
    cleared = sessions.end(4, now_s=100.0).context
    sessions.tree.clear()
    assert cleared is not None and cleared.leaf is None


def test_a_promise_counts_until_its_kind_is_known(sessions: Sessions) -> None:
    leaf = sessions.end(1, now_s=100.0)
    sessions.continuations.ended("", sessions.prompt(1), leaf, ["tool"], 100.0, promised_s=3.0)
    assert sessions.num_expected(105.0) == 10 and sessions.num_expected(107.0) == 0
    sessions.learn(pause_s=60.0, kind="tool")
    sessions.end(2, now_s=200.0)
    leaf = sessions.end(3, now_s=200.0)
    sessions.continuations.ended("", sessions.prompt(3), leaf, ["tool"], 200.0, promised_s=3.0)
    assert sessions.num_expected(201.0) == 0


def test_promises_with_a_new_tool_each_are_soon_believed_no_longer(sessions: Sessions) -> None:
    sessions.learn(pause_s=1.0, tenant="honest")
    for session in range(3 * MIN_OUTCOMES):
        sessions.end(session, 100.0, kind=f"{session}", tenant="liar", promised_s=9.0)
    assert sessions.num_expected(100.5) <= 10 * MIN_OUTCOMES
    for session in range(100, 103):  # long after the promises were broken
        sessions.end(session, 1000.0, kind=f"{session}", tenant="liar", promised_s=9.0)
    assert sessions.num_expected(1000.5) == 0


def test_kept_promises_make_up_for_broken_ones(sessions: Sessions) -> None:
    for session in range(MIN_OUTCOMES):
        sessions.end(session, 100.0, kind=f"{session}", promised_s=9.0)
    for session in range(MIN_OUTCOMES):
        sessions.arrive(session, 150.0)
    sessions.tree.evict(10**6)
    sessions.end(1000, 200.0, kind="another", promised_s=9.0)
    assert sessions.num_expected(200.5) == 10


def test_parallel_equal_prompts_are_no_broken_promises(sessions: Sessions) -> None:
    """Of contexts with the same prompt, only the last one can be recognized."""
    for session in range(2 * MIN_OUTCOMES):
        for _ in range(4):
            sessions.end(session, 100.0 * session, kind=f"{session}", promised_s=9.0)
        sessions.arrive(session, 100.0 * session + 1)
    sessions.tree.evict(10**6)
    sessions.end(1000, 10_000.0, kind="another", promised_s=9.0)
    assert sessions.num_expected(10_000.5) == 10


def test_what_a_tenant_does_leaves_what_is_known_of_another(sessions: Sessions) -> None:
    sessions.learn(pause_s=1.0, tenant="honest")
    sessions.end(1, now_s=100.0, tenant="honest")
    for session in range(3 * MAX_REMEMBERED):
        sessions.end(session, 100.0, kind=f"{session}", tenant="liar", promised_s=9.0)
        if session % 2:
            sessions.arrive(session, 100.0, tenant="liar")
    assert sessions.num_expected(500.0) == 0
    sessions.arrive(1, 500.0, tenant="honest")  # its context is still remembered
    assert sessions.num_expected(500.5) == 10
    sessions.end(2, now_s=1000.0, tenant="honest")
    assert sessions.num_expected(1000.5) == 9  # the first block is shared
    assert sessions.num_expected(1003.0) == 0


def test_memory_is_bounded_for_any_number_of_contexts_kinds_and_tenants(
    sessions: Sessions,
) -> None:
    for session in range(3 * MAX_REMEMBERED):
        sessions.end(session, 1.0, 40 + 4 * (session % 50), f"{session}", f"{session}", 9.0)
        sessions.arrive(session - session % 3, 2.0, 400, f"{session}")
    kept = vars(sessions.continuations)
    assert len(kept["_paused"]) <= MAX_REMEMBERED and len(kept["_expected"]) <= MAX_REMEMBERED
    assert len(kept["_pauses_of"]) <= MAX_KINDS and len(kept["_tenants"]) <= MAX_TENANTS
    assert set(kept["_prompts"]) == set(kept["_paused"])


LENGTHS_S = [1e-3 * 2 ** (half_octave / 2) for half_octave in range(40)]


@given(
    st.lists(st.sampled_from(LENGTHS_S), min_size=MIN_OUTCOMES, max_size=60),
    st.integers(0, 40),
    st.sampled_from([0.05, 1.3, 30.0]),
)
def test_the_estimate_ends_where_fewer_than_half_come_back_within_the_horizon(
    pauses_s: list[float], num_abandoned: int, horizon_s: float
) -> None:
    pauses = Pauses()
    for pause_s in pauses_s:
        pauses.add(pause_s)
    for _ in range(num_abandoned):
        pauses.add(None)

    def is_likely(elapsed_s: float) -> bool:
        num_left = sum(one >= elapsed_s for one in pauses_s) + num_abandoned
        num_soon = sum(elapsed_s <= one < elapsed_s + horizon_s for one in pauses_s)
        return 2 * num_soon > num_left

    looked_at = [0.0, *LENGTHS_S, 2**0.5 * LENGTHS_S[-1]]
    expected = next(elapsed_s for elapsed_s in looked_at if not is_likely(elapsed_s))
    assert pauses.expected_for_s(horizon_s) == pytest.approx(expected)


def test_a_quantile_of_pauses_counts_the_continued_ones_only() -> None:
    pauses = Pauses()
    for pause_s in (*[1.0] * 9, *[30.0] * 6):
        pauses.add(pause_s)
    assert pauses.quantile_s(0.5) == 0.0, "too few are known"
    for outcome in (30.0, *[None] * 50):
        pauses.add(outcome)
    assert 1.0 < pauses.quantile_s(0.5) < 1.5
    assert 30.0 < pauses.quantile_s(0.9) < 45.0


def test_new_pauses_replace_old_ones() -> None:
    pauses = Pauses()
    for pause_s in (100.0, 1.0):
        for _ in range(3 * MAX_OUTCOMES):
            pauses.add(pause_s)
    assert pauses.num_outcomes <= MAX_OUTCOMES
    assert 0.5 < pauses.expected_for_s(5.0) < 2.0
