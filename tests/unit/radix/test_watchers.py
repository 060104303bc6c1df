"""Which watchers the tree notifies, and above all which it does not."""

from __future__ import annotations

import random
from itertools import count

import pytest

from sgl_vllm.radix.node import InsertResult, Match, Node
from sgl_vllm.radix.tokens import pack
from sgl_vllm.radix.tree import RadixTree

SIZE = 4


class Watched:
    """A tree, and watchers named by what they watch."""

    def __init__(self) -> None:
        self.tree = RadixTree(SIZE)
        self._blocks = count()

    def insert(
        self, tokens: list[int], namespace: str = "x", own_leaf: Node | None = None
    ) -> InsertResult:
        first = own_leaf.end // SIZE if own_leaf is not None else 0
        num_blocks = -(-len(tokens) // SIZE) - first
        blocks = [next(self._blocks) for _ in range(num_blocks)]
        if own_leaf is not None and own_leaf.end % SIZE:
            blocks[0] = own_leaf.block_ids[-1]  # the partial last block is filled further
        return self.tree.insert(namespace, pack(tokens), blocks, own_leaf)

    def watch(self, watcher: str, tokens: list[int], namespace: str = "x") -> Match:
        match = self.tree.match_prefix(namespace, pack(tokens))
        self.tree.watchers.watch(watcher, namespace, pack(tokens), match)
        return match

    def take_changed(self) -> list[object]:
        return list(self.tree.watchers.take_changed())


@pytest.fixture
def watched() -> Watched:
    """Two sequences that share four tokens, and watchers of what continues them."""
    watched = Watched()
    watched.insert([1, 2, 3, 4, 5, 6, 7, 8])
    watched.insert([1, 2, 3, 4, 9, 9, 9, 9])
    watched.watch("continues with 5..8, 10", [1, 2, 3, 4, 5, 6, 7, 8, 10, 11])
    watched.watch("continues with 9, 8", [1, 2, 3, 4, 9, 8])
    watched.watch("continues with 3", [1, 2, 3, 4, 3, 3])
    watched.watch("starts otherwise", [7, 7, 7])
    return watched


def test_an_insert_notifies_the_watchers_of_its_next_token_only(watched: Watched) -> None:
    watched.insert([1, 2, 3, 4, 3, 4])
    assert watched.take_changed() == ["continues with 3"]
    watched.insert([1, 2, 3, 4, 5, 6, 7, 8, 10])
    assert watched.take_changed() == ["continues with 5..8, 10"]
    watched.insert([7, 1])
    assert watched.take_changed() == ["starts otherwise"]


def test_an_unrelated_insert_notifies_no_watcher(watched: Watched) -> None:
    watched.insert([6, 6, 6])
    watched.insert([1, 2, 3, 4, 1])
    watched.insert([1, 2, 3, 4, 5, 6, 7, 8, 1])
    watched.insert([7, 7, 7], namespace="y")
    watched.insert([1, 2, 3, 4, 3], namespace="y")
    assert watched.take_changed() == []


def test_a_leaf_that_grows_notifies_the_watchers_of_its_next_token(watched: Watched) -> None:
    own_leaf = watched.insert([2, 2]).own_leaf
    watched.watch("continues alike", [2, 2, 2, 2])
    watched.watch("continues otherwise", [2, 2, 3])
    watched.insert([2, 2, 2], own_leaf=own_leaf)
    assert watched.take_changed() == ["continues alike"]


def test_a_notified_watcher_watches_nothing_and_is_named_once(watched: Watched) -> None:
    watched.insert([7, 1])
    watched.insert([7, 2])
    assert watched.take_changed() == ["starts otherwise"]
    assert watched.take_changed() == []


def test_a_removed_watcher_is_not_named_for_earlier_changes(watched: Watched) -> None:
    watched.insert([7, 1])
    watched.tree.watchers.unwatch("starts otherwise")
    watched.tree.watchers.unwatch("never watched")
    assert watched.take_changed() == []


def test_eviction_notifies_the_watchers_that_matched_what_is_gone(watched: Watched) -> None:
    watched.tree.unlock([0, 1, 2, 3])
    watched.tree.evict(1)
    assert len(watched.take_changed()) == 1
    watched.tree.evict(10)
    assert set(watched.take_changed()) <= {
        "continues with 5..8, 10",
        "continues with 9, 8",
        "continues with 3",
    }
    watched.tree.clear()
    assert watched.take_changed() == ["starts otherwise"]
    assert len(watched.tree.watchers) == 0
    watched.tree.watchers.check_invariants()


def test_few_watchers_are_notified_in_vain() -> None:
    """Random sequences of few tokens: the tree is small, so watchers often share a place."""
    rng = random.Random(0)
    watched = Watched()
    watching: dict[object, tuple[list[int], Match]] = {}
    num_notified = num_in_vain = num_watching = 0
    for step in range(2000):
        tokens = [rng.randrange(3) for _ in range(rng.randint(1, 12))]
        if step % 2:
            watching[str(step)] = tokens, watched.watch(str(step), tokens)
            continue
        watched.insert(tokens)
        changed = watched.take_changed()
        num_notified += len(changed)
        num_watching += len(watching)
        for watcher in changed:
            tokens, before = watching[watcher]
            match = watched.watch(str(watcher), tokens)
            watching[watcher] = tokens, match
            num_in_vain += match == before
    assert num_notified < 0.01 * num_watching, "without watching, all would be matched again"
    assert num_in_vain < 0.5 * num_notified
