"""What random lives of a tree with several groups have in common: known sequences, and watchers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any  # Any: hypothesis's `data`

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from sgl_vllm.radix.node import Match, Namespace
from sgl_vllm.radix.snapshot import take_snapshot
from sgl_vllm.radix.tokens import pack
from sgl_vllm.radix.tree import RadixTree


class LivesOfATree(RuleBasedStateMachine):
    """A subclass sets these in its `initialize` rule.

    Attributes:
        sizes: tokens per block of each group, full attention first.
        kinds: what each window group skips.
        content: what each block holds: its namespace, group, number and tokens.
        inserted: sequences that were in the tree, with their namespaces.
        watching: by watcher, a sequence, and its match and hit when it was last watched.
    """

    tree: RadixTree
    sizes: list[int]
    kinds: list[Callable[[int], int]]
    content: dict[int, Any]
    inserted: list[tuple[str, list[int]]]
    watching: dict[int, tuple[str, list[int], tuple[Match, int]]]

    def num_skipped(self, group: int, num_tokens: int) -> int:
        return self.kinds[group - 1](num_tokens) if group else 0

    def hit_of(self, namespace: str, tokens: list[int]) -> tuple[Match, int]:
        match = self.tree.match_prefix(namespace, pack(tokens))
        return match, self.tree.longest_hit(match, len(tokens))

    def watch_from_now(self, watcher: int, namespace: str, tokens: list[int]) -> None:
        match = self.tree.match_prefix(namespace, pack(tokens))
        self.tree.watchers.watch(watcher, namespace, pack(tokens), match)
        self.watching[watcher] = namespace, tokens, self.hit_of(namespace, tokens)

    def draw_continuation(
        self, data: Any, namespace: str, tokens: list[int]
    ) -> tuple[str, list[int]]:
        if self.inserted and data.draw(st.integers(0, 3), "0 if it shares by chance only"):
            namespace, earlier = data.draw(st.sampled_from(self.inserted))
            length = len(earlier) - data.draw(st.integers(0, len(earlier) - 1), "so many cut off")
            tokens = [*earlier[:length], *tokens[:9]]
        return namespace, tokens

    # -- what a snapshot says of every node ---------------------------------------------------

    def longest_by_the_model(
        self, namespace: Namespace, tokens: list[int], num_matched: int, limit: int
    ) -> int:
        """The longest hit, by what every block in the tree holds."""
        raise NotImplementedError

    @precondition(lambda self: self.inserted)
    @rule()
    def a_snapshot_says_what_is_kept_and_where_hits_end(self):
        sequences: list[list[int]] = []
        for node in take_snapshot(self.tree, max_tokens=10_000).nodes:
            assert node.tokens is not None and node.hit_ends is not None
            before = [] if node.parent is None else sequences[node.parent]
            tokens = [*before, *node.tokens]
            sequences.append(tokens)
            namespace = list(self.tree.roots)[node.namespace]
            assert _numbers(node.hit_ends.ranges) == [
                length - len(before)
                for length in range(len(before) + 1, len(tokens) + 1)
                if self.longest_by_the_model(namespace, tokens[:length], length, length) == length
            ]
            if node.windows is not None:
                assert _numbers((start, end - 1) for start, end in node.windows.kept) == [
                    position - len(before)
                    for position in range(len(before), len(tokens))
                    if self.every_window_group_keeps(namespace, tokens, position)
                ]
            if node.states is not None:
                assert node.states.positions == sorted(
                    {
                        len(held.tokens) - len(before)
                        for held in self.held_in_tree(namespace)
                        if held.number < 0 and held.tokens == tokens[: len(held.tokens)]
                        if len(held.tokens) > len(before)
                    }
                )

    @precondition(lambda self: self.inserted)
    @rule()
    def a_snapshot_counts_the_blocks_of_each_kind(self):
        nodes = take_snapshot(self.tree).nodes
        held = [self.content[block] for block in self.content if block in self.tree]
        of_windows = sum(one.group > 0 and one.number >= 0 for one in held)
        assert sum(node.windows.num_blocks for node in nodes if node.windows) == of_windows
        of_states = sum(one.number < 0 for one in held)
        assert sum(node.states.num_blocks for node in nodes if node.states) == of_states
        assert sum(node.num_blocks for node in nodes) == len(held)

    def held_in_tree(self, namespace: Namespace) -> list[Any]:
        held = [self.content[block] for block in self.content if block in self.tree]
        return [one for one in held if one.namespace == namespace]

    def every_window_group_keeps(
        self, namespace: Namespace, tokens: list[int], position: int
    ) -> bool:
        """Whether each has a block in the tree with this token, and with all others of `tokens`
        that would be in it."""

        def keeps(group: int) -> bool:
            number, size = position // self.sizes[group], self.sizes[group]
            end = min((number + 1) * size, len(tokens))
            return any(
                (held.group, held.number) == (group, number) and held.tokens[:end] == tokens[:end]
                for held in self.held_in_tree(namespace)
            )

        return all(map(keeps, range(1, 1 + len(self.kinds))))


def _numbers(ranges: Iterable[tuple[int, int]]) -> list[int]:
    return [number for first, last in ranges for number in range(first, last + 1)]
