"""Short forms for tests: one letter per token."""

from __future__ import annotations

from collections.abc import Callable

from sgl_vllm.radix.node import InsertResult, Namespace
from sgl_vllm.radix.tokens import Tokens, pack
from sgl_vllm.radix.tree import RadixTree


class Clock:
    """Seconds that pass when a test says so, and a little with every look."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1e-6
        return self.now


def letters(tokens: str) -> Tokens:
    return pack([ord(letter) for letter in tokens])


def put(tree: RadixTree, tokens: str, blocks: list[int], namespace: Namespace = "") -> InsertResult:
    """Insert a sequence and unlock its blocks."""
    inserted = tree.insert(namespace, letters(tokens), blocks)
    tree.unlock(blocks)
    return inserted


def num_cached(tree: RadixTree, tokens: str) -> int:
    return tree.match_prefix("", letters(tokens)).num_tokens


def hit(tree: RadixTree, tokens: str, priority: int = 0) -> None:
    tree.record_hit(tree.match_prefix("", letters(tokens)), priority)


def sliding_window(num_tokens: int) -> Callable[[int], int]:
    """What a layer skips that reads the last `num_tokens`, the current one included."""
    return lambda num_computed: max(0, num_computed - num_tokens + 1)


def chunks(num_tokens: int) -> Callable[[int], int]:
    """What a layer skips that reads its own chunk of `num_tokens`."""
    return lambda num_computed: num_computed // num_tokens * num_tokens
