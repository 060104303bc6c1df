"""A lookup costs a tenant the same whether or not another one has the prefix in the cache."""

from __future__ import annotations

import sys
from types import FrameType

import pytest

from sgl_vllm.radix.tokens import pack
from sgl_vllm.radix.tree import RadixTree

OWN = list(range(100, 140))
WANTED = list(range(200, 260))


def tree_with(*cached: tuple[str, list[int]]) -> RadixTree:
    tree, num_blocks = RadixTree(block_size=4), 0
    for namespace, tokens in cached:
        blocks = range(num_blocks, num_blocks - (-len(tokens) // 4))
        tree.insert(namespace, pack(tokens), blocks)
        num_blocks = blocks.stop
    return tree


def lookup(tree: RadixTree, namespace: str, tokens: list[int]) -> tuple[int, list[str]]:
    """The tokens found, and every call on the way, such as one look-up per node."""
    calls: list[str] = []
    packed = pack(tokens)

    def note(frame: FrameType, event: str, called: object) -> None:
        if event == "c_call":
            calls.append(getattr(called, "__qualname__", repr(called)))
        elif event == "call":
            calls.append(frame.f_code.co_qualname)

    sys.setprofile(note)
    try:
        found = tree.longest_hit(tree.match_prefix(namespace, packed), len(tokens))
    finally:
        sys.setprofile(None)
    return found, calls


@pytest.mark.parametrize("own", [[], [("own", OWN)], [("own", OWN), ("own", [*OWN[:10], 1, 2])]])
@pytest.mark.parametrize("wanted", [WANTED, [*OWN, *WANTED], [*OWN[:9], *WANTED]])
def test_another_tenants_prefix_looks_and_costs_like_none(own, wanted):
    others = [("other", wanted), ("other", [*wanted[:30], 7, 8]), ("third", wanted[:50])]
    without, with_others = tree_with(*own), tree_with(*own, *others)
    assert lookup(with_others, "own", wanted) == lookup(without, "own", wanted)
    if wanted is not WANTED and own:  # the test sees a node that is visited
        assert len(lookup(without, "own", wanted)[1]) > len(lookup(without, "own", WANTED)[1])
    assert lookup(with_others, "other", wanted)[0] == len(wanted)
