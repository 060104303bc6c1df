"""Snapshots of a tree, for `GET /v1/sgl/tree`, `sgl-vllm tree` and the page.

Owns what is shown of the cache, as JSON (docs/cache.md explains each key): by default no token ids,
never the name of a namespace, and of isolated namespaces totals only. Does not own which namespaces
are isolated. Pure: no vLLM, no torch.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Collection, Mapping, Set
from typing import Any  # Any: JSON

from sgl_vllm.radix.node import Namespace, Node, subtree, without_holes
from sgl_vllm.radix.tokens import TOKEN_BYTES, unpack
from sgl_vllm.radix.tree import RadixTree

Json = dict[str, Any]  # Any: values as `json` takes them

MAX_STATES = 100
"""States that are listed of a node, those nearest to its end."""

NO_CONTEXTS: Mapping[Node, Json] = {}


def take_snapshot(
    tree: RadixTree,
    max_nodes: int = 1000,
    *,
    is_isolated: Callable[[Namespace], bool] = lambda namespace: False,
    pinned: Set[int] = frozenset(),
    wanted: Collection[Node] = (),
    max_tokens: int = 0,
    contexts: Mapping[Node, Json] = NO_CONTEXTS,
) -> Json:
    """The shape of `tree`: sizes, hits, ages and states. Costs O(nodes listed + isolated nodes) and
    their blocks.

    Args:
        max_nodes: list at most this many nodes.
        is_isolated: whether a namespace is shown in totals only.
        pinned: ids of pinned blocks.
        wanted: nodes that waiting requests match.
        max_tokens: include this many token ids of each node. They are part of a user's prompt.
        contexts: what ends in nodes and may be continued.
    """
    isolated = [root for namespace, root in tree.roots.items() if is_isolated(namespace)]
    shown = [root for namespace, root in tree.roots.items() if not is_isolated(namespace)]
    totals = _totals(isolated)
    now = tree.clock()
    nodes: list[Json] = []
    queue: deque[tuple[Node, int | None, int]] = deque(
        (child, None, number)
        for number, root in enumerate(shown)
        for child in root.children.values()
    )
    while queue and len(nodes) < max_nodes:
        node, parent, number = queue.popleft()
        queue.extend((child, len(nodes), number) for child in node.children.values())
        block_ids = _block_ids(node)
        shown_node: Json = {
            "id": node.serial,
            "parent": parent,
            "namespace": number,
            "num_tokens": node.end - node.start,
            "num_blocks": len(block_ids),
            "num_locked_blocks": len(tree.blocks.locked.intersection(block_ids)),
            "num_pinned_blocks": sum(block_id in pinned for block_id in block_ids),
            "hits": node.num_hits,
            "age_s": round(now - node.was_used_at, 3),
            "wanted": node in wanted,
            "ended": node.ended,
        }
        if max_tokens:
            shown_node["tokens"] = unpack(node.tokens[: max_tokens * TOKEN_BYTES])
        if tree.states is not None:
            positions = sorted(position - node.start for position in node.states)
            left_out = max(0, len(positions) - MAX_STATES)
            shown_node["states"] = {"positions": positions[left_out:], "left_out": left_out}
        if node in contexts:
            shown_node["context"] = contexts[node]
        nodes.append(shown_node)
    return {
        "block_size": tree.block_size,
        "num_tokens": tree.num_tokens,
        "num_nodes": tree.num_nodes,
        "num_blocks": tree.num_blocks,
        "num_protected_blocks": tree.num_locked_blocks,
        "num_evictable_blocks": tree.num_evictable_blocks,
        "isolated": totals,
        "nodes_left_out": tree.num_nodes - totals["num_nodes"] - len(nodes),
        "nodes": nodes,
    }


def _totals(roots: Collection[Node]) -> Json:
    nodes = [node for root in roots for node in subtree(root)]
    return {
        "namespaces": len(roots),
        "num_tokens": sum(node.end - node.start for node in nodes),
        "num_nodes": len(nodes) - len(roots),
        "num_blocks": sum(len(_block_ids(node)) for node in nodes),
    }


def _block_ids(node: Node) -> list[int]:
    """All blocks of a node, of every group."""
    lists = (node.block_ids, *node.windows, *node.states.values())
    return without_holes([*itertools.chain.from_iterable(lists)])
