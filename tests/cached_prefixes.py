"""What a radix tree holds, as plain sets of prefixes, for tests that replay it."""

from __future__ import annotations

from typing import Any  # Any: a namespace, of the test's own type

from sgl_vllm.radix.node import Node
from sgl_vllm.radix.tokens import unpack
from sgl_vllm.radix.tree import RadixTree

Prefix = tuple[Any, tuple[int, ...]]
"""A namespace, and tokens."""


def prefixes_in(tree: RadixTree) -> set[Prefix]:
    """Every prefix of every sequence in the tree."""
    found: set[Prefix] = set()
    for namespace, root in tree.roots.items():
        stack: list[tuple[Node, tuple[int, ...]]] = [(one, ()) for one in root.children.values()]
        while stack:
            node, before = stack.pop()
            tokens = (*before, *unpack(node.tokens))
            found.update((namespace, tokens[:n]) for n in range(len(before) + 1, len(tokens) + 1))
            stack += [(child, tokens) for child in node.children.values()]
    return found
