"""Remembers what the tree has evicted, so that a later miss can be explained.

Owns a second tree of tokens: the full sequences that evictions have cut, with the reason and time
of each. Does not own what is cached (`tree.py`), nor the causes of misses
(`misses.py`). Pure: no vLLM, no torch.

    cached        |------- A -------|
    remembered    |------- A -------|--- evicted ---|
                  |------- A -|--- evicted ---|

What is cached again stays here, and counts only once it is evicted again: a lookup asks for what
follows its match. So the answer is exact to the token. To remember the end of a sequence, the whole
sequence is compared, at memory speed; but not again while one leaf goes block by block.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Literal, NamedTuple

from sgl_vllm.radix.node import Namespace, Node, descend, path_to
from sgl_vllm.radix.tokens import TOKEN_BYTES, Tokens

NODE_BYTES = 600
"""Host memory of a node beside its tokens, about."""

Reason = Literal["evicted", "expired", "flushed"]
"""Why tokens have left the tree: to make room, unused for too long, or when it was emptied."""


class Eviction(NamedTuple):
    """Why tokens have left the tree, and when the last of them did, on the tree's clock."""

    reason: Reason
    at: float


class EvictedPrefixes:
    """The evictions of one tree.

    Args:
        max_bytes: about how much host memory they may take. What was evicted or continued least
            recently is forgotten first. With 0, nothing is remembered.
        namespaces: of the tree's roots.
    """

    def __init__(self, max_bytes: int, namespaces: Mapping[Node, Namespace]) -> None:
        self.max_bytes = max_bytes
        self._namespaces = namespaces
        self._reason: Reason | None = None
        self._now = 0.0
        self.clear()

    def clear(self) -> None:
        """Forget all."""
        self.num_bytes = 0
        self._roots: dict[Namespace, Node] = {}
        self._names: dict[Node, Namespace] = {}
        self._evictions: OrderedDict[Node, Eviction] = OrderedDict()
        """Of each node of this tree, the last one. A node comes after those that continue it."""
        self._last: tuple[Node | None, int, Node] | None = None
        """Of the last eviction: the node of the other tree that lost its end or its child, where it
        ends now, and the node here in which the eviction ended."""

    def begin(self, reason: Reason | None, now: float = 0.0) -> None:
        """What leaves the tree from now on does so for this reason. With None it is not remembered:
        its KV was wrong or never computed."""
        self._reason = reason if self.max_bytes else None
        self._now = now
        if self._reason is None:
            self._last = None

    def note(self, leaf: Node, begin: int) -> None:
        """A node of the tree is about to lose its tokens from `begin` on. Nothing continues it that
        was not noted before."""
        if self._reason is None:
            return
        eviction = Eviction(self._reason, self._now)
        node = self._remembered(leaf)
        if leaf.end < node.end and self._evictions[node].reason != eviction.reason:
            node = self._split(node, leaf.end)
        self._last = (leaf if begin > leaf.start else leaf.parent, begin, node)
        while node.parent is not None:
            if node.end > begin:
                # What is cached of a node as yet may count as evicted: no lookup asks for that.
                if node.start < begin and self._evictions[node].reason != eviction.reason:
                    self._split(node, begin)
                self._evictions[node] = eviction
            self._evictions.move_to_end(node)
            node = node.parent
        while self.num_bytes > self.max_bytes:
            self._forget_oldest()

    def _remembered(self, leaf: Node) -> Node:
        """The node here with the last token of `leaf`, whose tokens are added if they are new."""
        if self._last is not None:
            last_leaf, end, node = self._last
            if last_leaf is leaf and end == leaf.end and node in self._evictions:
                while node.start >= end:
                    assert node.parent is not None
                    node = node.parent
                return node
        path = path_to(leaf)
        tokens = b"".join([node.tokens for node in path])
        parent = path[0].parent
        assert parent is not None
        node, matched = descend(self._root(self._namespaces[parent]), tokens, 0)
        if matched == leaf.end:
            return node
        if matched < node.end:
            node = self._split(node, matched)
        rest = tokens[matched * TOKEN_BYTES :]
        new = Node(node, matched, rest, [], 0)
        node.children[rest[:TOKEN_BYTES]] = new
        assert self._reason is not None
        self._evictions[new] = Eviction(self._reason, self._now)
        self.num_bytes += NODE_BYTES + len(rest)
        return new

    def of(self, namespace: Namespace, tokens: Tokens, position: int) -> list[tuple[int, Eviction]]:
        """What follows the first `position` of these tokens, which are cached, and was evicted: up
        to which token, from where the last eviction ends."""
        root = self._roots.get(namespace)
        if root is None:
            return []
        node, end = descend(root, tokens, 0)
        found = []
        while end > position and node.parent is not None:
            found.append((end, self._evictions[node]))
            node, end = node.parent, node.start
        return found[::-1]

    def _root(self, namespace: Namespace) -> Node:
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = Node(None, 0, b"", [], 0)
            self._names[root] = namespace
        return root

    def _split(self, node: Node, position: int) -> Node:
        """Split `node` at sequence `position` and return the new upper half."""
        parent, cut = node.parent, (position - node.start) * TOKEN_BYTES
        assert parent is not None
        upper = Node(parent, node.start, node.tokens[:cut], [], 0)
        parent.children[upper.tokens[:TOKEN_BYTES]] = upper
        node.parent, node.start, node.tokens = upper, position, node.tokens[cut:]
        upper.children[node.tokens[:TOKEN_BYTES]] = node
        self._evictions[upper] = self._evictions[node]
        self.num_bytes += NODE_BYTES
        return upper

    def _forget_oldest(self) -> None:
        node, _ = self._evictions.popitem(last=False)
        parent = node.parent
        assert parent is not None and not node.children
        self.num_bytes -= NODE_BYTES + len(node.tokens)
        del parent.children[node.tokens[:TOKEN_BYTES]]
        if parent.parent is None and not parent.children:
            del self._roots[self._names.pop(parent)]

    def check(self) -> None:
        """Raise AssertionError if this contradicts itself: for tests."""
        places = {node: place for place, node in enumerate(self._evictions)}
        for node, place in places.items():
            parent = node.parent
            assert parent is not None and parent.children[node.tokens[:TOKEN_BYTES]] is node
            assert places.get(parent, len(places)) > place
        num_bytes = sum(NODE_BYTES + len(node.tokens) for node in places)
        assert num_bytes == self.num_bytes <= self.max_bytes
