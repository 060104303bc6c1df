"""Watching a match: who is told, and above all who is not."""

from __future__ import annotations

import random
from itertools import count

import pytest

from sgl_vllm.radix.tree import Match, RadixTree, pack

SIZE = 4


class Watched:
    """A tree, and watchers named by what they watch."""

    def __init__(self) -> None:
        self.tree = RadixTree(SIZE)
        self._blocks = count()

    def insert(self, tokens: list[int], namespace: str = "x", own=None):
        first = own.end // SIZE if own is not None else 0
        num_blocks = -(-len(tokens) // SIZE) - first
        blocks = [next(self._blocks) for _ in range(num_blocks)]
        if own is not None and own.end % SIZE:
            blocks[0] = own.block_ids[-1]  # the partial last block goes on being filled
        return self.tree.insert(namespace, pack(tokens), blocks, own)

    def watch(self, who: str, tokens: list[int], namespace: str = "x") -> Match:
        match = self.tree.match(namespace, pack(tokens))
        self.tree.watch(who, namespace, pack(tokens), match)
        return match


@pytest.fixture
def watched() -> Watched:
    """Two sequences that share four tokens, and who waits for what goes on from them."""
    watched = Watched()
    watched.insert([1, 2, 3, 4, 5, 6, 7, 8])
    watched.insert([1, 2, 3, 4, 9, 9, 9, 9])
    watched.watch("goes on with 5..8, 10", [1, 2, 3, 4, 5, 6, 7, 8, 10, 11])
    watched.watch("goes on with 9, 8", [1, 2, 3, 4, 9, 8])
    watched.watch("goes on with 3", [1, 2, 3, 4, 3, 3])
    watched.watch("begins otherwise", [7, 7, 7])
    return watched


def test_an_insert_tells_those_only_who_wait_for_its_next_token(watched):
    watched.insert([1, 2, 3, 4, 3, 4])
    assert watched.tree.take_changed() == ["goes on with 3"]
    watched.insert([1, 2, 3, 4, 5, 6, 7, 8, 10])
    assert watched.tree.take_changed() == ["goes on with 5..8, 10"]
    watched.insert([7, 1])
    assert watched.tree.take_changed() == ["begins otherwise"]


def test_an_unrelated_insert_tells_nobody(watched):
    watched.insert([6, 6, 6])
    watched.insert([1, 2, 3, 4, 1])
    watched.insert([1, 2, 3, 4, 5, 6, 7, 8, 1])
    watched.insert([7, 7, 7], namespace="y")
    watched.insert([1, 2, 3, 4, 3], namespace="y")
    assert watched.tree.take_changed() == []


def test_what_grows_in_place_tells_who_goes_on_with_the_token(watched):
    own = watched.insert([2, 2]).own
    watched.watch("goes on alike", [2, 2, 2, 2])
    watched.watch("goes on otherwise", [2, 2, 3])
    watched.insert([2, 2, 2], own=own)
    assert watched.tree.take_changed() == ["goes on alike"]


def test_a_hit_in_the_middle_of_a_node_tells_who_matches_into_it(watched):
    match = watched.tree.match("x", pack([1, 2, 3, 4, 5, 6, 1]))
    watched.tree.hit(match)
    assert watched.tree.take_changed() == ["goes on with 5..8, 10"]


def test_who_was_told_watches_nothing_any_more_and_is_told_once(watched):
    watched.insert([7, 1])
    watched.insert([7, 2])
    assert watched.tree.take_changed() == ["begins otherwise"]
    assert watched.tree.take_changed() == []


def test_who_unwatches_is_not_told_of_what_was_before(watched):
    watched.insert([7, 1])
    watched.tree.unwatch("begins otherwise")
    watched.tree.unwatch("somebody else")
    assert watched.tree.take_changed() == []


def test_eviction_tells_who_matched_what_is_gone(watched):
    watched.tree.unlock([0, 1, 2, 3])
    watched.tree.evict(1)
    assert len(watched.tree.take_changed()) == 1
    watched.tree.evict(10)
    assert set(watched.tree.take_changed()) <= {
        "goes on with 5..8, 10",
        "goes on with 9, 8",
        "goes on with 3",
    }
    watched.tree.clear()
    assert watched.tree.take_changed() == ["begins otherwise"]
    assert not watched.tree._watchers


def test_who_matched_what_continued_a_dropped_block_is_told(watched):
    watched.tree.drop_block(0)
    assert set(watched.tree.take_changed()) == {
        "goes on with 5..8, 10",
        "goes on with 9, 8",
        "goes on with 3",
    }


def test_of_many_who_wait_few_are_told_in_vain():
    """Random programs of few tokens: the tree is small and everybody in everybody's way."""
    rng = random.Random(0)
    watched = Watched()
    watching: dict[str, tuple[list[int], Match]] = {}
    num_told = num_in_vain = num_asked = 0
    for step in range(2000):
        tokens = [rng.randrange(3) for _ in range(rng.randint(1, 12))]
        if step % 2:
            watching[str(step)] = tokens, watched.watch(str(step), tokens)
            continue
        watched.insert(tokens)
        changed = watched.tree.take_changed()
        num_told += len(changed)
        num_asked += len(watching)
        for who in changed:
            tokens, before = watching[who]
            match = watching[who] = tokens, watched.watch(who, tokens)
            num_in_vain += match[1] == before
    assert num_told < 0.01 * num_asked, "without watching, all would be matched again"
    assert num_in_vain < 0.5 * num_told
