"""Where a hit may end because of a recurrent state, and which states are evicted first."""

from __future__ import annotations

from collections.abc import Callable, Collection

import pytest

from sgl_vllm.radix.components.component import States
from sgl_vllm.radix.components.state_order import Kind
from sgl_vllm.radix.components.windows import WindowGroup
from sgl_vllm.radix.eviction import POLICIES, EvictionPolicy, lru
from sgl_vllm.radix.invariants import check_tree
from sgl_vllm.radix.node import Node
from sgl_vllm.radix.tree import RadixTree
from tests.unit.radix.trees import Clock, letters, num_cached, sliding_window

SIZE = 4


def make_tree(
    num_groups: int = 1, *kinds: Callable[[int], int], policy: EvictionPolicy = lru
) -> RadixTree:
    windows = [WindowGroup(SIZE, kind) for kind in kinds]
    return RadixTree(
        SIZE, policy, clock=Clock(), window_groups=windows, num_recurrent_groups=num_groups
    )


def put(
    tree: RadixTree,
    tokens: str,
    blocks: list[int],
    states: States | None = None,
    *windows: list[int],
) -> None:
    """Insert a sequence that ends, and unlock its blocks, those of states in the order given."""
    tree.insert("", letters(tokens), blocks, windows=windows, states=states)
    if tree.states is not None and states and len(tokens) in states:
        tree.states.mark(states[len(tokens)][0], Kind.END)
    for ids in (blocks, *windows, *(states or {}).values()):
        tree.unlock(list(ids))
    check_tree(tree)


def evict(tree: RadixTree, num_blocks: int = 1, wanted: Collection[Node] = ()) -> list[int]:
    """Evict when all is about equally old."""
    assert isinstance(tree.clock, Clock)
    tree.clock.now += 1000
    evicted = tree.evict(num_blocks, wanted)
    check_tree(tree)
    return evicted


def use(tree: RadixTree, tokens: str) -> None:
    """A request goes on from the state at the end of these tokens, and ends at once."""
    match = tree.match_prefix("", letters(tokens))
    tree.lock(tree.state_ids(match, len(tokens)))
    tree.record_state_use(tree.record_hit(match), len(tokens))
    tree.unlock(tree.state_ids(match, len(tokens)))


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


# -- insert ---------------------------------------------------------------------------------------


def test_a_state_where_a_node_is_split_ends_the_upper_half() -> None:
    tree = make_tree()
    put(tree, "abcdefgh", [10, 11], {4: [50], 8: [51]})
    put(tree, "abcdX", [10, 21])
    assert node_of(tree, "abcd").states == {4: (50,)}
    assert set(evict(tree)) == {21}, "no hit can end in it"
    assert evict(tree) == [50] and hit(tree, "abcdX") == 0
    assert set(evict(tree)) == {11, 51}
    assert evict(tree) == [10]


def test_a_state_that_is_there_already_is_not_taken_again() -> None:
    tree = make_tree()
    put(tree, "abcd", [10], {4: [50]})
    inserted = tree.insert("", letters("abcdefgh"), [20, 21], states={4: [60], 8: [61]})
    assert (inserted.taken, inserted.taken_other_groups) == ([21], [61])
    assert state(tree, "abcdX") == [50] and 60 not in tree
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


def test_states_at_the_ends_of_blocks_go_before_any_prefix_and_the_one_at_its_end_stays() -> None:
    """What diverges there is less likely than what goes on from the end."""
    tree = make_tree()
    put(tree, "abcdefghijkl", [10, 11, 12], {8: [51], 4: [50], 12: [52]})
    put(tree, "zyxw", [13], {4: [53]})
    assert evict(tree) == [51], "it has been out of use for longest"
    assert evict(tree) == [50]
    assert (hit(tree, "abcdefghijkl"), hit(tree, "zyxw")) == (12, 4)
    assert num_cached(tree, "abcdefghijkl") == 12


def test_a_state_that_was_in_use_again_goes_after_the_others_of_its_kind() -> None:
    tree = make_tree()
    put(tree, "abcdefghijkl", [10, 11, 12], {4: [50], 8: [51], 12: [52]})
    tree.lock([50])
    tree.unlock([50])
    assert [evict(tree) for _ in range(2)] == [[51], [50]]


def test_a_conversation_keeps_its_last_state() -> None:
    """Those before it were used, each by the turn after it, and will not be used again."""
    tree = make_tree(2)
    put(tree, "zyxw", [19], {4: [70, 71]})
    put(tree, "abcd", [10], {4: [50, 51]})
    use(tree, "abcd")
    put(tree, "abcdefgh", [10, 11], {8: [52, 53]})
    use(tree, "abcdefgh")
    put(tree, "abcdefghijkl", [10, 11, 12], {12: [54, 55]})
    assert set(evict(tree)) == {50, 51}
    assert set(evict(tree)) == {52, 53}
    assert (hit(tree, "abcdefghijkl"), hit(tree, "zyxw")) == (12, 4)
    assert set(evict(tree)) == {19, 70, 71}, "the conversation that was used last is left"


def test_a_state_where_a_request_will_go_on_stays_while_those_of_blocks_go() -> None:
    tree = make_tree()
    assert tree.states is not None
    tree.insert("", letters("abcdefghijkl"), [10, 11, 12], states={4: [50], 8: [51], 12: [52]})
    tree.states.mark(50, Kind.BRANCH)
    tree.unlock([10, 11, 12, 50, 51, 52])
    assert evict(tree) == [51]
    assert set(evict(tree)) == {11, 12, 52}, "its end is not known as that of a request"
    assert hit(tree, "abcdefgh") == 4
    evict(tree, 9)
    assert not tree.num_blocks and 50 not in tree.states
    tree.states.mark(50, Kind.BRANCH)  # gone: nothing happens


