"""What the tree remembers of its evictions, against a naive record of all prefixes."""

from __future__ import annotations

import itertools
import random
from unittest.mock import Mock

import pytest

from sgl_vllm.radix import evicted_prefixes
from sgl_vllm.radix.evicted_prefixes import NODE_BYTES
from sgl_vllm.radix.invariants import check_tree
from sgl_vllm.radix.tokens import pack, unpack
from sgl_vllm.radix.tree import RadixTree
from tests.cached_prefixes import Prefix, prefixes_in
from tests.effort import examples
from tests.unit.radix.trees import Clock, letters, num_cached, put


def evicted(tree: RadixTree, namespace: str, tokens: list[int]) -> list[str]:
    """For each token after the match of `tokens` why it was evicted, as far as is known."""
    position = tree.match_prefix(namespace, pack(tokens)).num_tokens
    reasons: list[str] = []
    for end, eviction in tree.evictions.of(namespace, pack(tokens), position):
        reasons += [eviction.reason] * (end - position)
        position = end
    return reasons


class Life:
    """A tree whose blocks come and go, and why each prefix that was cached is gone."""

    def __init__(self, rng: random.Random, max_bytes: int) -> None:
        self.rng = rng
        self.ticks = itertools.count()
        self.tree = RadixTree(
            rng.randrange(1, 5), clock=lambda: float(next(self.ticks)), max_evicted_bytes=max_bytes
        )
        self.known: dict[Prefix, str] = {}
        self.fresh = itertools.count()
        self.earlier = [[1]]

    def draw(self) -> tuple[str, list[int]]:
        rng = self.rng
        begin = rng.choice(self.earlier)
        begin = begin[: rng.randrange(len(begin) + 1)]
        tokens = [*begin, *(rng.randrange(3) for _ in range(rng.randrange(1, 8)))][:20]
        self.earlier.append(tokens)
        return rng.choice("xy"), tokens

    def wanted(self, namespace: str, tokens: list[int]) -> list[str]:
        cached = prefixes_in(self.tree)
        prefixes = [(namespace, tuple(tokens[:n])) for n in range(1, len(tokens) + 1)]
        missing = itertools.dropwhile(cached.__contains__, prefixes)
        return [self.known[one] for one in itertools.takewhile(self.known.__contains__, missing)]

    def insert(self, namespace: str, tokens: list[int]) -> None:
        tree, size, rng = self.tree, self.tree.block_size, self.rng
        match = tree.match_prefix(namespace, pack(tokens))
        blocks = tree.block_ids(match, match.num_tokens)[: match.num_tokens // size]
        tree.lock(blocks)
        blocks += [next(self.fresh) for _ in range(30)]
        own = tree.insert(namespace, pack(tokens), blocks).own_leaf
        more = [*tokens, *(rng.randrange(3) for _ in range(4))]
        if own is not None and rng.random() < 0.4 and tree.can_extend(own, len(more)):
            tree.insert(namespace, pack(more), blocks[own.end // size :], own)
        tree.unlock(blocks)
        if rng.random() < 0.3:
            tree.record_hit(tree.match_prefix(namespace, pack(tokens)))

    def evict(self) -> None:
        before, chance = prefixes_in(self.tree), self.rng.random()
        if chance < 0.6:
            self.tree.evict(self.rng.randrange(1, 6))
            reason = "evicted"
        elif chance < 0.9:
            self.tree.expire(next(self.ticks) - self.rng.randrange(200))
            reason = "expired"
        else:
            self.tree.clear()
            reason = "flushed"
        self.known.update(dict.fromkeys(before - prefixes_in(self.tree), reason))


@pytest.mark.parametrize("max_bytes", [1 << 20, 3000])
def test_what_was_evicted_is_known_to_the_token(max_bytes):
    """All of it; or the newest, if memory is short."""
    rng = random.Random(max_bytes)
    num_known = 0
    for _ in range(examples(60)):
        life = Life(rng, max_bytes)
        for _ in range(40):
            if rng.random() < 0.4:
                life.evict()
            else:
                namespace, tokens = life.draw()
                wanted = life.wanted(namespace, tokens)
                found = evicted(life.tree, namespace, tokens)
                assert found == wanted[: len(found)]
                assert len(found) == len(wanted) or max_bytes < 1 << 20
                num_known += len(found)
                life.insert(namespace, tokens)
            check_tree(life.tree)
    assert num_known > 500


def test_a_block_with_wrong_contents_is_not_remembered():
    tree = RadixTree(4, max_evicted_bytes=1 << 20)
    put(tree, "abcdefgh", [0, 1])
    tree.evict_block(1)
    assert num_cached(tree, "abcdefgh") == 4
    assert evicted(tree, "", unpack(letters("abcdefgh"))) == []


def test_a_leaf_that_goes_block_by_block_is_compared_once_and_remembered_in_one_piece(monkeypatch):
    compared = Mock(wraps=evicted_prefixes.descend)
    monkeypatch.setattr(evicted_prefixes, "descend", compared)
    clock = Clock()
    tree = RadixTree(4, clock=clock, max_evicted_bytes=1 << 20)
    put(tree, "abcdefghijklmnopqrst", [0, 1, 2, 3, 4])
    for second in range(1, 6):
        clock.now = second
        tree.evict(1)
        cached = num_cached(tree, "abcdefghijklmnopqrst")
        assert cached == 20 - 4 * second
        ((end, eviction),) = tree.evictions.of("", letters("abcdefghijklmnopqrstu"), cached)
        assert (end, eviction.reason, int(eviction.at)) == (20, "evicted", second)
    assert compared.call_count == 1 + 5  # once to remember it, and by each question


def test_memory_is_bounded_also_with_many_namespaces():
    tree = RadixTree(4, max_evicted_bytes=50 * NODE_BYTES)
    for number in range(1000):
        put(tree, "abcdefgh", [0, 1], namespace=f"{number}")
        tree.evict(2)
        check_tree(tree)
    assert 20 < len(tree.evictions._evictions) < 50
    assert len(tree.evictions._roots) == len(tree.evictions._names) < 50
    assert evicted(tree, "999", unpack(letters("abcdefgh"))) == ["evicted"] * 8
    assert evicted(tree, "0", unpack(letters("abcdefgh"))) == []
