"""What always holds of a tree. Owns checks for tests, which walk everything."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sgl_vllm.radix.node import HOLE, Node
from sgl_vllm.radix.tokens import TOKEN_BYTES
from sgl_vllm.radix.tree import RadixTree

if TYPE_CHECKING:
    from sgl_vllm.radix.pool import RadixBlockPool


def check_tree(tree: RadixTree) -> None:
    """Raise AssertionError if `tree` contradicts itself."""
    size = tree.block_size
    owners: dict[int, Node] = {}
    num_tokens = num_nodes = num_logprob_bytes = 0
    assert tree._namespaces == {root: name for name, root in tree.roots.items()}
    for root in tree.roots.values():
        assert root.parent is None and not root.tokens and root.children
    for node in tree.nodes():
        parent = node.parent
        assert parent is not None and len(node.tokens) == (node.end - node.start) * TOKEN_BYTES > 0
        assert parent.children[node.tokens[:TOKEN_BYTES]] is node and node.start == parent.end
        last = node.end // size if node.children else -(-node.end // size)
        assert len(node.block_ids) == max(0, last - node.start // size)
        for block_id in filter(HOLE.__ne__, node.block_ids):
            assert block_id not in owners, f"block {block_id} belongs to two nodes"
            owners[block_id] = node
        if tree.blocks.is_evictable(node):
            assert tree.order.holds(node), "an evictable leaf is in no queue"
        if node.logprobs is not None:
            assert 0 < node.logprobs.num_tokens <= node.end - node.start
            num_logprob_bytes += node.logprobs.num_bytes
        num_tokens += node.end - node.start
        num_nodes += 1
    assert num_logprob_bytes == tree.logprobs.num_bytes <= tree.logprobs.max_bytes
    tree.evictions.check()
    for component in tree.components:
        component.check(tree.nodes())
        owners |= {i: node for i, node in tree.blocks.owners.items() if i in component}
    assert owners == tree.blocks.owners
    assert tree.blocks.locked <= owners.keys()
    assert (num_tokens, num_nodes) == (tree.num_tokens, tree.num_nodes)
    tree.watchers.check_invariants()


def check_pool(pool: RadixBlockPool) -> None:
    """Raise AssertionError if tree and pool disagree: free + cached + in use = all, and the tree's
    locks are the reference counts."""
    tree = pool.tree
    assert not pool.is_off, f"the tree is {pool.off_reason}"
    check_tree(tree)
    free, block = [], pool.free_block_queue.fake_free_list_head.next_free_block
    while block is not None and block is not pool.free_block_queue.fake_free_list_tail:
        free.append(block)
        block = block.next_free_block
    assert len(free) == pool.get_num_free_blocks() == len({b.block_id for b in free})
    in_use = [b for b in pool.blocks if b.ref_cnt > 0 and not b.is_null]
    assert all(b.ref_cnt == 0 for b in free)
    assert len(free) + len(in_use) == pool.num_gpu_blocks - 1
    assert tree.num_locked_blocks == sum(b.block_id in tree for b in in_use)
    assert tree.num_evictable_blocks == sum(b.block_id in tree for b in free)
    for block in pool.blocks:
        assert (block.block_id in tree) == (block.block_hash is not None), block
    num_empty = len(free) - tree.num_evictable_blocks
    assert not any(b.block_id in tree for b in free[:num_empty]), "a cached block is in front"