def test_a_state_goes_only_when_none_of_its_blocks_is_locked() -> None:
    tree = make_tree(2)
    own = tree.insert("", letters("abcd"), [10], states={4: [50, 51]}).own_leaf
    tree.insert("", letters("abcdefgh"), [11], own, states={8: [60, 61]})
    assert evict(tree, 9) == []
    tree.unlock([50, 51])
    tree.lock([50])  # a request goes on from it
    tree.evict(0)
    assert tree.states is not None and tree.states.take_first(()) is None
    tree.unlock([50])
    assert set(evict(tree)) == {50, 51}


def test_the_last_state_but_one_in_a_block_outlives_the_last() -> None:
    """The end of a prompt, where the answer was short: its tokens stay."""
    tree = make_tree()
    assert tree.states is not None
    tree.insert("", letters("abcdefg"), [10, 11], states={6: [50], 7: [51]})
    tree.states.mark(50, Kind.BRANCH)
    tree.unlock([10, 11, 50, 51])
    assert evict(tree) == [51]
    assert hit(tree, "abcdefg") == 6
    assert set(evict(tree)) == {10, 11, 50}


def test_states_of_wanted_nodes_go_after_all_others() -> None:
    tree = make_tree()
    put(tree, "abcdefgh", [10, 11], {4: [50], 8: [51]})
    put(tree, "zyxw", [12], {4: [53]})
    wanted = {node_of(tree, "abcdefgh")}
    assert set(evict(tree, 1, wanted)) == {12, 53}
    assert evict(tree, 1, wanted) == [50]
    assert set(evict(tree, 1, {*wanted})) == {10, 11, 51}


def test_what_only_an_ended_program_used_goes_first() -> None:
    tree = make_tree()
    put(tree, "zyxw", [12], {4: [53]})
    put(tree, "abcdefgh", [10, 11], {4: [50], 8: [51]})
    tree.record_end(node_of(tree, "abcdefgh"))
    assert set(evict(tree, 3)) == {10, 11, 50, 51}
    assert hit(tree, "zyxw") == 4


def test_an_end_without_a_state_goes_before_all_states() -> None:
    tree = make_tree()
    put(tree, "abcdefghijkl", [10, 11, 12], {4: [50]})
    put(tree, "zyxw", [13], {4: [53]})
    assert set(evict(tree)) == {11, 12}
    assert (hit(tree, "abcdefgh"), hit(tree, "zyxw")) == (4, 4)


# -- evict, with another policy than LRU ----------------------------------------------------------


def test_with_another_policy_spare_states_go_first_and_then_its_leaves() -> None:
    tree = make_tree(policy=POLICIES["priority"])
    assert tree.states is not None
    tree.insert("", letters("abcdefgh"), [10, 11], priority=5, states={4: [50], 8: [51]})
    tree.insert("", letters("zyxwvuts"), [12, 13], priority=1, states={4: [52], 8: [53]})
    tree.states.mark(52, Kind.BRANCH)
    tree.unlock([10, 11, 12, 13, 50, 51, 52, 53])
    assert evict(tree) == [50], "the only spare one"
    assert set(evict(tree)) == {10, 11, 51}, "the lower priority"
    assert set(evict(tree)) == {13, 53}
    assert set(evict(tree)) == {12, 52}


def test_with_another_policy_a_state_becomes_spare_when_its_leaf_grows() -> None:
    tree = make_tree(policy=POLICIES["lfu"])
    own = tree.insert("", letters("abcd"), [10], states={4: [50]}).own_leaf
    tree.unlock([50])
    assert tree.states is not None and tree.states.take_first(()) is None
    tree.insert("", letters("abcdefgh"), [11], own, states={8: [51]})
    assert tree.evict(1) == [50]
    assert hit(tree, "abcdefgh") == 8
    check_tree(tree)


# -- evict, whatever the policy -------------------------------------------------------------------


def test_a_leaf_is_cut_back_to_the_state_before_and_no_further() -> None:
    tree = make_tree()
    put(tree, "abcdefghijklmnop", [10, 11, 12, 13], {4: [50], 16: [53]})
    tree.lock([50])  # or it would go first
    assert set(evict(tree)) == {11, 12, 13, 53}
    assert (hit(tree, "abcdefghijklmnop"), num_cached(tree, "abcdefghijklmnop")) == (4, 4)
    check_tree(tree)


def test_a_leaf_without_another_state_is_evicted_as_a_whole() -> None:
    tree = make_tree()
    put(tree, "abcdefghijkl", [10, 11, 12], {4: [50], 12: [52]})
    put(tree, "abcdXY", [10, 13], {6: [53]})
    use(tree, "abcd")
    use(tree, "abcd")  # or the state there would go first
    assert set(evict(tree)) == {11, 12, 52}, "the state at 4 belongs to what is above"
    assert (hit(tree, "abcdefghijkl"), hit(tree, "abcdXY")) == (4, 6)
    assert set(evict(tree)) == {13, 53}
    assert set(evict(tree)) == {10, 50}
    assert tree.num_blocks == tree.num_nodes == 0
    check_tree(tree)


@pytest.mark.parametrize("kinds", [(), (sliding_window(4),)])
def test_a_parents_last_state_stays_when_its_only_child_is_evicted(kinds) -> None:
    """As the turns of a conversation: the child has the block in which the parent ends."""
    tree = make_tree(1, *kinds)
    put(tree, "abcdef", [10, 11], {6: [50]}, *([20, 21] for _ in kinds))
    put(tree, "abcdefghij", [10, 12, 13], {10: [51]}, *([20, 22, 23] for _ in kinds))
    tree.lock([50])
    evict(tree, 1 + 2 * len(kinds))
    tree.unlock([50])
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
