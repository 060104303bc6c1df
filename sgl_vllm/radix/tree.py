"""A radix tree from token ids to the KV-cache blocks that hold their keys and values.

Owns: which computed tokens are cached, under which namespace, in which block. Does not own the
blocks: reference counts and the eviction order are the block pool's (see `manager.py`), which
calls `drop_block` whenever it hands a block out again. Pure: no vLLM, no torch.

The KV of token `i` of a sequence lies in the sequence's block number `i // block_size` at offset
`i % block_size`. A node owns the tokens `[start, end)` of every sequence through it:

    block number      0         1         2
                 |---------|---------|---------|
    root
     └─ A             [0 ......... 13)             owns block 0 (internal: the KV of [12, 13)
         ├─ B                     [13 .. 17)       owns blocks 1, 2        is in its children's
         └─ C                     [13 ..... 20)    owns blocks 1, 2        blocks 1)

Two sequences that part inside a block have a block each from there on, and both hold the shared
beginning of it. So an internal node that ends inside a block needs none for that part: each child
has it. **Every block belongs to exactly one node**; a leaf owns the blocks up to its end, an
internal node only those that it fills.

Idea: RadixAttention (Zheng et al., arXiv 2312.07104, section 3), here over paged blocks.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int32]
Namespace = Hashable


@dataclass(frozen=True, slots=True)
class Match:
    """The longest cached prefix of some tokens.

    `block_ids[j]` holds the KV of tokens `[j * block_size, min((j + 1) * block_size, num_tokens))`,
    so there are `ceil(num_tokens / block_size)` of them and the last may hold more than asked for.
    """

    num_tokens: int
    block_ids: list[int]


@dataclass(eq=False, slots=True)
class Node:
    """Tokens `[start, end)` below `parent`, and the blocks from number `start // block_size` on."""

    parent: Node | None
    start: int
    tokens: Tokens
    block_ids: list[int]
    children: dict[int, Node] = field(default_factory=dict)
    num_hits: int = 0
    last_used: float = 0.0

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


class RadixTree:
    """Token-granular prefix cache index.

    Matching and inserting cost one dictionary step per node on the path and one vectorised
    comparison per edge: linear in tokens, with numpy's constant. `drop_block` costs the size of
    the subtree it removes. `version` changes whenever a match could come out differently.
    """

    def __init__(self, block_size: int) -> None:
        if block_size < 1:
            raise ValueError(f"block_size must be positive, not {block_size}")
        self.block_size = block_size
        self.version = 0
        self.num_tokens = 0
        self.num_nodes = 0  # nodes that hold tokens: roots do not count
        self._roots: dict[Namespace, Node] = {}
        self._owners: dict[int, Node] = {}

    @property
    def num_blocks(self) -> int:
        return len(self._owners)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._owners

    def nodes(self) -> Iterator[Node]:
        """Every node that holds tokens, parents before children."""
        stack = [child for root in self._roots.values() for child in root.children.values()]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    # -- look up ------------------------------------------------------------------------------

    def match_length(self, namespace: Namespace, tokens: Tokens) -> int:
        """How many leading `tokens` are cached. Changes nothing."""
        root = self._roots.get(namespace)
        return 0 if root is None else self._descend(root, tokens)[1]

    def match(self, namespace: Namespace, tokens: Tokens) -> Match:
        """The longest cached prefix of `tokens`, and the blocks to read it from.

        Counts as a use of every node on the path.
        """
        root = self._roots.get(namespace)
        if root is None:
            return Match(0, [])
        node, num_tokens = self._descend(root, tokens)
        now = time.monotonic()
        path = []
        while node.parent is not None:
            node.num_hits += 1
            node.last_used = now
            path.append(node)
            node = node.parent
        if not path:
            return Match(0, [])
        block_ids: list[int] = []
        for node in reversed(path):
            # A child's first block also holds the end of its parent: the deeper one replaces it.
            del block_ids[node.start // self.block_size :]
            block_ids += node.block_ids
        num_blocks = -(-num_tokens // self.block_size)
        if len(block_ids) < num_blocks:  # ends in the part that an internal node leaves to children
            block_ids.append(self._first_block_below(path[0]))
        del block_ids[num_blocks:]
        return Match(num_tokens, block_ids)

    def _descend(self, root: Node, tokens: Tokens) -> tuple[Node, int]:
        """The deepest node reached by `tokens`, and how many of them it and its parents hold."""
        node, matched, num_tokens = root, 0, len(tokens)
        while matched < num_tokens:
            child = node.children.get(int(tokens[matched]))
            if child is None:
                break
            node = child
            matched += _common_prefix_length(child.tokens, tokens[matched:])
            if matched < child.end:
                break
        return node, matched

    def _first_block_below(self, node: Node) -> int:
        """A block that holds the part of internal `node` after its last full block."""
        while True:
            node = next(iter(node.children.values()))
            if node.block_ids:
                return node.block_ids[0]

    # -- change -------------------------------------------------------------------------------

    def insert(self, namespace: Namespace, tokens: Tokens, block_ids: list[int]) -> list[int]:
        """Record that `block_ids` hold the computed KV of `tokens`, from the first token on.

        What is already there stays (the caller's copies of it are not taken). Returns the blocks
        that this call made redundant: shorter copies of a block that `tokens` continue.

        Args:
            tokens: shape (n,), the whole sequence. What is new of it is copied.
            block_ids: ceil(n / block_size) ids or more; none may be in use elsewhere in the tree
                other than at its own place.

        Raises:
            ValueError: fewer blocks than the tokens need.
        """
        size = self.block_size
        if len(block_ids) * size < len(tokens):
            raise ValueError(f"{len(tokens)} tokens do not fit {len(block_ids)} blocks of {size}")
        if not len(tokens):
            return []
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = Node(None, 0, tokens[:0], [])
        node, matched = self._descend(root, tokens)
        if matched == len(tokens):
            return []
        if matched < node.end:
            node = self._split(node, matched)
        redundant: list[int] = []
        if not node.children and matched % size and node.parent is not None:
            tail = node.block_ids.pop()  # the new child holds all of this block and more
            del self._owners[tail]
            if tail != block_ids[matched // size]:
                redundant.append(tail)
        owned = block_ids[matched // size : -(-len(tokens) // size)]
        if any(block_id in self._owners for block_id in owned):
            raise ValueError(f"one of the blocks {owned} is already in the tree, at another place")
        child = Node(node, matched, tokens[matched:].copy(), owned, last_used=time.monotonic())
        self._owners.update(dict.fromkeys(owned, child))
        node.children[int(tokens[matched])] = child
        self.num_tokens += len(child.tokens)
        self.num_nodes += 1
        self.version += 1
        return redundant

    def _split(self, node: Node, position: int) -> Node:
        """Cut `node` at sequence `position` and return the new upper half."""
        parent = node.parent
        assert parent is not None and node.start < position < node.end
        first_block = node.start // self.block_size
        num_upper_blocks = position // self.block_size - first_block
        cut = position - node.start
        upper = Node(
            parent,
            node.start,
            node.tokens[:cut],
            node.block_ids[:num_upper_blocks],
            num_hits=node.num_hits,
            last_used=node.last_used,
        )
        for block_id in upper.block_ids:
            self._owners[block_id] = upper
        parent.children[int(upper.tokens[0])] = upper
        node.parent, node.start = upper, position
        node.tokens, node.block_ids = node.tokens[cut:], node.block_ids[num_upper_blocks:]
        upper.children[int(node.tokens[0])] = node
        self.num_nodes += 1
        return upper

    def drop_block(self, block_id: int) -> None:
        """Forget `block_id` and everything that continues it. No effect if it is not here."""
        node = self._owners.get(block_id)
        if node is None:
            return
        self.version += 1
        index = node.block_ids.index(block_id)
        for child in node.children.values():
            self._forget_subtree(child)
        node.children = {}
        self._shorten(node, (node.start // self.block_size + index) * self.block_size)

    def _forget_subtree(self, top: Node) -> None:
        stack = [top]
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            self.num_tokens -= len(node.tokens)
            self.num_nodes -= 1
            for block_id in node.block_ids:
                del self._owners[block_id]

    def _shorten(self, node: Node, end: int) -> None:
        """Cut childless `node` back to block-aligned `end`; remove it, and parents whose last
        tokens only it held, where nothing is left."""
        size = self.block_size
        while True:
            parent = node.parent
            if parent is None:
                return
            if end > node.start:
                num_kept_blocks = end // size - node.start // size
                for block_id in node.block_ids[num_kept_blocks:]:
                    del self._owners[block_id]
                del node.block_ids[num_kept_blocks:]
                self.num_tokens -= node.end - end
                node.tokens = node.tokens[: end - node.start]
                return
            for block_id in node.block_ids:
                del self._owners[block_id]
            self.num_tokens -= len(node.tokens)
            self.num_nodes -= 1
            del parent.children[int(node.tokens[0])]
            if parent.children or parent.parent is None or parent.end % size == 0:
                if parent.parent is None and not parent.children:
                    self._roots = {n: r for n, r in self._roots.items() if r is not parent}
                return
            node, end = parent, parent.end // size * size

    def clear(self) -> None:
        """Forget everything."""
        self._roots.clear()
        self._owners.clear()
        self.num_tokens = 0
        self.num_nodes = 0
        self.version += 1

    # -- views --------------------------------------------------------------------------------

    def describe(self, max_nodes: int = 1000) -> dict[str, object]:
        """The tree's shape for people and pages: sizes and hits, never token ids or namespaces.

        `nodes` lists at most `max_nodes`, those near the roots first, parents before children;
        `parent` is an index into the list, None for a node that begins a sequence, and `namespace`
        numbers what shares nothing.
        """
        now = time.monotonic()
        nodes: list[dict[str, object]] = []
        waiting: deque[tuple[Node, int | None, int]] = deque(
            (child, None, number)
            for number, root in enumerate(self._roots.values())
            for child in root.children.values()
        )
        while waiting and len(nodes) < max_nodes:
            node, parent, namespace = waiting.popleft()
            waiting.extend((child, len(nodes), namespace) for child in node.children.values())
            nodes.append(
                {
                    "parent": parent,
                    "namespace": namespace,
                    "num_tokens": len(node.tokens),
                    "num_blocks": len(node.block_ids),
                    "hits": node.num_hits,
                    "age_s": round(now - node.last_used, 3),
                }
            )
        return {
            "block_size": self.block_size,
            "num_tokens": self.num_tokens,
            "num_blocks": self.num_blocks,
            "num_nodes": self.num_nodes,
            "nodes": nodes,
        }

    def check_invariants(self) -> None:
        """Raise AssertionError if the tree contradicts itself. Walks everything: for tests."""
        size = self.block_size
        owners: dict[int, Node] = {}
        num_tokens = 0
        for root in self._roots.values():
            assert root.parent is None and not len(root.tokens) and root.children
        for node in self.nodes():
            parent = node.parent
            assert parent is not None and len(node.tokens) > 0
            assert parent.children[int(node.tokens[0])] is node and node.start == parent.end
            last = node.end // size if node.children else -(-node.end // size)
            assert len(node.block_ids) == max(0, last - node.start // size)
            for block_id in node.block_ids:
                assert block_id not in owners, f"block {block_id} belongs to two nodes"
                owners[block_id] = node
            num_tokens += len(node.tokens)
        assert owners == self._owners
        assert num_tokens == self.num_tokens
        assert sum(1 for _ in self.nodes()) == self.num_nodes


def _common_prefix_length(a: Tokens, b: Tokens) -> int:
    """How many leading elements are equal; one vectorised comparison."""
    length = min(len(a), len(b))
    different = a[:length] != b[:length]
    first = int(different.argmax()) if length else 0
    return first if length and different[first] else length
