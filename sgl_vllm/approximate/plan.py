"""Which tokens of a prompt are computed, and which get the KV of a segment cached elsewhere.

Owns that choice. Does not own where segments are cached (`segment_index.py`) nor how KV moves
(`copies.py`). Pure: no vLLM, no torch.

    prompt      |--- head ---|----- A -----|----- B -----|-- question --|
    from the tree     [0, hit)
    computed               [hit ... A a)         [B b)         [question]
    reused                      [a ........ A end) [b ... B end)

The first tokens of each segment that is cached elsewhere are computed in their new context, because
every later token of the segment attends to them (EPIC, Hu et al., arXiv 2410.15332). The tokens
between two reused intervals are one *chunk*.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from sgl_vllm.approximate.segment_index import Donor

MIN_TOKENS = 32
"""A segment of which fewer tokens would be reused is computed: each interval costs a row of a batch
and a copy."""


class Chunk(NamedTuple):
    """Tokens [start, end) of a prompt, without the prompt's last one."""

    start: int
    end: int

    @property
    def num_tokens(self) -> int:
        return self.end - self.start


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
        recompute: the share of each segment's tokens that is computed. 0 to 1.
    """
    reuses = []
    for start, end, donor in found:
        begin = max(start + math.ceil(recompute * (end - start)), num_computed + 1)
        stop = min(start + donor.num_tokens, num_tokens - 1)
        if stop - begin < MIN_TOKENS:
            continue
        donor_start = donor.start + begin - start
        first_block = donor_start // block_size - donor.start // block_size
        last_block = (donor_start + stop - begin - 1) // block_size - donor.start // block_size
        block_ids = donor.block_ids[first_block : last_block + 1]
        reuses.append(Reuse(begin, stop, donor_start, block_ids))
    return reuses
