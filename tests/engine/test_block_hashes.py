"""Blocks are counted as full without computing vLLM's hashes, and hashed once the tree is off."""

from __future__ import annotations

import pytest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from sgl_vllm.radix.block_hashes import NOT_HASHED, placeholder_hasher

BLOCK_SIZE = 4


class Tree:
    is_on = True


@pytest.fixture
def tree() -> Tree:
    return Tree()


def request(tree: Tree | None, num_tokens: int) -> Request:
    init_none_hash(sha256)
    hasher = get_request_block_hasher(BLOCK_SIZE, sha256)
    if tree is not None:
        hasher = placeholder_hasher(hasher, BLOCK_SIZE, lambda: tree.is_on)
    params = SamplingParams(max_tokens=1)
    return Request("a", list(range(num_tokens)), params, None, block_hasher=hasher)


def test_full_blocks_are_counted_while_the_tree_is_on(tree: Tree) -> None:
    growing = request(tree, 2 * BLOCK_SIZE + 1)
    assert growing.block_hashes == [NOT_HASHED] * 2
    growing.append_output_token_ids([7] * BLOCK_SIZE)
    assert growing.block_hashes == [NOT_HASHED] * 3


def test_a_request_is_hashed_from_its_first_block_once_the_tree_is_off(tree: Tree) -> None:
    ours, stock = request(tree, 2 * BLOCK_SIZE), request(None, 2 * BLOCK_SIZE)
    tree.is_on = False
    for each in (ours, stock):
        each.append_output_token_ids([7] * BLOCK_SIZE)
    assert len(ours.block_hashes) == 3
    assert ours.block_hashes == stock.block_hashes
