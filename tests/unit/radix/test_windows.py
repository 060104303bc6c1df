"""What window groups need for a hit, what they give up first, and what comes back."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from sgl_vllm.radix.components.windows import WindowGroup
from sgl_vllm.radix.invariants import check_tree
from sgl_vllm.radix.node import HOLE
from sgl_vllm.radix.tokens import pack
from sgl_vllm.radix.tree import RadixTree
from tests.unit.radix.trees import Clock, letters, sliding_window

ALPHABET = "abcdefghijklmnopqrstuvwxyz"


def make_tree(
    *kinds: Callable[[int], int], block_size: int = 2, window_block_size: int | None = None
) -> RadixTree:
    windows = [WindowGroup(window_block_size or block_size, kind) for kind in kinds]
    return RadixTree(block_size, clock=Clock(), window_groups=windows)


def put(tree: RadixTree, tokens: str, blocks: list[int], *windows: list[int]) -> None:
    """Insert a sequence and unlock its blocks."""
    tree.insert("", letters(tokens), blocks, windows=windows)
    for ids in (blocks, *windows):
        tree.unlock(ids)
    check_tree(tree)


def hit(tree: RadixTree, tokens: str) -> int:
    """How many of the tokens a request can read."""
    match = tree.match_prefix("", letters(tokens))
    return tree.longest_hit(match, len(tokens))


def test_spare_blocks_go_before_any_prefix_and_the_window_at_its_end_stays() -> None:
    """What a fork in the middle would read is worth less than the end of any sequence."""
    tree = make_tree(sliding_window(4))
    put(tree, ALPHABET[:12], [10, 11, 12, 13, 14, 15], [20, 21, 22, 23, 24, 25])
    put(tree, "zyxw", [16, 17], [26, 27])
    assert tree.evict(4) == [20, 21, 22, 23]
    assert (hit(tree, ALPHABET[:12]), hit(tree, "zyxw")) == (12, 4)
    assert hit(tree, ALPHABET[:8]) == 0
    check_tree(tree)


def test_the_window_of_a_hit_one_token_short_of_the_end_stays() -> None:
    """That of the same prompt, whose last token has to run, or of a drafter that reads ahead."""
    tree = make_tree(sliding_window(3))
    put(tree, "abcdefgh", [10, 11, 12, 13], [20, 21, 22, 23])
    assert tree.evict(2) == [20, 21]
    match = tree.match_prefix("", letters("abcdefgh"))
    assert tree.longest_hit(match, 7) == 7, "it reads f, g and h: blocks 22 and 23"


def test_a_fork_keeps_the_window_in_front_of_it() -> None:
    tree = make_tree(sliding_window(4))
    put(tree, ALPHABET[:12], [10, 11, 12, 13, 14, 15], [20, 21, 22, 23, 24, 25])
    put(tree, "abcdefXY", [10, 11, 12, 30], [20, 21, 22, 40])
    assert set(tree.evict(2)) == {20, 23}
    assert [hit(tree, prompt) for prompt in ("abcdefZ", ALPHABET[:12])] == [6, 12]


def test_a_window_in_front_of_what_is_in_use_goes_last_and_cuts_nothing_off() -> None:
    tree = make_tree(sliding_window(2))
    tree.insert("", letters("abcdef"), [10, 11, 12], windows=[[20, 21, 22]])
    tree.insert("", letters("abcdXY"), [10, 11, 32], windows=[[20, 21, 42]])
    tree.unlock([20, 21, 12, 22])  # what runs is at its end, "abcdXY"
    assert set(tree.evict(3)) == {20, 12, 22}
    assert hit(tree, "abcd") == 4
    assert tree.evict(1) == [21]
    assert (hit(tree, "abcd"), hit(tree, "abcdXY")) == (0, 6)
    check_tree(tree)


def test_blocks_of_full_attention_must_be_whole_ones_of_the_other_groups() -> None:
    with pytest.raises(ValueError, match="blocks of 2 tokens are not whole ones of 4"):
        make_tree(sliding_window(3), block_size=2, window_block_size=4)


def test_the_window_before_a_partial_last_block_is_kept_when_that_goes() -> None:
    tree = make_tree(sliding_window(2), block_size=4, window_block_size=2)
    put(tree, "abcdefg", [10, 11], [20, 21, 22, 23])
    assert set(tree.evict(2)) == {20, 11, 22, 23}
    assert hit(tree, "abcdefg") == 4
    check_tree(tree)


def test_all_that_ends_in_a_shared_block_is_notified_when_its_last_copy_goes() -> None:
    tree = make_tree(sliding_window(9), block_size=4)
    put(tree, "abcX", [10], [20])
    put(tree, "abcY", [11], [21])
    put(tree, "abZ", [12], [HOLE])
    tree.evict_block(20)
    tokens = letters("ab")
    tree.watchers.watch(1, "", tokens, tree.match_prefix("", tokens))
    tree.watchers.take_changed()
    assert hit(tree, "ab") == 2
    tree.evict_block(11)
    assert hit(tree, "ab") == 0
    assert set(tree.watchers.take_changed()) == {1}


def test_a_block_may_be_shared_by_any_number_of_nested_prompts() -> None:
    block_size, num_prompts = 1_200, 1_040
    group = WindowGroup(block_size, lambda num_tokens: max(0, num_tokens - 3_999))
    tree = RadixTree(block_size, window_groups=[group])
    for number in range(num_prompts):
        prompt = pack([1] * (1_100 - number) + [1_000 + number])
        blocks = [2 * number + 1], [2 * number + 2]
        tree.insert("", prompt, blocks[0], windows=[blocks[1]])
        tree.unlock([*blocks[0], *blocks[1]])
    assert tree.longest_hit(tree.match_prefix("", pack([1] * 61)), 61) == 61
