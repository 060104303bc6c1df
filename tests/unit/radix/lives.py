"""What random lives of a tree with several groups have in common: known sequences, and watchers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any  # Any: hypothesis's `data`

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine

from sgl_vllm.radix.node import Match
from sgl_vllm.radix.tokens import pack
from sgl_vllm.radix.tree import RadixTree


class LivesOfATree(RuleBasedStateMachine):
    """A subclass sets these in its `initialize` rule.

    Attributes:
        sizes: tokens per block of each group, full attention first.
        kinds: what each window group skips.
        inserted: sequences that were in the tree, with their namespaces.
        watching: by watcher, a sequence, and its match and hit when it was last watched.
    """

    tree: RadixTree
    sizes: list[int]
    kinds: list[Callable[[int], int]]
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
