"""What the radix tree matches, and what an insert takes and replaces. `lives.py` has a model."""

from __future__ import annotations

import pytest

from sgl_vllm.radix.invariants import check_tree
from sgl_vllm.radix.snapshot import take_snapshot
from sgl_vllm.radix.tokens import pack, unpack
from sgl_vllm.radix.tree import RadixTree
from tests.unit.radix.trees import Clock, hit, put


def found(tree: RadixTree, *tokens: int) -> tuple[int, list[int]]:
    """How many of the tokens are cached, and in which blocks."""
    match = tree.match_prefix("", pack(tokens))
    return match.num_tokens, tree.block_ids(match, match.num_tokens)


def test_packing_keeps_tokens_below_zero_too() -> None:
    assert unpack(pack([0, 1, -1, 2**31 - 1, -(2**31)])) == [0, 1, -1, 2**31 - 1, -(2**31)]


def test_tokens_that_share_bytes_but_not_values_are_different() -> None:
    tree = RadixTree(block_size=4)
    tree.insert("", pack([0x01020304, 0x05060708]), [10])
    assert found(tree, 0x01020304, 0x05060709) == (1, [10])
    assert found(tree, 0x02030405) == (0, [])


def test_matching_changes_nothing() -> None:
    tree = RadixTree(block_size=4, clock=Clock())
    tree.insert("", pack([1, 2, 3, 4, 5]), [10, 11])
    before = take_snapshot(tree, max_tokens=5)
    found(tree, 1, 2, 3)
    assert take_snapshot(tree, max_tokens=5) == before
    check_tree(tree)


def test_a_hit_counts_for_the_tokens_that_were_read_and_not_beyond() -> None:
    """Of three chats with one system prompt, none has read the first chat's end."""
    tree = RadixTree(block_size=4)
    put(tree, "system, first", [10, 11, 12, 13])
    hit(tree, "system, second")
    put(tree, "system, second", [10, 11, 22, 23])
    hit(tree, "system, third")
    shown = [(node["num_tokens"], node["hits"]) for node in take_snapshot(tree)["nodes"]]
    assert shown == [(8, 2), (5, 0), (6, 0)]
    check_tree(tree)


def test_a_second_copy_of_cached_tokens_is_not_taken_but_a_longer_tail_replaces_a_shorter() -> None:
    tree = RadixTree(block_size=2)
    tree.insert("", pack([1, 2, 3, 4, 5]), [10, 11, 12])
    inserted = tree.insert("", pack([1, 2, 3, 4, 5, 6]), [20, 21, 22])
    assert (inserted.taken, inserted.evicted) == ([22], [12])
    assert found(tree, 1, 2, 3, 4, 5) == (5, [10, 11, 22]) and 12 not in tree


def test_a_leaf_grows_only_by_inserts_of_the_request_that_made_it() -> None:
    """Another request that continues it gets a node of its own."""
    tree = RadixTree(block_size=4)
    first = tree.insert("", pack([1, 2, 3, 4, 5]), [10, 11])
    second = tree.insert("", pack(range(1, 10)), [11, 12], own_leaf=first.own_leaf)
    assert (second.taken, second.evicted, tree.num_nodes) == ([12], [], 1)
    assert found(tree, *range(1, 10)) == (9, [10, 11, 12])
    assert tree.insert("", pack([1, 2, 3, 4]), [20]).own_leaf is None
    tree.insert("", pack(range(1, 12)), [10, 11, 22])
    assert tree.num_nodes == 2


def test_too_few_blocks_and_blocks_in_two_places_are_refused() -> None:
    tree = RadixTree(block_size=2)
    with pytest.raises(ValueError, match="3 tokens need more than 1 blocks of 2"):
        tree.insert("", pack([1, 2, 3]), [10])
    own_leaf = tree.insert("", pack([1, 2, 3]), [10, 11]).own_leaf
    with pytest.raises(ValueError, match="5 tokens need more than 2 blocks of 2"):
        tree.insert("", pack([1, 2, 3, 4, 5]), [11], own_leaf)
    with pytest.raises(ValueError, match="another place"):
        tree.insert("", pack([7, 8]), [10])
    check_tree(tree)
