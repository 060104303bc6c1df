"""Which tokens of a prompt are computed, and which get the KV of a segment cached elsewhere.

Owns that choice. Does not own where segments are cached (`segment_index.py`) nor how KV moves
(`copies.py`). Pure: no vLLM, no torch.

    prompt      |--- head ---|----- A -----|----- B -----|-- question --|
    from the tree     [0, hit)
    computed               [hit ... A a)         [B b)         [question]
    reused                      [a ........ A end) [b ... B end)

Of each segment that is cached elsewhere, the first tokens are computed in their new context: they
are the ones whose KV depends most on what precedes them, because every later token of a segment
attends to them (EPIC, Hu et al., arXiv 2410.15332). The tokens between two reused intervals are
one *chunk*.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from sgl_vllm.approximate.segment_index import Donor

MIN_TOKENS = 32
"""Fewer tokens of a segment are not reused: each interval costs a row of a batch and a copy."""


@dataclass(frozen=True, slots=True)
class Reuse:
    """Tokens [start, end) of a prompt, whose KV comes from a donor.

    Attributes:
        donor_start: the position at which the donor's KV of the first of them was computed.
        block_ids: the donor's blocks. The first holds that token, at the offset
            ``donor_start % block_size``.
    """

    start: int
    end: int
    donor_start: int
    block_ids: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        return self.end - self.start

    @property
    def shift(self) -> int:
        """By how many positions keys have to be rotated."""
        return self.start - self.donor_start


def plan(
    found: Iterable[tuple[int, int, Donor]],
    num_computed: int,
    num_tokens: int,
    recompute: float,
    block_size: int,
) -> list[Reuse]:
    """What is reused, in ascending order.

    Args:
        found: segments of the prompt, as half-open intervals of its tokens in ascending order, each
            with what is cached of it elsewhere.
        num_computed: how many tokens of the prompt have exact KV in the cache.
        num_tokens: of the prompt. Its last token is always computed, and so is the first one after
            `num_computed`.
        recompute: the share of each segment's tokens, from its first on, that is computed. 0 to 1.
    """
    reuses = []
    for start, end, donor in found:
        num_first = math.ceil(recompute * (end - start))
        begin = max(start + num_first, num_computed + 1)
        stop = min(start + donor.num_tokens, num_tokens - 1)
        if stop - begin < MIN_TOKENS:
            continue
        donor_start = donor.start + begin - start
        first = donor_start // block_size - donor.start // block_size
        last = (donor_start + stop - begin - 1) // block_size - donor.start // block_size
        reuses.append(Reuse(begin, stop, donor_start, donor.block_ids[first : last + 1]))
    return reuses
