"""Which tokens of a prompt are computed, and which get the KV of a segment cached elsewhere.

Owns that choice. Does not own where segments are cached (`segment_index.py`) nor how KV moves
(`copies.py`). Pure: no vLLM, no torch.

    prompt      |--- head ---|----- A -----|----- B -----|-- question --|
    from the tree     [0, hit)
    computed               [hit ... A a)         [B b)         [question]
    reused                      [a ........ A end) [b ... B end)

Of each segment that is cached elsewhere, a share of the tokens is computed in its new context.
These are the first ones, because every later token of a segment attends to them (EPIC, Hu et al.,
arXiv 2410.15332). Or they are those whose KV would change most, wherever they are (CacheBlend, Yao
et al., arXiv 2405.16444). Then the whole segment is reused, and *windows* of a few tokens are
computed again, which workers choose. The tokens between two reused intervals are one *chunk*.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sgl_vllm.approximate.segment_index import Donor

MIN_TOKENS = 32
"""A segment of which fewer tokens would be reused is computed: each interval costs a row of a batch
and a copy."""

WINDOW_SIZES = (16, 32)
"""Tokens of a window: the fewest with which there are rows enough. At most `MIN_TOKENS`."""


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
        num_chosen: how many of them are computed again, those that deviate most.
    """

    start: int
    end: int
    donor_start: int
    block_ids: tuple[int, ...]
    num_chosen: int = 0

    @property
    def num_tokens(self) -> int:
        return self.end - self.start

    @property
    def shift(self) -> int:
        """By how many positions keys have to be rotated."""
        return self.start - self.donor_start

    def without_first(self, num_tokens: int, block_size: int) -> Reuse:
        """What is left if the first tokens are computed instead, and no others."""
        donor_start = self.donor_start + num_tokens
        first_block = donor_start // block_size - self.donor_start // block_size
        return Reuse(self.start + num_tokens, self.end, donor_start, self.block_ids[first_block:])

    def window_starts(self, size: int) -> list[int]:
        """Where windows of `size` tokens begin that together have all tokens. The last two may
        overlap."""
        return [*range(self.start, self.end - size, size), self.end - size]


def first_windows(reuses: Sequence[Reuse], size: int) -> list[list[Chunk]]:
    """The first windows of each interval: with those of the intervals before it, just enough for
    all tokens that are to be chosen of them."""
    windows = []
    num_chosen = num_windows = 0
    for reuse in reuses:
        num_chosen += reuse.num_chosen
        num_more = -(-num_chosen // size) - num_windows
        num_windows += num_more
        starts = reuse.window_starts(size)[:num_more]
        windows.append([Chunk(start, start + size) for start in starts])
    return windows


def plan(
    found: Iterable[tuple[int, int, Donor]],
    num_computed: int,
    num_tokens: int,
    recompute: float,
    block_size: int,
    *,
    deviating: bool = False,
) -> list[Reuse]:
    """What is reused, in ascending order.

    Args:
        found: segments of the prompt, as half-open intervals of its tokens in ascending order, each
            with what is cached of it elsewhere.
        num_computed: how many tokens of the prompt have exact KV in the cache.
        num_tokens: of the prompt. Its last token is always computed, and so is the first one after
            `num_computed`.
        recompute: the share of each segment's tokens that is computed. 0 to 1.
        deviating: these are chosen later (`Reuse.num_chosen`), instead of the first ones.
    """
    share_of_first = 0.0 if deviating and recompute < 1 else recompute
    reuses = []
    for start, end, donor in found:
        begin = max(start + math.ceil(share_of_first * (end - start)), num_computed + 1)
        stop = min(start + donor.num_tokens, num_tokens - 1)
        num_chosen = math.ceil((recompute - share_of_first) * (stop - begin))
        if stop - begin - num_chosen < MIN_TOKENS:
            continue
        donor_start = donor.start + begin - start
        first_block = donor_start // block_size - donor.start // block_size
        last_block = (donor_start + stop - begin - 1) // block_size - donor.start // block_size
        block_ids = donor.block_ids[first_block : last_block + 1]
        reuses.append(Reuse(begin, stop, donor_start, block_ids, num_chosen))
    return reuses
