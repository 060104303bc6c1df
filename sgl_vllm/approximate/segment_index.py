"""Where segments are cached: from a segment's tokens to the blocks that hold their exact KV.

Owns the index. Does not own the blocks, nor what is cached: that is the tree's, which is asked at
each lookup. So an entry costs nothing while the tree splits nodes or evicts blocks, and one whose
blocks the tree has evicted or given to other tokens is worth nothing, but does no harm.

    prompt     |--- head ---|------ A ------|---- B ----|        tokens 100, 50
    blocks     |----0----|----1----|----2----|----3----|
    entry      (namespace, hash of A)  ->  first token 12, blocks 0, 1, 2

Pure: no vLLM, no torch.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from sgl_vllm.radix.node import Namespace, Node, path_to
from sgl_vllm.radix.tokens import TOKEN_BYTES, Tokens, common_prefix_length
from sgl_vllm.radix.tree import RadixTree

MAX_SEGMENTS = 50_000
"""Entries that an index keeps, of about 300 bytes and 8 per block each."""


class Donor(NamedTuple):
    """Where the KV of a segment's first tokens is cached.

    Attributes:
        start: the position at which the first of them was computed.
        num_tokens: how many of them are cached.
        block_ids: the blocks that hold them. The first holds the token at `start` at the offset
            ``start % block_size``.
    """

    start: int
    num_tokens: int
    block_ids: tuple[int, ...]


class _Place(NamedTuple):
    start: int
    block_ids: tuple[int, ...]


class SegmentIndex:
    """The places of segments in one tree: for each segment the one that was added last.

    A lookup compares the segment's tokens with those in the tree, and its namespace with that of
    the sequence they are in. So whatever it finds is exact KV of these tokens.

    Args:
        tree: what is cached. Only trees without window and recurrent groups.
        max_segments: the segment that was used least recently goes first.
    """

    def __init__(self, tree: RadixTree, max_segments: int = MAX_SEGMENTS) -> None:
        self._tree = tree
        self._max_segments = max_segments
        self._places: OrderedDict[Hashable, _Place] = OrderedDict()

    def __len__(self) -> int:
        return len(self._places)

    def add(
        self, namespace: Namespace, tokens: Tokens, segments: Sequence[tuple[int, int]]
    ) -> None:
        """Note where the segments of a sequence are cached, as far as they are.

        Cost: one descent of the tree for all of them, and a hash of each.

        Args:
            tokens: of the sequence.
            segments: half-open intervals of its tokens, in ascending order.
        """
        match = self._tree.match_prefix(namespace, tokens)
        cached = [(start, end) for start, end in segments if end <= match.num_tokens]
        if not cached:
            return
        size = self._tree.block_size
        block_ids = self._tree.block_ids(match, cached[-1][1])
        for start, end in cached:
            key = _key(namespace, tokens[start * TOKEN_BYTES : end * TOKEN_BYTES])
            self._places[key] = _Place(start, tuple(block_ids[start // size : -(-end // size)]))
            self._places.move_to_end(key)
        while len(self._places) > self._max_segments:
            self._places.popitem(last=False)

    def find(self, namespace: Namespace, segment: Tokens) -> Donor | None:
        """Where the segment with these tokens is cached, or its first tokens are; None if they are
        nowhere. Drops an entry of which nothing is left."""
        key = _key(namespace, segment)
        place = self._places.get(key)
        if place is None:
            return None
        donor = self._cached(namespace, segment, place)
        if donor is None:
            del self._places[key]
        else:
            self._places.move_to_end(key)
        return donor

    def _cached(self, namespace: Namespace, segment: Tokens, place: _Place) -> Donor | None:
        """What is left of a place: the blocks, from the first one on, that the tree still has one
        after the other in one sequence, and that hold the segment's tokens."""
        first_number = place.start // self._tree.block_size
        last = self._last_node(place, first_number)
        if last is None:
            return None
        path = path_to(last)
        root = path[0].parent
        if root is None or self._tree.roots.get(namespace) is not root:
            return None
        of_path = [block_id for node in path for block_id in node.block_ids][first_number:]
        num_blocks = 0
        for ours, theirs in zip(place.block_ids, of_path, strict=False):
            if ours != theirs:
                break
            num_blocks += 1
        end_of_blocks = (first_number + num_blocks) * self._tree.block_size
        end = min(place.start + len(segment) // TOKEN_BYTES, last.end, end_of_blocks)
        if end <= place.start:
            return None
        cached = _tokens_between(path, place.start, end)
        num_tokens = common_prefix_length(cached, segment)
        if not num_tokens:
            return None
        size = self._tree.block_size
        num_blocks = -(-(place.start + num_tokens) // size) - first_number
        return Donor(place.start, num_tokens, place.block_ids[:num_blocks])

    def _last_node(self, place: _Place, first_number: int) -> Node | None:
        """The node that owns the last block of a place of which it and all blocks before it are in
        the tree under their numbers; None if the first one is not."""
        owners, size = self._tree.blocks.owners, self._tree.block_size
        last = None
        for number, block_id in enumerate(place.block_ids, first_number):
            node = owners.get(block_id)
            if node is None:
                break
            index = number - node.start // size
            if not 0 <= index < len(node.block_ids) or node.block_ids[index] != block_id:
                break
            last = node
        return last

    def clear(self) -> None:
        self._places.clear()


def _key(namespace: Namespace, segment: Tokens) -> Hashable:
    return namespace, hashlib.blake2b(segment, digest_size=16).digest()


def _tokens_between(path: Sequence[Node], start: int, end: int) -> Tokens:
    """Tokens [start, end) of a sequence through `path`, which holds them."""
    pieces = []
    for node in path:
        if node.end > start and node.start < end:
            first, last = max(start - node.start, 0), min(end, node.end) - node.start
            pieces.append(node.tokens[first * TOKEN_BYTES : last * TOKEN_BYTES])
    return b"".join(pieces)
