"""What a snapshot shows of a tree, and what it does not. The model of `lives.py` has the rest."""

from __future__ import annotations

import json

import pytest

from sgl_vllm.radix.components.windows import HOLE, WindowGroup
from sgl_vllm.radix.snapshot import MAX_RANGES, take_snapshot
from sgl_vllm.radix.tokens import pack
from sgl_vllm.radix.tree import RadixTree
from tests.unit.radix.trees import chunks, letters, sliding_window


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


@pytest.mark.parametrize(
    ("kind", "hit_ends"),
    [
        (sliding_window(4), [[1, 4]]),
        (sliding_window(3), [[1, 4], [8, 8]]),
        (chunks(4), [[1, 4], [8, 8]]),
    ],
)
def test_windows_have_ranges_of_tokens_and_of_hits(kind, hit_ends) -> None:
    """Tokens a to h in blocks of 2, without the block of e and f."""
    tree = RadixTree(2, window_groups=[WindowGroup(2, kind)])
    tree.insert("", letters("abcdefgh"), [10, 11, 12, 13], windows=[[20, 21, 22, 23]])
    tree.evict_block(22)
    (node,) = json.loads(json.dumps(take_snapshot(tree)["nodes"]))
    assert node["windows"] == {"num_blocks": 3, "kept": [[0, 4], [6, 8]], "left_out": 0}
    assert node["hit_ends"] == {"ranges": hit_ends, "left_out": 0}
    assert node["num_blocks"] == 4 + 3 and "states" not in node


def test_a_hole_also_shortens_the_hits_that_end_in_the_next_node() -> None:
    tree = RadixTree(2, window_groups=[WindowGroup(2, sliding_window(4))])
    tree.insert("", letters("abcdefgh"), [10, 11, 12, 13], windows=[[20, 21, 22, 23]])
    tree.insert("", letters("abcdXYZW"), [10, 11, 14, 15], windows=[[20, 21, 32, 33]])
    tree.evict_block(21)
    above, *below = take_snapshot(tree)["nodes"]
    assert above["hit_ends"]["ranges"] == [(1, 2)]
    for node in below:
        assert node["windows"]["kept"] == [(0, 4)]
        assert node["hit_ends"]["ranges"] == [(3, 4)], "after 7 tokens, d is not needed"


def test_of_many_ranges_and_positions_the_last_are_listed() -> None:
    num_blocks = 2 * (MAX_RANGES + 3)
    windows = [WindowGroup(2, sliding_window(1))]
    tree = RadixTree(2, window_groups=windows, num_recurrent_groups=1)
    ids = [HOLE if number % 2 else 5000 + number for number in range(num_blocks)]
    states = {2 * number + 1: [9000 + number] for number in range(num_blocks)}
    tokens = letters("a" * 2 * num_blocks)
    tree.insert("", tokens, range(1000, 1000 + num_blocks), windows=[ids], states=states)
    (node,) = take_snapshot(tree)["nodes"]
    last_kept = (2 * num_blocks - 4, 2 * num_blocks - 2)
    assert len(node["windows"]["kept"]) == len(node["states"]["positions"]) == MAX_RANGES
    assert (node["windows"]["kept"][-1], node["windows"]["left_out"]) == (last_kept, 3)
    assert node["states"]["left_out"] == num_blocks - MAX_RANGES
    assert node["states"]["positions"][-1] == 2 * num_blocks - 1
