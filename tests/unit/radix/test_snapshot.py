"""What a snapshot shows of a tree, and what it does not."""

from __future__ import annotations

import json

from sgl_vllm.radix.snapshot import CacheSnapshot, IsolatedTotals, take_snapshot
from sgl_vllm.radix.tokens import pack
from sgl_vllm.radix.tree import RadixTree


def test_it_holds_no_token_and_no_namespace() -> None:
    tree = RadixTree(block_size=2)
    tree.insert("secret salt", pack([987654]), [1])
    assert "987654" not in str(take_snapshot(tree))
    assert "secret" not in str(take_snapshot(tree))
    assert take_snapshot(tree, max_tokens=9).nodes[0].tokens == [987654]


def test_it_lists_parents_before_children() -> None:
    tree = RadixTree(block_size=2)
    tree.insert("a", pack([1, 2, 3]), [1, 2])
    tree.insert("a", pack([1, 2, 4]), [1, 3])
    tree.insert("b", pack([1]), [4])
    nodes = take_snapshot(tree).nodes
    assert [node.parent for node in nodes] == [None, None, 0, 0]
    assert [node.namespace for node in nodes] == [0, 1, 0, 0]
    short = take_snapshot(tree, max_nodes=2)
    assert (len(short.nodes), short.nodes_left_out) == (2, 2)


def test_isolated_namespaces_are_one_total() -> None:
    tree = RadixTree(block_size=2)
    tree.insert("theirs", pack([4]), [3])
    tree.insert("mine", pack([1, 2, 3]), [1, 2])
    shown = take_snapshot(tree, is_isolated=lambda namespace: namespace == "theirs")
    assert [node.namespace for node in shown.nodes] == [0]
    assert shown.isolated == IsolatedTotals(namespaces=1, num_tokens=1, num_nodes=1, num_blocks=1)
    assert shown.nodes_left_out == 0


def test_it_counts_locked_and_pinned_blocks_and_marks_wanted_nodes() -> None:
    tree = RadixTree(block_size=1)
    tree.insert("", pack([1, 2]), [1, 2])
    tree.unlock([2])
    wanted = tree.match_prefix("", pack([1])).node
    assert wanted is not None
    (node,) = take_snapshot(tree, pinned={2}, wanted={wanted}).nodes
    assert (node.num_locked_blocks, node.num_pinned_blocks) == (1, 1)
    assert node.wanted


def test_its_json_is_what_the_route_promises() -> None:
    tree = RadixTree(block_size=2, clock=lambda: 7.0)
    tree.insert("", pack([1, 2, 3]), [1, 2])
    tree.unlock([1, 2])
    snapshot = CacheSnapshot("lru", 9, 7, 1, take_snapshot(tree, pinned={1}))
    node = {
        "id": 1,
        "parent": None,
        "namespace": 0,
        "num_tokens": 3,
        "num_blocks": 2,
        "num_locked_blocks": 0,
        "num_pinned_blocks": 1,
        "hits": 0,
        "age_s": 0.0,
        "wanted": False,
    }
    wanted = {
        "policy": "lru",
        "total_blocks": 9,
        "free_blocks": 7,
        "num_pinned_blocks": 1,
        "block_size": 2,
        "num_tokens": 3,
        "num_nodes": 1,
        "num_blocks": 2,
        "num_protected_blocks": 0,
        "num_evictable_blocks": 2,
        "isolated": {"namespaces": 0, "num_tokens": 0, "num_nodes": 0, "num_blocks": 0},
        "nodes_left_out": 0,
        "nodes": [node],
    }
    assert json.dumps(snapshot.to_json()) == json.dumps(wanted)
    (with_tokens,) = take_snapshot(tree, max_tokens=2).to_json()["nodes"]
    assert with_tokens == {**node, "num_pinned_blocks": 0, "tokens": [1, 2]}
