"""Snapshots of a tree, for `GET /v1/sgl/tree`, `sgl-vllm tree` and the page.

Owns what is shown of the cache, and its JSON: by default no token ids, never the name of a
namespace, and of isolated namespaces totals only. Does not own which namespaces are isolated.
Pure: no vLLM, no torch.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence, Set, Sized
from dataclasses import asdict, dataclass
from typing import Any  # Any: JSON

from sgl_vllm.radix.components.kept import KeptWindows, Range
from sgl_vllm.radix.components.windows import HOLE
from sgl_vllm.radix.node import Namespace, Node, subtree
from sgl_vllm.radix.tokens import TOKEN_BYTES, unpack
from sgl_vllm.radix.tree import RadixTree

Json = dict[str, Any]  # Any: values as `json` takes them

MAX_RANGES = 100
"""Ranges or positions that are listed of a node and kind, those nearest to its end."""


@dataclass(frozen=True, slots=True)
class WindowsSnapshot:
    """What the window groups keep of a node.

    Attributes:
        num_blocks: the node's own, of all window groups.
        kept: ranges `[start, end)` of tokens that every group keeps, ascending. Counted from the
            node's first token.
        left_out: ranges before those in `kept`.
    """

    num_blocks: int
    kept: list[Range]
    left_out: int


@dataclass(frozen=True, slots=True)
class StatesSnapshot:
    """What the recurrent groups keep of a node.

    Attributes:
        num_blocks: the node's own, of all recurrent groups.
        positions: after how many of the node's tokens a state is kept, ascending.
        left_out: positions before those in `positions`.
    """

    num_blocks: int
    positions: list[int]
    left_out: int


@dataclass(frozen=True, slots=True)
class HitEnds:
    """Where a hit may end in a node: what a request can read if it matches so far and no farther.

    Attributes:
        ranges: after how many of the node's tokens, as ranges of which the first and the last
            number are both included. Ascending.
        left_out: ranges before those in `ranges`.
    """

    ranges: list[Range]
    left_out: int


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
        ended: whether only programs that have ended used it, so that it is evicted first.
        tokens: its first token ids, if they were asked for.
        windows: None if the model has no window groups.
        states: None if it has no recurrent groups.
        hit_ends: None if it has neither. A hit may then end anywhere.
        context: what ends in this node and may be continued, as the caller describes it; None for
            most nodes.
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
    ended: bool
    tokens: list[int] | None = None
    windows: WindowsSnapshot | None = None
    states: StatesSnapshot | None = None
    hit_ends: HitEnds | None = None
    context: Json | None = None

    def to_json(self) -> Json:
        """Without what is None, except for `parent`."""
        json = {name: getattr(self, name) for name in self.__slots__}
        for name in ("tokens", "windows", "states", "hit_ends", "context"):
            if json[name] is None:
                del json[name]
            elif name not in ("tokens", "context"):
                json[name] = {key: getattr(json[name], key) for key in json[name].__slots__}
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
) -> TreeSnapshot:
    """The shape of `tree`: sizes, hits and ages, and what each kind of group keeps. Costs O(nodes
    listed + isolated nodes) and their blocks.

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
    nodes: list[NodeSnapshot] = []
    no_holes = [-1] * len(tree.windows.groups) if tree.windows is not None else []
    queue: deque[tuple[Node, int | None, int, list[int]]] = deque(
        (child, None, number, no_holes)
        for number, root in enumerate(shown)
        for child in root.children.values()
    )
    while queue and len(nodes) < max_nodes:
        node, parent, number, holes = queue.popleft()
        kept = None
        if tree.windows is not None:
            kept = KeptWindows(tree.windows.groups, node, holes)
            holes = kept.last_holes
        windows, states, hit_ends = _other_groups(node, kept, tree.states is not None)
        queue.extend((child, len(nodes), number, holes) for child in node.children.values())
        block_ids = _block_ids(node)
        nodes.append(
            NodeSnapshot(
                id=node.serial,
                parent=parent,
                namespace=number,
                num_tokens=node.end - node.start,
                num_blocks=len(block_ids),
                num_locked_blocks=len(tree.blocks.locked.intersection(block_ids)),
                num_pinned_blocks=sum(block_id in pinned for block_id in block_ids),
                hits=node.num_hits,
                age_s=round(now - node.was_used_at, 3),
                wanted=node in wanted,
                ended=node.ended,
                tokens=unpack(node.tokens[: max_tokens * TOKEN_BYTES]) if max_tokens else None,
                windows=windows,
                states=states,
                hit_ends=hit_ends,
                context=contexts.get(node),
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


def _other_groups(
    node: Node, kept: KeptWindows | None, has_states: bool
) -> tuple[WindowsSnapshot | None, StatesSnapshot | None, HitEnds | None]:
    """What groups other than full attention keep of a node, and where a hit may end because of it.

    Args:
        kept: the node's windows, if the tree has window groups.
        has_states: whether the tree has recurrent groups.
    """
    windows, states = None, None
    ends = [(1, node.end - node.start)]
    if kept is not None:
        ranges = kept.ranges()
        windows = WindowsSnapshot(kept.num_blocks, ranges[-MAX_RANGES:], _left_out(ranges))
        ends = kept.hit_ends()
    if has_states:
        positions = sorted(position - node.start for position in node.states)
        num_blocks = sum(map(len, node.states.values()))
        states = StatesSnapshot(num_blocks, positions[-MAX_RANGES:], _left_out(positions))
        ends = [(position, position) for position in positions if _holds(ends, position)]
    if windows is None and states is None:
        return None, None, None
    return windows, states, HitEnds(ends[-MAX_RANGES:], _left_out(ends))


def _left_out(entries: Sized) -> int:
    return max(0, len(entries) - MAX_RANGES)


def _holds(ranges: Sequence[Range], position: int) -> bool:
    """Whether a position is in one of these ascending ranges, first and last included."""
    place = bisect_right(ranges, position, key=lambda one: one[0])
    return place > 0 and position <= ranges[place - 1][1]


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
