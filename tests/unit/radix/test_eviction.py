"""What the tree evicts first, and what it never evicts."""

from __future__ import annotations

import pytest

from sgl_vllm.radix.eviction_policies import POLICIES
from sgl_vllm.radix.tree import RadixTree
from tests.unit.radix.trees import Clock, hit, letters, num_cached, put


def test_a_partial_last_block_goes_before_whole_blocks_of_older_leaves() -> None:
    tree = RadixTree(block_size=2, clock=Clock())
    put(tree, "ab", [10])
    put(tree, "cde", [11, 12])
    put(tree, "fgh", [13, 14])
    assert [tree.evict(1) for _ in range(5)] == [[12], [14], [10], [11], [13]]


def test_a_parent_goes_after_its_children() -> None:
    tree = RadixTree(block_size=2)
    put(tree, "abcd", [10, 11])
    put(tree, "abxy", [10, 12])
    hit(tree, "abcd")
    assert [tree.evict(1) for _ in range(4)] == [[12], [11], [10], []]
    assert tree.num_nodes == 0


@pytest.mark.parametrize(
    ("policy", "order"),
    [
        ("lru", "bcda"),  # by last use
        ("lfu", "cdba"),  # c and d were never hit, b once, a twice
        ("slru", "cdba"),
        ("priority", "cdab"),  # an important request has read b and a
    ],
)
def test_policies_choose_the_leaf(policy: str, order: str) -> None:
    tree = RadixTree(block_size=1, policy=POLICIES[policy], clock=Clock())
    for block, name in enumerate("abcd"):
        put(tree, name, [block])
    hit(tree, "b", priority=-2)
    hit(tree, "a", priority=-1)
    tree.record_use(tree.match_prefix("", letters("c")).node)
    tree.record_use(tree.match_prefix("", letters("d")).node)
    hit(tree, "a")
    assert "".join("abcd"[tree.evict(1)[0]] for _ in range(4)) == order


@pytest.mark.parametrize("policy", POLICIES)
def test_using_a_prefix_never_makes_it_go_earlier(policy: str) -> None:
    """`LeafQueue` relies on keys that only grow."""
    tree = RadixTree(block_size=1, policy=POLICIES[policy], clock=Clock())
    put(tree, "a", [0])
    node = tree.match_prefix("", letters("a")).node
    assert node is not None
    keys = [POLICIES[policy](node)]
    for priority in (0, 3, -1, -1, 2):
        hit(tree, "a", priority)
        keys.append(POLICIES[policy](node))
        tree.record_use(node, priority)
        keys.append(POLICIES[policy](node))
    assert keys == sorted(keys)


def test_what_waiting_requests_match_goes_last() -> None:
    tree = RadixTree(block_size=1)
    for block, name in enumerate("abc"):
        put(tree, name, [block])
    wanted = tree.match_prefix("", letters("a")).node
    assert wanted is not None
    assert tree.evict(1, {wanted}) == [1]
    assert tree.evict(2, {wanted}) == [2, 0]


def test_blocks_ahead_go_with_the_leaf_that_is_cut_and_never_from_a_wanted_one() -> None:
    tree = RadixTree(block_size=1, clock=Clock())
    put(tree, "abcd", [0, 1, 2, 3])
    put(tree, "xyz", [4, 5, 6])
    wanted = tree.match_prefix("", letters("xyz")).node
    assert wanted is not None
    assert sorted(tree.evict(1, {wanted}, num_ahead=1)) == [2, 3]
    assert sorted(tree.evict(1, {wanted}, num_ahead=5)) == [0, 1]
    assert tree.evict(1, {wanted}, num_ahead=5) == [6]
    assert sorted(tree.evict(1, num_ahead=5)) == [4, 5]


def test_what_was_not_used_for_long_expires() -> None:
    clock = Clock()
    tree = RadixTree(block_size=1, policy=POLICIES["lfu"], clock=clock)
    for name in "abc":
        put(tree, name, [ord(name)])
    clock.now = 10
    hit(tree, "b")
    tree.lock([ord("c")])
    assert tree.expire(unused_since=5) == [ord("a")]
    tree.unlock([ord("c")])
    assert tree.expire(unused_since=5) == [ord("c")]
    assert [num_cached(tree, name) for name in "abc"] == [0, 1, 0]


def test_the_queue_of_leaves_does_not_grow_with_use() -> None:
    tree = RadixTree(block_size=1)
    for block in range(10):
        put(tree, chr(97 + block), [block])
    for _ in range(1000):
        tree.lock([3])
        tree.unlock([3])
    for block in range(100, 3000):
        put(tree, "xy" + chr(block), [10, 11, block])
        tree.evict_block(block)
    assert len(tree.order._leaves._heap) < 200


# -- sequences that end ---------------------------------------------------------------------------


def end(tree: RadixTree, tokens: str, num_users: int = 1) -> None:
    leaf = tree.match_prefix("", letters(tokens)).node
    assert leaf is not None
    tree.record_end(leaf, num_users)


def test_of_sequences_that_have_ended_the_longest_unused_goes_first() -> None:
    tree = RadixTree(block_size=1, clock=Clock())
    for number, letter in enumerate("abc"):
        put(tree, letter, [10 + number])
    for letter in "cab":
        end(tree, letter)
        end(tree, letter)  # again: nothing changes
    assert [tree.evict(1) for _ in range(3)] == [[10], [11], [12]]


@pytest.mark.parametrize("name", ["lfu", "slru"])
def test_a_sequence_that_has_ended_goes_before_those_never_hit(name: str) -> None:
    tree = RadixTree(block_size=1, policy=POLICIES[name], clock=Clock())
    put(tree, "ab", [10, 11])
    put(tree, "cd", [12, 13])
    hit(tree, "cd")
    end(tree, "cd")
    assert {*tree.evict(2)} == {12, 13}


def test_what_others_read_too_does_not_end_with_a_session() -> None:
    tree = RadixTree(block_size=1, clock=Clock())
    put(tree, "x", [9])
    put(tree, "a", [10])
    for _ in range(3):  # of other sessions, whose ends are evicted by now
        hit(tree, "a")
    put(tree, "ab", [10, 11])
    end(tree, "ab")
    assert [tree.evict(1) for _ in range(3)] == [[11], [9], [10]]


@pytest.mark.parametrize(("num_users", "order"), [(1, "bax"), (2, "bxa"), (3, "bax")])
def test_the_first_branch_to_end_leaves_what_all_branches_share(num_users: int, order: str) -> None:
    blocks = {"x": 9, "a": 10, "b": 11}
    tree = RadixTree(block_size=1, clock=Clock())
    put(tree, "x", [9])
    put(tree, "a", [10])  # by the parent, whose other branches have not read it yet
    hit(tree, "a")
    put(tree, "ab", [10, 11])
    end(tree, "ab", num_users)
    assert [tree.evict(1) for _ in order] == [[blocks[one]] for one in order]


@pytest.mark.parametrize(("num_users", "order"), [(2, "cxba"), (3, "cbxa"), (4, "cbax")])
def test_a_branch_of_two_requests_ends_with_both(num_users: int, order: str) -> None:
    blocks = {"x": 9, "a": 10, "b": 11, "c": 12}
    tree = RadixTree(block_size=1, clock=Clock())
    put(tree, "x", [9])
    put(tree, "a", [10])
    hit(tree, "a")
    put(tree, "ab", [10, 11])
    hit(tree, "ab")
    put(tree, "abc", [10, 11, 12])
    end(tree, "abc", num_users)
    assert [tree.evict(1) for _ in order] == [[blocks[one]] for one in order]
