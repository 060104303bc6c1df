"""Where segments are cached: from a segment's tokens to the blocks that hold their exact KV.

Owns which prompt has each segment. Does not own what is cached of it: that is the tree's, which is
asked at each lookup. So an entry costs nothing while the tree splits nodes or evicts blocks.

Pure: no vLLM, no torch.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from sgl_vllm.radix.node import Namespace
from sgl_vllm.radix.tokens import TOKEN_BYTES, Tokens
from sgl_vllm.radix.tree import RadixTree

MAX_SEGMENTS = 10_000
"""Entries that an index keeps, of about 200 bytes each beside the prompts."""

MAX_BYTES = 1 << 28
"""Of the prompts that it keeps, where one with several segments counts once for each."""


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


class SegmentIndex:
    """The places of segments in one tree: for each segment the prompt that was added last.

    Args:
        tree: what is cached. Only trees without window and recurrent groups.
        max_segments: the segment that was used least recently goes first.
    """

    def __init__(self, tree: RadixTree, max_segments: int = MAX_SEGMENTS) -> None:
        self._tree = tree
        self._max_segments = max_segments
        self._places: OrderedDict[Hashable, tuple[Tokens, int]] = OrderedDict()
        """The prompt, and the position in it where the segment starts."""
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._places)

    def add(
        self, namespace: Namespace, tokens: Tokens, segments: Sequence[tuple[int, int]]
    ) -> None:
        """Note that a prompt has segments, as far as they are cached.

        Cost: one descent of the tree for all of them, and a hash of each.

        Args:
            tokens: of the prompt.
            segments: half-open intervals of its tokens.
        """
        num_cached = self._tree.match_prefix(namespace, tokens).num_tokens
        for start, end in segments:
            if end <= num_cached:
                key = _key(namespace, tokens[start * TOKEN_BYTES : end * TOKEN_BYTES])
                self._remove(key)
                self._places[key] = tokens, start
                self._num_bytes += len(tokens)
        while len(self._places) > self._max_segments or self._num_bytes > MAX_BYTES:
            self._remove(next(iter(self._places)))

    def find(self, namespace: Namespace, segment: Tokens) -> Donor | None:
        """Where the segment with these tokens is cached, or its first tokens are; None if they are
        nowhere. Drops an entry of which nothing is left."""
        key = _key(namespace, segment)
        if key not in self._places:
            return None
        tokens, start = self._places[key]
        end = start + len(segment) // TOKEN_BYTES
        match = self._tree.match_prefix(namespace, tokens[: end * TOKEN_BYTES])
        if match.num_tokens <= start:
            self._remove(key)
            return None
        self._places.move_to_end(key)
        block_ids = self._tree.block_ids(match, match.num_tokens)
        first = start // self._tree.block_size
        return Donor(start, match.num_tokens - start, tuple(block_ids[first:]))

    def _remove(self, key: Hashable) -> None:
        tokens, _ = self._places.pop(key, (b"", 0))
        self._num_bytes -= len(tokens)

    def clear(self) -> None:
        self._places.clear()
        self._num_bytes = 0


def _key(namespace: Namespace, segment: Tokens) -> Hashable:
    return namespace, hashlib.blake2b(segment, digest_size=16).digest()
