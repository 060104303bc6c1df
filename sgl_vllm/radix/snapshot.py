"""Snapshots of a tree, for `GET /v1/sgl/tree`, `sgl-vllm tree` and the page.

Owns what is shown of the cache, as JSON (docs/cache.md explains each key): by default no token ids,
never the name of a namespace, and of isolated namespaces totals only. Does not own which namespaces
are isolated. Pure: no vLLM, no torch.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from itertools import pairwise
from typing import Any, NamedTuple  # Any: JSON

import numpy as np
from numpy.typing import NDArray

from sgl_vllm.radix.components.windows import HOLE, WindowGroup, shared_block
from sgl_vllm.radix.node import Namespace, Node, subtree
from sgl_vllm.radix.tokens import TOKEN_BYTES, unpack
from sgl_vllm.radix.tree import RadixTree

Json = dict[str, Any]  # Any: values as `json` takes them

MAX_RANGES = 100
"""Ranges or positions that are listed of a node and kind, those nearest to its end."""

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
    """The shape of `tree`: sizes, hits and ages, and what each kind of group keeps. Costs O(nodes
    listed + isolated nodes), their blocks, and a byte for each token where there are windows.

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
    groups = tree.windows.groups if tree.windows is not None else ()
    no_holes = [-1] * len(groups)
    queue: deque[tuple[Node, int | None, int, list[int]]] = deque(
        (child, None, number, no_holes)
        for number, root in enumerate(shown)
        for child in root.children.values()
    )
    while queue and len(nodes) < max_nodes:
        node, parent, number, holes = queue.popleft()
        kept = _Kept.of(groups, node, holes) if groups else None
        last_holes = kept.last_holes if kept is not None else no_holes
        queue.extend((child, len(nodes), number, last_holes) for child in node.children.values())
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
        shown_node |= _other_groups(node, kept, tree.states is not None)
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


class _Kept(NamedTuple):
    """What the window groups keep of a node.

    Attributes:
        num_blocks: the node's own, of all groups.
        last_holes: for each group the number of the last hole in the node and its parents.
        tokens: whether every group keeps each of the node's tokens.
        ends: whether a hit may end after each of the node's tokens.
    """

    num_blocks: int
    last_holes: list[int]
    tokens: NDArray[np.bool_]
    ends: NDArray[np.bool_]

    @classmethod
    def of(cls, groups: Sequence[WindowGroup], node: Node, holes_before: Sequence[int]) -> _Kept:
        """`holes_before` are the `last_holes` of the parent; -1 for a group without one."""
        start, end = node.start, node.end
        tokens, ends = np.ones(end - start, np.bool_), np.ones(end - start, np.bool_)
        num_blocks, last_holes = 0, []
        for index, (group, before) in enumerate(zip(groups, holes_before, strict=True)):
            size, ids = group.block_size, node.windows[index]
            first, last = start // size, start // size + len(ids)
            holes = [number for number, block_id in enumerate(ids, first) if block_id == HOLE]
            num_blocks += len(ids) - len(holes)
            last_holes.append(holes[-1] if holes else before)
            if last * size < end and shared_block(node, index) == HOLE:
                holes.append(last)
            is_end = np.zeros(end - start, np.bool_)
            for hole, next_hole in pairwise([before, *holes, end]):
                tokens[max(0, hole * size - start) : max(0, (hole + 1) * size - start)] = False
                # Of the hits between two holes, those that need no block up to the first.
                shortest, longest = max(start + 1, (hole + 1) * size), min(end, next_hole * size)
                if shortest <= longest:
                    lengths = range(longest + 1)
                    shortest = bisect_left(lengths, hole + 1, lo=shortest, key=group.first_block)
                    is_end[shortest - start - 1 : longest - start] = True
            ends &= is_end
        return cls(num_blocks, last_holes, tokens, ends)


def _other_groups(node: Node, kept: _Kept | None, has_states: bool) -> Json:
    """What groups other than full attention keep of a node, and where a hit may end because of it.

    Args:
        kept: of the node, if the tree has window groups.
        has_states: whether the tree has recurrent groups.
    """
    found: Json = {}
    ends: list[tuple[int, int]] = []
    if kept is not None:
        found["windows"] = {"num_blocks": kept.num_blocks, **_last("kept", _ranges(kept.tokens))}
        ends = [(first + 1, last) for first, last in _ranges(kept.ends)]
    if has_states:
        positions = sorted(position - node.start for position in node.states)
        num_blocks = sum(map(len, node.states.values()))
        found["states"] = {"num_blocks": num_blocks, **_last("positions", positions)}
        ends = [(one, one) for one in positions if kept is None or kept.ends[one - 1]]
    if found:
        found["hit_ends"] = _last("ranges", ends)
    return found


def _last(name: str, entries: Sequence[object]) -> Json:
    """The last entries as JSON, under a name."""
    return {name: entries[-MAX_RANGES:], "left_out": max(0, len(entries) - MAX_RANGES)}


def _ranges(flags: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """The ranges `[start, end)` of flags that are set."""
    edges = np.flatnonzero(np.diff(flags, prepend=False, append=False))
    return [(start, end) for start, end in edges.reshape(-1, 2).tolist()]


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
    windows = [block_id for ids in node.windows for block_id in ids if block_id != HOLE]
    states = [block_id for ids in node.states.values() for block_id in ids]
    return node.block_ids + windows + states
