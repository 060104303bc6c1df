"""What a snapshot shows of a tree, and what it does not."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any  # Any: JSON

import pytest

from sgl_vllm.radix.components.component import States
from sgl_vllm.radix.components.windows import HOLE, WindowGroup
from sgl_vllm.radix.snapshot import MAX_RANGES, CacheSnapshot, IsolatedTotals, take_snapshot
from sgl_vllm.radix.tokens import pack
from sgl_vllm.radix.tree import RadixTree
from tests.unit.radix.trees import chunks, letters, sliding_window


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
        "ended": False,
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


def test_the_age_is_that_of_the_last_use_also_after_the_end() -> None:
    now = 1000.0
    tree = RadixTree(block_size=1, clock=lambda: now)
    tree.insert("", pack([1, 2]), [1, 2])
    now = 1007.0
    leaf = tree.match_prefix("", pack([1, 2])).node
    assert leaf is not None
    tree.record_end(leaf)
    (node,) = take_snapshot(tree).nodes
    assert node.age_s == 7.0 and node.ended


# -- what groups other than full attention keep (at random: `lives.py`) ---------------------------


def with_windows(*kinds: Callable[[int], int], num_recurrent_groups: int = 0) -> RadixTree:
    return RadixTree(
        block_size=2,
        window_groups=[WindowGroup(2, kind) for kind in kinds],
        num_recurrent_groups=num_recurrent_groups,
    )


def put(
    tree: RadixTree, tokens: str, windows: list[list[int]], states: States | None = None
) -> None:
    """Insert a sequence with new blocks of full attention."""
    blocks = range(1000 + tree.num_blocks, 1000 + tree.num_blocks + len(tokens))
    tree.insert("", letters(tokens), blocks, windows=windows, states=states)


def nodes_of(tree: RadixTree) -> list[dict[str, Any]]:
    nodes: list[dict[str, Any]] = json.loads(json.dumps(take_snapshot(tree).to_json()["nodes"]))
    return nodes


@pytest.mark.parametrize(
    ("kind", "kept", "hit_ends"),
    [
        # Tokens a to h in blocks of 2, without the block of e and f.
        (sliding_window(4), [[0, 4], [6, 8]], [[1, 4]]),
        (sliding_window(3), [[0, 4], [6, 8]], [[1, 4], [8, 8]]),
        (chunks(4), [[0, 4], [6, 8]], [[1, 4], [8, 8]]),
    ],
)
def test_windows_have_ranges_of_tokens_and_of_hits(kind, kept, hit_ends) -> None:
    tree = with_windows(kind)
    put(tree, "abcdefgh", [[20, 21, 22, 23]])
    tree.evict_block(22)
    (node,) = nodes_of(tree)
    assert node["windows"] == {"num_blocks": 3, "kept": kept, "left_out": 0}
    assert node["hit_ends"] == {"ranges": hit_ends, "left_out": 0}
    assert node["num_blocks"] == 4 + 3
    assert "states" not in node


def test_a_hole_also_shortens_the_hits_that_end_in_the_next_node() -> None:
    tree = with_windows(sliding_window(4))
    put(tree, "abcdefgh", [[20, 21, 22, 23]])
    put(tree, "abcdXYZW", [[20, 21, 32, 33]])
    tree.evict_block(21)
    above, *below = nodes_of(tree)
    assert above["hit_ends"]["ranges"] == [[1, 2]]
    for node in below:
        assert node["windows"]["kept"] == [[0, 4]]
        assert node["hit_ends"]["ranges"] == [[3, 4]], "after 7 tokens, d is not needed"


def test_tokens_are_kept_that_every_window_group_keeps() -> None:
    tree = with_windows(sliding_window(2), sliding_window(2))
    put(tree, "abcdefgh", [[20, 21, HOLE, 23], [HOLE, 31, 32, 33]])
    (node,) = nodes_of(tree)
    assert node["windows"] == {"num_blocks": 6, "kept": [[2, 4], [6, 8]], "left_out": 0}


def test_states_have_positions_in_their_node() -> None:
    tree = with_windows(num_recurrent_groups=2)
    put(tree, "abcd", [], {2: [50, 51]})
    put(tree, "abcdefgh", [], {6: [52, 53], 8: [54, 55]})
    put(tree, "abcdXY", [])
    upper, *lower = nodes_of(tree)
    assert upper["states"] == {"num_blocks": 2, "positions": [2], "left_out": 0}
    assert upper["hit_ends"] == {"ranges": [[2, 2]], "left_out": 0}
    assert [node["states"]["positions"] for node in lower] == [[2, 4], []]
    assert [node["hit_ends"]["ranges"] for node in lower] == [[[2, 2], [4, 4]], []]
    assert "windows" not in upper


def test_no_hit_ends_at_a_state_whose_window_has_a_hole() -> None:
    tree = with_windows(sliding_window(2), num_recurrent_groups=1)
    put(tree, "abcdefgh", [[20, HOLE, 22, 23]], {4: [50], 8: [51]})
    (node,) = nodes_of(tree)
    assert node["states"]["positions"] == [4, 8]
    assert node["hit_ends"]["ranges"] == [[8, 8]]


def test_of_many_ranges_and_positions_the_last_are_listed() -> None:
    num_blocks = 2 * (MAX_RANGES + 3)
    tree = with_windows(sliding_window(1), num_recurrent_groups=1)
    ids = [HOLE if number % 2 else 5000 + number for number in range(num_blocks)]
    states = {2 * number + 1: [9000 + number] for number in range(num_blocks)}
    put(tree, "a" * 2 * num_blocks, [ids], states)
    (node,) = nodes_of(tree)
    last_kept = [4 * (num_blocks // 2 - 1), 4 * (num_blocks // 2 - 1) + 2]
    assert len(node["windows"]["kept"]) == MAX_RANGES
    assert (node["windows"]["kept"][-1], node["windows"]["left_out"]) == (last_kept, 3)
    assert len(node["states"]["positions"]) == MAX_RANGES
    assert node["states"]["left_out"] == num_blocks - MAX_RANGES
    assert node["states"]["positions"][-1] == 2 * num_blocks - 1
