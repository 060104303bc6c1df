"""Snapshots of a tree, for `GET /v1/sgl/tree`, `sgl-vllm tree` and the page.

Owns what is shown of the cache, and its JSON: by default no token ids, never the name of a
namespace, and of isolated namespaces totals only. Does not own which namespaces are isolated.
Pure: no vLLM, no torch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass
from typing import Any  # Any: JSON

from sgl_vllm.radix.components.windows import HOLE
from sgl_vllm.radix.node import Namespace, Node, subtree
from sgl_vllm.radix.tokens import TOKEN_BYTES, unpack
from sgl_vllm.radix.tree import RadixTree

Json = dict[str, Any]  # Any: values as `json` takes them


@dataclass(frozen=True, slots=True)
class NodeSnapshot:
    """One node.

    Attributes:
        id: identifies the node as long as it lives; of a node that is split, the lower half.
        parent: index in `TreeSnapshot.nodes`; None for a node that starts a sequence.
        namespace: a number. Nodes of different namespaces share nothing.
        num_tokens, num_blocks: its own, without its children's. Blocks of all KV-cache groups.
        hits: requests that read it from the cache.
        age_s: since its last use.
        wanted: whether a waiting request matches it.
        tokens: its first token ids, if they were asked for.
    """

    id: int
    parent: int | None
    namespace: int
    num_tokens: int
    num_blocks: int
    num_locked_blocks: int
    num_pinned_blocks: int
    hits: int
    age_s: float
    wanted: bool
    tokens: list[int] | None = None

    def to_json(self) -> Json:
        """Without `tokens` if they were not asked for."""
        json = {name: getattr(self, name) for name in self.__slots__}
        if self.tokens is None:
            del json["tokens"]
        return json


@dataclass(frozen=True, slots=True)
class IsolatedTotals:
    """All isolated namespaces together."""

    namespaces: int = 0
    num_tokens: int = 0
    num_nodes: int = 0
    num_blocks: int = 0


@dataclass(frozen=True, slots=True)
class TreeSnapshot:
    """A tree at one moment.

    Attributes:
        num_tokens, num_nodes, num_blocks: of the whole tree, isolated namespaces included.
        num_protected_blocks: locked ones.
        nodes_left_out: nodes that are neither isolated nor in `nodes`.
        nodes: those near the roots first, parents before children.
    """

    block_size: int
    num_tokens: int
    num_nodes: int
    num_blocks: int
    num_protected_blocks: int
    num_evictable_blocks: int
    isolated: IsolatedTotals
    nodes_left_out: int
    nodes: tuple[NodeSnapshot, ...]

    def to_json(self) -> Json:
        json = {name: getattr(self, name) for name in self.__slots__}
        return {
            **json,
            "isolated": asdict(self.isolated),
            "nodes": [node.to_json() for node in self.nodes],
        }


@dataclass(frozen=True, slots=True)
class CacheSnapshot:
    """A tree and the block pool that it is in, in blocks.

    Attributes:
        policy: the eviction policy's name.
        free_blocks: blocks that hold nothing.
    """

    policy: str
    total_blocks: int
    free_blocks: int
    num_pinned_blocks: int
    tree: TreeSnapshot

    def to_json(self) -> Json:
        """What `GET /v1/sgl/tree` shows of one engine: one object, the tree's keys included."""
        json = {name: getattr(self, name) for name in self.__slots__ if name != "tree"}
        return {**json, **self.tree.to_json()}


def take_snapshot(
    tree: RadixTree,
    max_nodes: int = 1000,
    *,
    is_isolated: Callable[[Namespace], bool] = lambda namespace: False,
    pinned: Collection[int] = (),
    wanted: Collection[Node] = (),
    max_tokens: int = 0,
) -> TreeSnapshot:
    """The shape of `tree`: sizes, hits and ages. Costs O(nodes listed + isolated nodes).

    Args:
        max_nodes: list at most this many nodes.
        is_isolated: whether a namespace is shown in totals only.
        pinned: ids of pinned blocks.
        wanted: nodes that waiting requests match.
        max_tokens: include this many token ids of each node. They are part of a user's prompt.
    """
    isolated = [root for namespace, root in tree.roots.items() if is_isolated(namespace)]
    shown = [root for namespace, root in tree.roots.items() if not is_isolated(namespace)]
    totals = _totals(isolated)
    now = tree.clock()
    nodes: list[NodeSnapshot] = []
    queue: deque[tuple[Node, int | None, int]] = deque(
        (child, None, number)
        for number, root in enumerate(shown)
        for child in root.children.values()
    )
    while queue and len(nodes) < max_nodes:
        node, parent, number = queue.popleft()
        queue.extend((child, len(nodes), number) for child in node.children.values())
        block_ids = _block_ids(node)
        nodes.append(
            NodeSnapshot(
                id=node.serial,
                parent=parent,
                namespace=number,
                num_tokens=node.end - node.start,
                num_blocks=len(block_ids),
                num_locked_blocks=sum(i in tree.blocks.locked for i in block_ids),
                num_pinned_blocks=sum(i in pinned for i in block_ids),
                hits=node.num_hits,
                age_s=round(now - node.last_used, 3),
                wanted=node in wanted,
                tokens=unpack(node.tokens[: max_tokens * TOKEN_BYTES]) if max_tokens else None,
            )
        )
    return TreeSnapshot(
        block_size=tree.block_size,
        num_tokens=tree.num_tokens,
        num_nodes=tree.num_nodes,
        num_blocks=tree.num_blocks,
        num_protected_blocks=tree.num_locked_blocks,
        num_evictable_blocks=tree.num_evictable_blocks,
        isolated=totals,
        nodes_left_out=tree.num_nodes - totals.num_nodes - len(nodes),
        nodes=tuple(nodes),
    )


def _totals(roots: Collection[Node]) -> IsolatedTotals:
    nodes = [node for root in roots for node in subtree(root)]
    return IsolatedTotals(
        namespaces=len(roots),
        num_tokens=sum(node.end - node.start for node in nodes),
        num_nodes=len(nodes) - len(roots),
        num_blocks=sum(len(_block_ids(node)) for node in nodes),
    )


def _block_ids(node: Node) -> list[int]:
    """All blocks of a node, of every group."""
    windows = [block_id for ids in node.windows for block_id in ids if block_id != HOLE]
    states = [block_id for ids in node.states.values() for block_id in ids]
    return node.block_ids + windows + states
