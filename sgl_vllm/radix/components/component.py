"""What a kind of KV-cache group other than the tree's own full attention adds to the tree.

Owns the moments at which the tree asks or tells a kind of group, and what one does that has nothing
to say: nothing. Pure: no vLLM, no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from sgl_vllm.radix.node import Match, Node

States = Mapping[int, Sequence[int]]
"""By position, a block of each recurrent group."""


class Given(NamedTuple):
    """What a caller of `RadixTree.insert` has beside full attention.

    Attributes:
        windows: for each window group its blocks, from the one with token `num_known` on.
        states: states after prefixes of its tokens.
        num_known: the tokens that `own_leaf` and its parents hold.
        own_leaf: the leaf from which the insert starts; None for the root.
    """

    windows: Sequence[Sequence[int]]
    states: States
    num_known: int
    own_leaf: Node | None


class Component:
    """One kind of group. Its blocks are in the same nodes and the same `BlockTable`.

    An insert calls `fill_holes`; if it has new tokens `split` where they begin inside a node,
    `add_node` for a new leaf, and `after_growth`; and last `after_insert`.
    """

    def __contains__(self, block_id: int) -> bool:
        """Whether the block is of this kind. Such a block can be evicted alone."""
        return False

    # -- match --------------------------------------------------------------------------------

    def longest_hit(self, match: Match, num_tokens: int) -> int:
        """The longest prefix of a match, of at most `num_tokens`, that can be read."""
        return num_tokens

    # -- insert -------------------------------------------------------------------------------

    def add_node(self, node: Node) -> None:
        """`node` is new, and has no blocks of this kind."""

    def fill_holes(self, node: Node, num_matched: int, given: Given) -> list[int]:
        """The first `num_matched` tokens of the caller are on the path to `node`. Take what the
        path lacks. Returns the blocks taken, which are locked."""
        return []

    def after_growth(
        self, node: Node, old_end: int, given: Given, continued: Node | None
    ) -> tuple[list[int], list[int]]:
        """Leaf `node` has got the caller's tokens from `old_end` on: it has grown, or is new.

        Args:
            continued: the leaf that ended at `old_end` inside a block, which the caller's longer
                copy replaces: `node`, or its parent, which then is no leaf any more. None if
                `old_end` was at no leaf's end.

        Returns:
            The blocks taken, which are locked, and those replaced.
        """
        return [], []

    def after_insert(self, node: Node, given: Given) -> list[int]:
        """The caller's tokens are in the tree, and end in `node`. Returns the blocks taken."""
        return []

    def split(self, node: Node, upper: Node) -> None:
        """`upper` has got the first tokens of `node`."""

    # -- evict --------------------------------------------------------------------------------

    def unlocked(self, block_ids: Iterable[int]) -> None:
        """These blocks may be in use no longer. Some may be of another kind."""

    def count_as_never_used(self, node: Node) -> None:
        """What `node` has goes before all that counts."""

    def evict_spare(self, num_blocks: int) -> list[int]:
        """Remove up to `num_blocks` that are worth less than all else. Returns them."""
        return []

    def drop(self, block_id: int) -> list[int]:
        """Remove a block of this kind alone, and what is of no use without it. Returns all."""
        return []

    def cut(self, node: Node, end: int) -> list[int]:
        """Remove what `node` has after `end`: its start, or the end of a block of full attention.
        Returns the blocks."""
        return []

    def leaving(self, node: Node) -> None:
        """Childless `node` is about to be removed, and its parent stays."""

    def move_first(self, node: Node, parent: Node) -> list[int]:
        """`parent`, which ends where leaf `node` begins, has got the block of full attention that
        they shared. Returns the blocks of this kind that it has got too."""
        return []

    def clear(self) -> None:
        """The tree is emptied."""

    def check(self, nodes: Iterable[Node]) -> None:
        """Raise AssertionError if this contradicts the nodes of the tree: for tests."""
