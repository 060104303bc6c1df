"""What a snapshot shows of a tree, and what it does not. The model of `lives.py` has the rest."""

from __future__ import annotations

import json

from sgl_vllm.radix.snapshot import MAX_STATES, take_snapshot
from sgl_vllm.radix.tokens import pack
from sgl_vllm.radix.tree import RadixTree
from tests.unit.radix.trees import letters


def test_it_holds_no_token_and_no_namespace() -> None:
    tree = RadixTree(block_size=2)
    tree.insert("secret salt", pack([987654]), [1])
    assert "987654" not in str(take_snapshot(tree)) and "secret" not in str(take_snapshot(tree))
    assert take_snapshot(tree, max_tokens=9)["nodes"][0]["tokens"] == [987654]


def test_it_lists_parents_before_children_and_isolated_namespaces_as_one_total() -> None:
    tree = RadixTree(block_size=2)
    tree.insert("theirs", pack([4]), [9])
    tree.insert("a", pack([1, 2, 3]), [1, 2])
    tree.insert("a", pack([1, 2, 4]), [1, 3])
    tree.insert("b", pack([1]), [4])
    shown = take_snapshot(tree, is_isolated=lambda namespace: namespace == "theirs")
    places = [(node["namespace"], node["parent"]) for node in shown["nodes"]]
    assert places == [(0, None), (1, None), (0, 0), (0, 0)]
    totals = {"namespaces": 1, "num_tokens": 1, "num_nodes": 1, "num_blocks": 1}
    assert (shown["isolated"], shown["nodes_left_out"]) == (totals, 0)
    short = take_snapshot(tree, max_nodes=2)
    assert (len(short["nodes"]), short["nodes_left_out"]) == (2, 3)


def test_its_json_is_what_the_route_promises() -> None:
    now = 7.0
    tree = RadixTree(block_size=2, clock=lambda: now)
    tree.insert("", pack([1, 2, 3]), [1, 2])
    tree.unlock([2])
    leaf = tree.match_prefix("", pack([1])).node
    assert leaf is not None
    now = 8.5
    tree.record_end(leaf)  # which leaves the age as it is
    node = {
        "id": 1,
        "parent": None,
        "namespace": 0,
        "num_tokens": 3,
        "num_blocks": 2,
        "num_locked_blocks": 1,
        "num_pinned_blocks": 1,
        "hits": 0,
        "age_s": 1.5,
        "wanted": True,
        "ended": True,
        "tokens": [1, 2],
        "context": {"state": "unknown"},
    }
    wanted = {
        "block_size": 2,
        "num_tokens": 3,
        "num_nodes": 1,
        "num_blocks": 2,
        "num_protected_blocks": 1,
        "num_evictable_blocks": 1,
        "isolated": {"namespaces": 0, "num_tokens": 0, "num_nodes": 0, "num_blocks": 0},
        "nodes_left_out": 0,
        "nodes": [node],
    }
    contexts = {leaf: {"state": "unknown"}}
    shown = take_snapshot(tree, pinned={1}, wanted={leaf}, max_tokens=2, contexts=contexts)
    assert json.dumps(shown) == json.dumps(wanted)


def test_of_many_states_the_last_are_listed() -> None:
    num_blocks = MAX_STATES + 3
    tree = RadixTree(2, num_recurrent_groups=1)
    states = {2 * number + 1: [9000 + number] for number in range(num_blocks)}
    tree.insert("", letters("a" * 2 * num_blocks), range(num_blocks), states=states)
    (node,) = take_snapshot(tree)["nodes"]
    assert node["states"] == {"positions": [*states][3:], "left_out": 3}
    assert node["num_blocks"] == 2 * num_blocks
