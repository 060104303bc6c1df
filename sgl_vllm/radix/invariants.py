"""What always holds of a tree. Owns checks for tests, which walk everything."""

from __future__ import annotations

from sgl_vllm.radix.node import Node
from sgl_vllm.radix.tokens import TOKEN_BYTES
from sgl_vllm.radix.tree import RadixTree


def check_tree(tree: RadixTree) -> None:
    """Raise AssertionError if `tree` contradicts itself."""
    size = tree.block_size
    owners: dict[int, Node] = {}
    num_tokens = num_nodes = 0
    assert tree._namespaces == {root: name for name, root in tree.roots.items()}
    for root in tree.roots.values():
        assert root.parent is None and not root.tokens and root.children
    for node in tree.nodes():
        parent = node.parent
        assert parent is not None and len(node.tokens) == (node.end - node.start) * TOKEN_BYTES > 0
        assert parent.children[node.tokens[:TOKEN_BYTES]] is node and node.start == parent.end
        last = node.end // size if node.children else -(-node.end // size)
        assert len(node.block_ids) == max(0, last - node.start // size)
        for block_id in node.block_ids:
            assert block_id not in owners, f"block {block_id} belongs to two nodes"
            owners[block_id] = node
        if tree.blocks.is_evictable(node):
            assert tree.order.holds(node), "an evictable leaf is in no queue"
        num_tokens += node.end - node.start
        num_nodes += 1
    if tree.windows is not None:
        tree.windows.check(tree.nodes())
        owners |= {i: tree.blocks.owners[i] for i in tree.blocks.owners if i in tree.windows}
    if tree.evictions is not None:
        tree.evictions.check(tree.nodes())
    if tree.states is not None:
        tree.states.check(tree.nodes())
        owners |= {i: tree.blocks.owners[i] for i in tree.blocks.owners if i in tree.states}
    assert owners == tree.blocks.owners
    assert tree.blocks.locked <= owners.keys()
    assert (num_tokens, num_nodes) == (tree.num_tokens, tree.num_nodes)
    tree.watchers.check_invariants()
