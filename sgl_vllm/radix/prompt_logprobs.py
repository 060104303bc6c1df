"""Log-probabilities of cached prompt tokens, beside the nodes of the radix tree in host memory.

Owns the rows of each node and the memory they take. Does not own which requests ask for them, nor
how they are computed (`scheduler/select.py`). Pure: no vLLM, no torch.

The row of token t says how likely it was after tokens [0, t). Its KV is not needed for that, but
the KV of the tokens before it is. So rows of [1, n) allow a hit of n - 1 tokens at most: the pass
that computes token n - 1 gives the row of token n (`scheduler/select.py` has a picture).

A node has the rows of its first tokens, or none. They are evicted with the node, and earlier if
memory runs out: the least recently used first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sgl_vllm.radix.node import Match, Node, path_to

MAX_TOP_K = 5
"""The most likely tokens beside the prompt's own that are kept of each row. Rows of requests that
ask for more are not kept."""


class Rows(NamedTuple):
    """Log-probabilities of consecutive tokens of a prompt, as vLLM returns them.

    Attributes:
        token_ids: [n, 1 + k], the prompt's own token before the k most likely ones.
        logprobs: [n, 1 + k], natural logarithms.
        ranks: [n], of the prompt's own token; the most likely one has rank 1.
    """

    token_ids: NDArray[np.integer]
    logprobs: NDArray[np.floating]
    ranks: NDArray[np.integer]

    @property
    def num_tokens(self) -> int:
        return len(self.ranks)

    @property
    def top_k(self) -> int:
        return self.token_ids.shape[1] - 1

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in self)

    def part(self, start: int, end: int, top_k: int) -> Rows:
        """The rows [start, end) with `top_k` likely tokens, in the same memory."""
        place = slice(start, end), slice(1 + top_k)
        return Rows(self.token_ids[place], self.logprobs[place], self.ranks[start:end])


def joined(parts: Iterable[Rows]) -> Rows:
    """The rows of at least one part, one after the other. All have the same `top_k`."""
    return Rows(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))


class WantedRows:
    """The rows that one request asks for, with `top_k` likely tokens.

    Attributes:
        known: those of its first tokens, in parts. A row of zeros stands for the first token.
    """

    def __init__(self, top_k: int) -> None:
        self.top_k = top_k
        place = np.zeros((1, 1 + top_k), np.int32)
        self.known: Sequence[Rows] = [Rows(place, place.astype(np.float32), place[:, 0])]

    @property
    def num_known(self) -> int:
        return num_tokens_in(self.known)

    def limit_hit(self, found: Sequence[Rows], num_prompt_tokens: int) -> int:
        """The most prompt tokens that a hit may have, given the rows that its lookup `found`.

        The last row is always computed: without a new row, vLLM's V2 runner returns none. The rows
        that an earlier lookup found stay known, because a pass in flight may depend on them.
        """
        if num_tokens_in(found) > self.num_known:
            self.known = found
        return max(0, min(self.num_known - 1, num_prompt_tokens - 2))


def num_tokens_in(parts: Iterable[Rows]) -> int:
    return sum(part.num_tokens for part in parts)


class PromptLogprobs:
    """The rows of one tree. Invariant: `num_bytes`, their memory, is at most `max_bytes`, which
    is 0 until the tree's owner raises it."""

    def __init__(self) -> None:
        self.max_bytes = self.num_bytes = 0
        self._nodes: dict[Node, None] = {}  # with rows, the least recently used first

    def find(self, match: Match, top_k: int) -> list[Rows]:
        """The rows of the first tokens of a current match, in parts. Copies nothing."""
        parts: list[Rows] = []
        for node in path_to(match.node):
            rows = node.logprobs
            if rows is None or rows.top_k < top_k:
                break
            num_tokens = min(rows.num_tokens, match.num_tokens - node.start)
            parts.append(rows.part(0, num_tokens, top_k))
            if node.start + num_tokens < node.end:
                break
        return parts

    def keep(self, match: Match, rows: Rows) -> None:
        """Keep the rows of the first tokens of a current match, and count them as used now."""
        top_k, path = min(rows.top_k, MAX_TOP_K), path_to(match.node)
        for node in reversed(path):  # the rows of a node are of no use without its parents'
            end = min(node.end, match.num_tokens, rows.num_tokens)
            had = node.logprobs
            if had is None or (had.num_tokens, had.top_k) < (end - node.start, top_k):
                self._set(node, rows.part(node.start, end, top_k))
            elif had is not None:
                self._nodes[node] = self._nodes.pop(node)
        while self.num_bytes > self.max_bytes:
            self._set(next(iter(self._nodes)), None)

    # -- the tree has changed -----------------------------------------------------------------

    def split(self, node: Node, upper: Node) -> None:
        """`upper` has the first tokens of `node` now."""
        if (rows := node.logprobs) is not None:
            num_upper = upper.end - upper.start
            self._set(upper, rows.part(0, num_upper, rows.top_k))
            self._set(node, rows.part(num_upper, rows.num_tokens, rows.top_k))

    def cut(self, node: Node, end: int) -> None:
        """The tokens of `node` from `end` on are gone."""
        if (rows := node.logprobs) is not None and rows.num_tokens > end - node.start:
            self._set(node, rows.part(0, end - node.start, rows.top_k))

    def clear(self) -> None:
        for node in [*self._nodes]:
            self._set(node, None)

    def _set(self, node: Node, rows: Rows | None) -> None:
        """Give a node a copy of `rows` in place of its own. A node without a row has None."""
        if node.logprobs is not None:
            self.num_bytes -= node.logprobs.num_bytes
            del self._nodes[node]
            node.logprobs = None
        if rows is not None and rows.num_tokens:
            token_ids, ranks = rows.token_ids.astype(np.int32), rows.ranks.astype(np.int32)
            node.logprobs = Rows(token_ids, rows.logprobs.astype(np.float32), ranks)
            self.num_bytes += node.logprobs.num_bytes
            self._nodes[node] = None
