"""Where a hit may end because of a recurrent state, and which states are evicted first."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from sgl_vllm.radix.components.states import States
from sgl_vllm.radix.components.windows import WindowGroup
from sgl_vllm.radix.invariants import check_tree
from sgl_vllm.radix.node import Node
from sgl_vllm.radix.tree import RadixTree
from tests.unit.radix.trees import Clock, letters, num_cached, sliding_window

SIZE = 4


def make_tree(num_groups: int = 1, *kinds: Callable[[int], int]) -> RadixTree:
    windows = [WindowGroup(SIZE, kind) for kind in kinds]
    return RadixTree(SIZE, clock=Clock(), window_groups=windows, num_recurrent_groups=num_groups)


def put(
    tree: RadixTree,
    tokens: str,
    blocks: list[int],
    states: States | None = None,
    *windows: list[int],
) -> None:
    """Insert a sequence and unlock its blocks, those of states in the order given."""
    tree.insert("", letters(tokens), blocks, windows=windows, states=states)
    for ids in (blocks, *windows, *(states or {}).values()):
        tree.unlock(list(ids))
    check_tree(tree)


def hit(tree: RadixTree, tokens: str) -> int:
    """How many of the tokens a request can read."""
    match = tree.match_prefix("", letters(tokens))
    return tree.longest_hit(match, len(tokens))


def state(tree: RadixTree, tokens: str) -> list[int]:
    """The blocks of the state that a request reads."""
    match = tree.match_prefix("", letters(tokens))
    return tree.state_ids(match, tree.longest_hit(match, len(tokens)))


def node_of(tree: RadixTree, tokens: str) -> Node:
    node = tree.match_prefix("", letters(tokens)).node
    assert node is not None
    return node


def watch(tree: RadixTree, tokens: str) -> None:
    match = tree.match_prefix("", letters(tokens))
    tree.watchers.watch(tokens, "", letters(tokens), match)


# -- match ----------------------------------------------------------------------------------------


def test_a_hit_ends_at_the_last_state_at_or_before_its_limit() -> None:
    tree = make_tree()
    put(tree, "abcdefgh", [10, 11], {4: [50], 6: [51]})
    match = tree.match_prefix("", letters("abcdefgh"))
    hits = [tree.longest_hit(match, limit) for limit in range(9)]
    assert hits == [0, 0, 0, 0, 4, 4, 6, 6, 6]
    assert [tree.state_ids(match, position) for position in (4, 6)] == [[50], [51]]
    assert hit(tree, "abcdeX") == 4, "one match ends before the state"


def test_without_a_state_there_is_no_hit() -> None:
    tree = make_tree()
    put(tree, "abcdefgh", [10, 11])
    assert (num_cached(tree, "abcdefgh"), hit(tree, "abcdefgh")) == (8, 0)
    assert state(tree, "abcdefgh") == []


def test_a_state_has_a_block_of_each_group() -> None:
    tree = make_tree(3)
    put(tree, "abcdef", [10, 11], {4: [50, 51, 52], 6: [60, 61, 62]})
    assert state(tree, "abcdefg") == [60, 61, 62]
    assert state(tree, "abcdeX") == [50, 51, 52]
    assert tree.num_blocks == 8


def test_a_state_serves_only_its_namespace() -> None:
    tree = make_tree()
    put(tree, "abcd", [10], {4: [50]})
    match = tree.match_prefix("other", letters("abcd"))
    assert tree.longest_hit(match, 4) == 0


def test_a_hit_needs_its_windows_and_a_state() -> None:
    tree = make_tree(1, sliding_window(4))
    put(tree, "abcdefgh", [10, 11], {4: [50], 8: [51]}, [20, 21])
    assert hit(tree, "abcdefgh") == 8
    tree.evict_block(21)
    assert hit(tree, "abcdefgh") == 4, "the window of 8 has a hole"
    tree.evict_block(50)
    assert hit(tree, "abcdefgh") == 0, "the window of 4 is there, but no state"
    assert tree.longest_hit(tree.match_prefix("", letters("abcd")), 4) == 0
    check_tree(tree)


def test_a_shorter_hit_may_lack_a_window_that_a_longer_one_does_not_need() -> None:
    tree = make_tree(1, sliding_window(4))
    put(tree, "abcdefghijkl", [10, 11, 12], {4: [50], 8: [51], 12: [52]}, [20, 21, 22])
    tree.evict_block(21)
    assert hit(tree, "abcdefghijkl") == 12
    tree.evict_block(52)
    assert hit(tree, "abcdefghijkl") == 4


# -- insert ---------------------------------------------------------------------------------------


def test_a_split_leaves_each_state_on_its_side() -> None:
    tree = make_tree()
    put(tree, "abcdefgh", [10, 11], {4: [50], 8: [51]})
    put(tree, "abcdeXYZ", [10, 21])
    assert node_of(tree, "abcde").states == {4: (50,)}
    assert node_of(tree, "abcdefgh").states == {8: (51,)}
    assert (hit(tree, "abcdefgh"), hit(tree, "abcdeXYZ")) == (8, 4)


def test_a_state_where_a_node_is_split_ends_the_upper_half() -> None:
    tree = make_tree()
    put(tree, "abcdefgh", [10, 11], {4: [50], 8: [51]})
    put(tree, "abcdX", [10, 21])
    assert node_of(tree, "abcd").states == {4: (50,)}
    assert set(tree.evict(1)) == {11, 51}, "it is spare no longer"
    assert hit(tree, "abcdX") == 4


def test_a_state_that_is_there_already_is_not_taken_again() -> None:
    tree = make_tree()
    put(tree, "abcd", [10], {4: [50]})
    inserted = tree.insert("", letters("abcdefgh"), [20, 21], states={4: [60], 8: [61]})
    assert (inserted.taken, inserted.taken_other_groups) == ([21], [61])
    assert state(tree, "abcdX") == [50] and 60 not in tree
    check_tree(tree)


@pytest.mark.parametrize("position", [2, 4, 7, 8])
def test_a_state_after_cached_tokens_enters_the_node_that_holds_its_position(position) -> None:
    tree = make_tree()
    put(tree, "abcdefgh", [10, 11])
    put(tree, "abcdeXYZ", [10, 12])
    inserted = tree.insert("", letters("abcdefgh"), [20, 21], states={position: [60]})
    assert (inserted.taken, inserted.taken_other_groups) == ([], [60])
    holder = node_of(tree, "abcdefgh"[:position])
    assert holder.states == {position: (60,)}
    assert hit(tree, "abcdefgh") == position
    assert hit(tree, "abcdeXYZ") == (position if position <= 5 else 0)
    check_tree(tree)


def test_a_state_before_the_callers_leaf_enters_a_parent_of_it() -> None:
    tree = make_tree()
    own = tree.insert("", letters("abcdefgh"), [10, 11]).own_leaf
    put(tree, "abcdXY", [10, 12])
    tree.insert("", letters("abcdefghij"), [13], own, states={4: [50], 10: [51]})
    assert (hit(tree, "abcdXY"), hit(tree, "abcdefghij")) == (4, 10)
    check_tree(tree)


@pytest.mark.parametrize("block", [10, 50, 30])
def test_a_block_cannot_be_in_the_tree_twice(block) -> None:
    """Of the same sequence, of another state, or of another sequence."""
    tree = make_tree()
    put(tree, "abcdefgh", [10, 11], {4: [50]})
    put(tree, "xyz", [30])
    with pytest.raises(ValueError, match="is already in the tree"):
        tree.insert("", letters("abcdefgh"), [10, 11], states={8: [block]})
    assert hit(tree, "abcdefgh") == 4
    check_tree(tree)


@pytest.mark.parametrize("position", [-1, 0, 9])
def test_a_state_outside_the_sequence_is_refused_and_nothing_is_inserted(position) -> None:
    tree = make_tree()
    with pytest.raises(ValueError, match=r"not all in \(0, 8\]"):
        tree.insert("", letters("abcdefgh"), [10, 11], states={4: [50], position: [51]})
    assert (num_cached(tree, "abcdefgh"), tree.num_blocks) == (0, 0)


# -- evict ----------------------------------------------------------------------------------------


def test_all_blocks_of_a_state_go_together_and_nothing_else_does() -> None:
    tree = make_tree(3)
    put(tree, "abcdefgh", [10, 11], {4: [50, 51, 52], 8: [60, 61, 62]})
    put(tree, "abcdX", [10, 12], {5: [70, 71, 72]})
    assert set(tree.evict_block(51)) == {50, 51, 52}
    assert (hit(tree, "abcdefgh"), hit(tree, "abcdX"), hit(tree, "abcdY")) == (8, 5, 0)
    assert (num_cached(tree, "abcdefgh"), tree.num_blocks) == (8, 9)
    assert tree.evict_block(52) == []
    check_tree(tree)


def test_with_a_block_of_tokens_go_the_states_behind_its_begin() -> None:
    tree = make_tree()
    put(tree, "abcdefgh", [10, 11], {4: [50], 5: [51]})
    put(tree, "abcdefghij", [10, 11, 12], {8: [52], 10: [53]})
    assert set(tree.evict_block(11)) == {11, 12, 51, 52, 53}
    assert hit(tree, "abcdefghij") == 4
    check_tree(tree)


def test_spare_states_go_before_any_prefix_and_the_state_at_its_end_stays() -> None:
    """What diverges inside a node is less likely than what continues its end."""
    tree = make_tree()
    put(tree, "abcdefghijkl", [10, 11, 12], {8: [51], 4: [50], 12: [52]})
    put(tree, "zyxw", [13], {4: [53]})
    assert tree.states is not None and tree.states.num_spare_blocks == 2
    assert tree.evict(1) == [51], "it has been spare for longest"
    assert tree.evict(1) == [50]
    assert (hit(tree, "abcdefghijkl"), hit(tree, "zyxw")) == (12, 4)
    assert num_cached(tree, "abcdefghijkl") == 12
    check_tree(tree)


def test_a_spare_state_that_was_in_use_again_goes_after_the_others() -> None:
    tree = make_tree()
    put(tree, "abcdefghijkl", [10, 11, 12], {4: [50], 8: [51], 12: [52]})
    tree.lock([50])
    tree.unlock([50])
    assert [tree.evict(1) for _ in range(2)] == [[51], [50]]


def test_a_state_that_requests_are_expected_to_go_on_from_is_not_spare() -> None:
    tree = make_tree(2)
    assert tree.states is not None
    own = tree.insert("", letters("abcd"), [10], states={4: [50, 51]}).own_leaf
    tree.states.expect(51)
    tree.unlock([50, 51])
    tree.insert("", letters("abcdefgh"), [11], own, states={8: [60, 61]})
    assert tree.states.num_spare_blocks == 0
    put(tree, "zyxw", [12], {4: [70, 71]})
    assert tree.evict(1) == [12, 70, 71], "an unused prefix goes first"
    tree.unlock([10, 11, 60, 61])
    tree.evict(9)
    assert not tree.num_blocks and 50 not in tree.states
    tree.states.expect(50)  # gone: nothing happens
    check_tree(tree)


def test_a_spare_state_goes_as_a_whole() -> None:
    tree = make_tree(2)
    put(tree, "abcdefgh", [10, 11], {4: [50, 51], 8: [60, 61]})
    assert set(tree.evict(1)) == {50, 51}
    check_tree(tree)


def test_a_state_at_the_end_of_a_leaf_becomes_spare_when_the_leaf_grows() -> None:
    tree = make_tree()
    assert tree.states is not None
    own = tree.insert("", letters("abcd"), [10], states={4: [50]}).own_leaf
    tree.unlock([50])
    assert tree.states.num_spare_blocks == 0
    tree.insert("", letters("abcdefgh"), [11], own, states={8: [51]})
    assert tree.states.num_spare_blocks == 1
    assert tree.evict(1) == [50]
    assert hit(tree, "abcdefgh") == 8
    check_tree(tree)


def test_a_state_that_is_locked_when_the_leaf_grows_is_spare_once_it_is_not() -> None:
    tree = make_tree(2)
    own = tree.insert("", letters("abcd"), [10], states={4: [50, 51]}).own_leaf
    tree.insert("", letters("abcdefgh"), [11], own, states={8: [60, 61]})
    assert tree.evict(9) == []
    assert tree.states is not None
    tree.unlock([50])
    assert tree.states.num_spare_blocks == 0, "a block of it is still in use"
    tree.unlock([51])
    assert tree.states.num_spare_blocks == 2
    assert set(tree.evict(1)) == {50, 51}
    check_tree(tree)


def test_a_leaf_is_cut_back_to_the_state_before_and_no_further() -> None:
    tree = make_tree()
    put(tree, "abcdefghijklmnop", [10, 11, 12, 13], {4: [50], 16: [53]})
    tree.lock([50])  # or it would go first
    assert set(tree.evict(1)) == {11, 12, 13, 53}
    assert (hit(tree, "abcdefghijklmnop"), num_cached(tree, "abcdefghijklmnop")) == (4, 4)
    check_tree(tree)


def test_a_leaf_without_another_state_is_evicted_as_a_whole() -> None:
    tree = make_tree()
    put(tree, "abcdefghijkl", [10, 11, 12], {4: [50], 12: [52]})
    put(tree, "abcdXY", [10, 13], {6: [53]})
    assert set(tree.evict(1)) == {11, 12, 52}, "the state at 4 belongs to what is above"
    assert (hit(tree, "abcdefghijkl"), hit(tree, "abcdXY")) == (4, 6)
    assert set(tree.evict(1)) == {13, 53}
    assert set(tree.evict(1)) == {10, 50}
    assert tree.num_blocks == tree.num_nodes == 0
    check_tree(tree)


@pytest.mark.parametrize("kinds", [(), (sliding_window(4),)])
def test_a_parents_last_state_stays_when_its_only_child_is_evicted(kinds) -> None:
    """As the turns of a conversation: the child has the block in which the parent ends."""
    tree = make_tree(1, *kinds)
    put(tree, "abcdef", [10, 11], {6: [50]}, *([20, 21] for _ in kinds))
    put(tree, "abcdefghij", [10, 12, 13], {10: [51]}, *([20, 22, 23] for _ in kinds))
    tree.evict(1 + 2 * len(kinds))
    check_tree(tree)
    assert (hit(tree, "abcdefghij"), num_cached(tree, "abcdefghij")) == (6, 6)
    assert 12 in tree, "the shared block"
    tree.evict(tree.num_evictable_blocks)
    assert tree.num_blocks == 0


def test_locked_states_stay() -> None:
    tree = make_tree()
    tree.insert("", letters("abcdefgh"), [10, 11], states={4: [50], 8: [51]})
    assert tree.evict(9) == []
    tree.unlock([50])
    assert tree.evict(9) == [50]
    check_tree(tree)


def test_a_state_before_what_is_in_use_goes_last_and_cuts_nothing_off() -> None:
    tree = make_tree()
    tree.insert("", letters("abcdef"), [10, 11], states={4: [50], 6: [51]})
    tree.insert("", letters("abcdXY"), [10, 12], states={6: [52]})
    tree.unlock([11, 50, 51])
    assert set(tree.evict(2)) == {11, 51}
    assert tree.evict(1) == [50]
    assert (num_cached(tree, "abcdXY"), hit(tree, "abcdXY"), hit(tree, "abcd")) == (6, 6, 0)
    check_tree(tree)


def test_a_partial_last_block_does_not_go_before_the_least_recently_used_leaf() -> None:
    """The state at the end of its sequence would go with it."""
    tree = make_tree()
    put(tree, "uvwxyzUV", [10, 11], {8: [50]})
    put(tree, "abcdef", [12, 13], {6: [51]})
    assert set(tree.evict(1)) == {10, 11, 50}
    assert hit(tree, "abcdef") == 6
    check_tree(tree)


def test_what_has_not_been_used_for_long_expires_with_its_states() -> None:
    clock = Clock()
    tree = RadixTree(SIZE, clock=clock, num_recurrent_groups=1)
    put(tree, "abcdefgh", [10, 11], {4: [50], 8: [51]})
    clock.now = 100
    put(tree, "xyz", [12], {3: [52]})
    assert set(tree.expire(50)) == {10, 11, 50, 51}
    assert (hit(tree, "abcdefgh"), hit(tree, "xyz")) == (0, 3)
    check_tree(tree)


def test_clear_leaves_no_state() -> None:
    tree = make_tree(2)
    put(tree, "abcdefgh", [10, 11], {4: [50, 51], 8: [60, 61]})
    tree.clear()
    assert tree.states is not None
    assert (tree.num_blocks, len(tree.states), tree.states.num_spare_blocks) == (0, 0, 0)
    put(tree, "abcd", [10], {4: [50, 51]})
    assert state(tree, "abcdX") == [50, 51]


# -- watch ----------------------------------------------------------------------------------------


@pytest.fixture
def watched() -> RadixTree:
    """Two sequences that share eight tokens, and watchers of all kinds of matches with them."""
    tree = make_tree()
    put(tree, "abcdefghij", [10, 11, 12], {10: [50]})
    put(tree, "abcdefghijkl", [10, 11, 14])
    put(tree, "abcdefghXY", [10, 11, 13])
    for tokens in ("abQ", "abcdefQ", "abcdefghQ", "abcdefghijklQ", "abcdefghXYQ", "Q"):
        watch(tree, tokens)
    return tree


def test_a_state_that_comes_notifies_the_matches_with_a_longer_hit(watched: RadixTree) -> None:
    watched.insert("", letters("abcdef"), [20, 21], states={6: [60]})
    changed = set(watched.watchers.take_changed())
    assert changed >= {"abcdefQ", "abcdefghQ", "abcdefghXYQ"}
    assert changed.isdisjoint({"abcdefghijklQ", "Q"}), "one has a later state"


def test_a_state_that_goes_notifies_the_matches_with_a_shorter_hit(watched: RadixTree) -> None:
    watched.evict_block(50)
    assert watched.watchers.take_changed() == ["abcdefghijklQ"]


def test_a_spare_state_that_is_evicted_notifies_the_matches_with_a_shorter_hit(
    watched: RadixTree,
) -> None:
    put(watched, "abcdef", [20, 21], {6: [60]})
    for tokens in ("abcdefghXYQ", "abcdefQ"):
        watch(watched, tokens)
    watched.watchers.take_changed()
    assert watched.evict(1) == [60]
    assert set(watched.watchers.take_changed()) == {"abcdefghXYQ", "abcdefQ"}
