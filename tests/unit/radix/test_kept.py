"""Prefixes that clients ask to keep: what is evicted in their place, and from whom."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_vllm.radix.invariants import check_tree
from sgl_vllm.radix.node import subtree
from sgl_vllm.radix.tree import RadixTree
from tests.unit.radix.trees import Clock, letters, put


def tree_of(*prompts: str, max_blocks: int = 100, size: int = 2) -> tuple[RadixTree, Clock]:
    """In order of their last use. A prompt of the tenant "B" begins with a capital letter."""
    clock = Clock()
    tree = RadixTree(block_size=size, clock=clock)
    tree.kept.max_blocks = max_blocks
    for number, prompt in enumerate(prompts):
        blocks = [10 * number + place for place in range(-(-len(prompt) // size))]
        put(tree, prompt, blocks, tenant_of(prompt))
    return tree, clock


def tenant_of(prompt: str) -> str:
    return "B" if prompt[0].isupper() else ""


def keep(tree: RadixTree, prompt: str, keep_s: float = 60) -> None:
    tree.keep(tenant_of(prompt), letters(prompt), keep_s)
    check_tree(tree)


def left(tree: RadixTree, *prompts: str) -> list[int]:
    return [tree.match_prefix(tenant_of(one), letters(one)).num_tokens for one in prompts]


def test_the_tenants_next_leaf_goes_in_place_of_one_that_is_kept() -> None:
    tree, _ = tree_of("abcd", "efgh", "ijkl")
    for prompt in ("abcd", "unknown", "a"):  # the last is no whole block
        keep(tree, prompt)
    tree.evict(2)
    assert left(tree, "abcd", "efgh", "ijkl") == [4, 0, 4]
    tree.evict(2)
    assert left(tree, "abcd", "ijkl") == [4, 0]
    assert len(tree.evict(2)) == 2 and tree.num_nodes == 0  # nothing else is left


def test_a_mark_ends_with_its_time() -> None:
    tree, clock = tree_of("abcd", "efgh", "ijkl")
    keep(tree, "abcd", 60)
    keep(tree, "efgh", 3600)
    clock.now += 61
    tree.evict(2)
    assert left(tree, "abcd", "efgh", "ijkl") == [0, 4, 4]


def test_of_a_tenants_marks_the_last_ones_hold_within_its_share() -> None:
    tree, _ = tree_of("abcd", "efgh", "ijkl", "mnop", max_blocks=4)
    for prompt in ("abcd", "efgh", "ijkl"):
        keep(tree, prompt)
    tree.evict(4)
    assert left(tree, "abcd", "efgh", "ijkl", "mnop") == [0, 4, 4, 0]
    tree.kept.max_blocks = 0
    keep(tree, "ijkl")  # no share, no new marks


@pytest.mark.parametrize("marks_all", [True, False])
def test_marks_take_nothing_from_another_tenant(marks_all: bool) -> None:
    """Two tenants use the cache by turns. One marks all of its prompts, or every other one."""
    prompts = [pair for a in "abcdefgh" for pair in (4 * a, 4 * a.upper())]
    (marked, _), (plain, _) = tree_of(*prompts), tree_of(*prompts)
    for prompt in prompts[:: 2 if marks_all else 4]:
        keep(marked, prompt)
    others = prompts[1::2]
    for _ in range(16):
        for tree in (marked, plain):
            tree.evict(2)
            check_tree(tree)
        assert left(marked, *others) == left(plain, *others)
        assert sum(left(marked, *prompts)) == sum(left(plain, *prompts))
        if marks_all:
            assert left(marked, *prompts) == left(plain, *prompts)
        else:
            kept = left(marked, *prompts[::4])
            assert sum(kept) == min(16, sum(left(marked, *prompts[::2])))


steps = st.lists(
    st.tuples(
        st.sampled_from(["put", "keep", "hit", "evict", "wait"]),
        st.text("ab", min_size=1, max_size=7),
        st.integers(1, 4),
    ),
    max_size=60,
)


@given(steps, st.integers(0, 6))
def test_whatever_is_marked_the_tree_stays_consistent_and_everything_can_go(
    steps: list[tuple[str, str, int]], max_blocks: int
) -> None:
    clock, free = Clock(), list(range(1000))
    tree = RadixTree(block_size=2, clock=clock)
    tree.kept.max_blocks = max_blocks
    for what, text, number in steps:
        if what == "put":
            text, blocks = text * number, [free.pop() for _ in range(-(-len(text * number) // 2))]
            put(tree, text, blocks, number % 2)
        elif what == "keep":
            tree.keep(number % 2, letters(text * number), number)
        elif what == "hit":
            tree.record_hit(tree.match_prefix(number % 2, letters(text)))
        elif what == "evict":
            wanted = {node for node in [tree.match_prefix(0, letters(text)).node] if node}
            num_blocks = tree.num_blocks
            assert len(tree.evict(number, wanted)) >= min(number, num_blocks)
        clock.now += what == "wait" and number
        check_tree(tree)
        for root in tree.roots.values():
            marked = [len(node.block_ids) for node in subtree(root) if node.kept_until]
            assert sum(marked) <= max_blocks
        assert len(tree.kept._tenants) <= len(tree.roots)
    tree.evict(1000)
    assert not tree.num_blocks and not tree.kept._tenants


def test_a_mark_beyond_the_share_costs_no_other_mark() -> None:
    tree, _ = tree_of("abcd", "efghijkl", "mnop", max_blocks=2)
    keep(tree, "abcd")
    keep(tree, "efghijkl")
    tree.evict(2)
    assert left(tree, "abcd", "efghijkl", "mnop") == [4, 4, 4]
