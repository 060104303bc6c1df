"""Which watchers the tree does not notify. That it notifies all others, `lives.py` has."""

from __future__ import annotations

import random
from itertools import count

from sgl_vllm.radix.node import Match
from sgl_vllm.radix.tokens import pack
from sgl_vllm.radix.tree import RadixTree

SIZE = 4


class Watched:
    """A tree, and watchers named by what they watch."""

    def __init__(self) -> None:
        self.tree = RadixTree(SIZE)
        self._blocks = count()

    def insert(self, tokens: list[int], namespace: str = "x") -> list[object]:
        """Returns the watchers notified."""
        blocks = [next(self._blocks) for _ in range(-(-len(tokens) // SIZE))]
        self.tree.insert(namespace, pack(tokens), blocks)
        return list(self.tree.watchers.take_changed())

    def watch(self, watcher: str, tokens: list[int]) -> Match:
        match = self.tree.match_prefix("x", pack(tokens))
        self.tree.watchers.watch(watcher, "x", pack(tokens), match)
        return match


def test_an_insert_notifies_the_watchers_of_its_next_token_only() -> None:
    watched = Watched()
    watched.insert([1, 2, 3, 4, 5, 6, 7, 8])
    watched.insert([1, 2, 3, 4, 9, 9, 9, 9])
    watched.watch("continues with 5..8, 10", [1, 2, 3, 4, 5, 6, 7, 8, 10, 11])
    watched.watch("continues with 9, 8", [1, 2, 3, 4, 9, 8])
    watched.watch("continues with 3", [1, 2, 3, 4, 3, 3])
    watched.watch("starts otherwise", [7, 7, 7])
    for unrelated in ([6, 6, 6], [1, 2, 3, 4, 1], [1, 2, 3, 4, 5, 6, 7, 8, 1]):
        assert watched.insert(unrelated) == []
    assert watched.insert([7, 7, 7], namespace="y") == []
    assert watched.insert([1, 2, 3, 4, 3, 4]) == ["continues with 3"]
    assert watched.insert([1, 2, 3, 4, 5, 6, 7, 8, 10]) == ["continues with 5..8, 10"]
    assert watched.insert([7, 1]) == ["starts otherwise"]
    assert watched.insert([7, 2]) == [], "it watches nothing any more"


def test_few_watchers_are_notified_in_vain() -> None:
    """Random sequences of few tokens: the tree is small, so watchers often share a place."""
    rng = random.Random(0)
    watched = Watched()
    watching: dict[object, tuple[list[int], Match]] = {}
    num_notified = num_in_vain = num_watching = 0
    for step in range(1000):
        tokens = [rng.randrange(3) for _ in range(rng.randint(1, 12))]
        if step % 2:
            watching[str(step)] = tokens, watched.watch(str(step), tokens)
            continue
        changed = watched.insert(tokens)
        num_notified += len(changed)
        num_watching += len(watching)
        for watcher in changed:
            tokens, before = watching[watcher]
            match = watched.watch(str(watcher), tokens)
            watching[watcher] = tokens, match
            num_in_vain += match == before
    assert num_notified < 0.02 * num_watching, "without watching, all would be matched again"
    assert num_in_vain < 0.5 * num_notified
