"""What the radix tree is made of: nodes, the way down through them, and the results of calls.

The KV of token `i` of a sequence is in the sequence's block number `i // block_size`, at offset
`i % block_size`. A node holds the tokens `[start, end)` of every sequence that passes through it:

    token       0               8               16              24
    block       |-------0-------|-------1-------|-------2-------|
    root
     └─ A       [0 .................... 13)                         owns block 0
         ├─ B                             [13 . 17)                 owns blocks 1, 2
         └─ C                             [13 ....... 20)           owns blocks 1, 2

Two sequences that diverge inside a block have a block each from there on, and both blocks hold the
shared start: here, with a `block_size` of 8, the KV of [8, 13) is in block 1 of B and in that of C.
So an internal node that ends inside a block owns no block for that part. **Every block belongs to
exactly one node**: a leaf owns the blocks up to its end, an internal node only those that it fills.

Changes nothing: only `prefix_tree.py`, `tree.py` and `components/` change nodes. Pure: no vLLM, no
torch.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

from sgl_vllm.radix.tokens import TOKEN_BYTES, Tokens, common_prefix_length

if TYPE_CHECKING:
    from sgl_vllm.radix.prompt_logprobs import Rows

Namespace = Hashable
"""Sequences of different namespaces share nothing. In vLLM a `CacheNamespace`."""


HOLE = -1
"""In a list of blocks, stands for one that is not there."""


def without_holes(block_ids: Sequence[int]) -> list[int]:
    return [i for i in block_ids if i != HOLE] if HOLE in block_ids else [*block_ids]


ENDED_S = 1e9
"""Offset that makes nodes which count as never used sort before all others."""


class Context(Protocol):
    """What ends in a leaf. It moves up when the leaf is evicted, and is gone with its sequence."""

    leaf: Node | None

    def move_to(self, leaf: Node) -> None: ...


_NO_STATES: dict[int, tuple[int, ...]] = {}
"""The states of roots, and of every node of a tree without recurrent groups. Stays empty."""


@dataclass(slots=True, eq=False, repr=False)
class Node:
    """A run of tokens, `[start, end)` of every cached sequence that passes through it.

    Invariant: `block_ids` are the blocks of those sequences from number `start // block_size` on. A
    leaf owns all blocks up to its end, an internal node only those that it fills (see above).
    Each list in `windows` is as long.

    Attributes:
        windows: for each window group of the tree, its blocks of the same tokens, or `HOLE`
            (`components/windows.py`).
        states: by position, the blocks of the recurrent groups (`components/states.py`).
        parent: None for a root, and for a node that is no longer in the tree.
        children: by their first token.
        serial: identifies the node in snapshots.
        num_hits: how many requests read it from the cache, since `RadixTree.record_end` if that was
            called for it.
        last_used: seconds, on the tree's clock; `ENDED_S` less since `RadixTree.record_end`.
        priority: the most important (smallest) priority of the requests that used it.
        context: what is known above of the last request that ended here.
        logprobs: log-probabilities of its first tokens, if computed (`prompt_logprobs.py`).
        kept_until: when its mark expires, on the tree's clock (`kept.py`); 0 without a mark.
    """

    parent: Node | None
    start: int
    tokens: Tokens
    block_ids: list[int]
    priority: int
    end: int = field(init=False)
    windows: tuple[list[int], ...] = ()
    states: dict[int, tuple[int, ...]] = field(default_factory=lambda: _NO_STATES)
    children: dict[Tokens, Node] = field(default_factory=dict)
    serial: int = 0
    num_hits: int = 0
    last_used: float = 0.0
    context: Context | None = None
    logprobs: Rows | None = None
    kept_until: float = 0.0

    def __post_init__(self) -> None:
        self.end = self.start + len(self.tokens) // TOKEN_BYTES

    def count_as_never_used(self) -> None:
        """Every policy evicts it before nodes that count, the longest unused first."""
        self.num_hits = 0
        if not self.ended:
            self.last_used -= ENDED_S

    @property
    def ended(self) -> bool:
        """Whether it counts as never used, as what read it has ended. A hit changes that."""
        return self.last_used < 0

    @property
    def was_used_at(self) -> float:
        """Seconds, on the tree's clock, whether that counts or not."""
        return self.last_used + ENDED_S if self.ended else self.last_used


class Match(NamedTuple):
    """The longest cached prefix of some tokens.

    Attributes:
        num_tokens: its length; 0 if nothing is cached.
        node: the deepest node that holds a part of it, whose end may lie after the match's.
    """

    num_tokens: int
    node: Node | None


NO_MATCH = Match(0, None)


class InsertResult(NamedTuple):
    """What an insert changed.

    Attributes:
        own_leaf: the leaf that holds the end of the sequence, if this caller's inserts made it. Its
            next insert, of a longer sequence, may start from there.
        taken: blocks that the tree owns from now on, of all groups.
        evicted: blocks that it owns no longer, of all groups.
    """

    own_leaf: Node | None
    taken: list[int]
    evicted: list[int]


def subtree(top: Node) -> Iterator[Node]:
    """`top` and every node below it, parents before children."""
    stack = [top]
    while stack:
        node = stack.pop()
        yield node
        stack.extend(node.children.values())


def descend(node: Node, tokens: Tokens, matched: int) -> tuple[Node, int]:
    """From `node`, which holds the first `matched` tokens, to the deepest node that `tokens` reach.

    Returns that node, and how many of the tokens it and its parents hold. Costs one dictionary
    lookup and one `memcmp` per node.
    """
    position, end = matched * TOKEN_BYTES, len(tokens)
    while position < end:
        child = node.children.get(tokens[position : position + TOKEN_BYTES])
        if child is None:
            break
        node = child
        if not tokens.startswith(node.tokens, position):
            position += TOKEN_BYTES * common_prefix_length(node.tokens, tokens, position)
            break
        position += len(node.tokens)
    return node, position // TOKEN_BYTES


def path_to(node: Node | None) -> list[Node]:
    """The nodes that hold tokens from the root's child down to `node`."""
    path = []
    while node is not None and node.parent is not None:
        path.append(node)
        node = node.parent
    path.reverse()
    return path


def holder_of(match: Match, num_tokens: int) -> Match:
    """The first `num_tokens` of a match, at least one, with the deepest node that holds some."""
    node = match.node
    while node is not None and node.start >= num_tokens:
        node = node.parent
    return Match(num_tokens, node)


def first_block_below(node: Node) -> int:
    """A block that holds the part of internal `node` after its last full block."""
    while True:
        node = next(iter(node.children.values()))
        if node.block_ids:
            return node.block_ids[0]
