"""Where a hit may end because of a recurrent state, and which states are evicted first."""

from __future__ import annotations

from collections.abc import Callable, Collection

import pytest

from sgl_vllm.radix.components.component import States
from sgl_vllm.radix.components.state_order import Kind
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


def node_of(tree: RadixTree, tokens: str) -> Node:
    node = tree.match_prefix("", letters(tokens)).node
    assert node is not None
    return node


def test_a_state_where_a_node_is_split_ends_the_upper_half() -> None:
    tree = make_tree()
    put(tree, "abcdefgh", [10, 11], {4: [50], 8: [51]})
    put(tree, "abcdX", [10, 21])
    assert node_of(tree, "abcd").states == {4: (50,)}
    assert set(evict(tree)) == {21}, "no hit can end in it"
    assert evict(tree) == [50] and hit(tree, "abcdX") == 0
    assert set(evict(tree)) == {11, 51}
    assert evict(tree) == [10]


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


def test_a_partial_last_block_does_not_go_before_the_least_recently_used_leaf() -> None:
    """The state at the end of its sequence would go with it."""
    tree = make_tree()
    put(tree, "uvwxyzUV", [10, 11], {8: [50]})
    put(tree, "abcdef", [12, 13], {6: [51]})
    assert set(tree.evict(1)) == {10, 11, 50}
    assert hit(tree, "abcdef") == 6
    check_tree(tree)
