"""Which levels of shared KV blocks the requests of a decode batch read together.

Owns the tree of shared leading blocks of a batch, and the choice of its nodes by what they cost.
Does not own the work that follows from it (`prefix_plan`). Pure: numpy alone.

Requests that share a path of the radix tree have the same block ids at the start of their rows of
the block table. A *level* is a maximal run of full blocks shared by the same set of requests:

    request 0   | 7  8  9 | 20 21 | 30          seq_len in the middle of block 30
    request 1   | 7  8  9 | 20 21 | 31 32
    request 2   | 7  8  9 | 40
                 \\_____/   \\___/    \\___/
                 0, 1, 2    0, 1     own tails, also where nothing is left for them

A *segment* is what is read together: the blocks of a chosen level for all its requests, or the tail
of one request. What a level does not pay for goes to the segments below it.

Ideas: Hydragen (Juravsky et al., arXiv 2402.05099), ChunkAttention (Ye et al., arXiv 2402.15220),
cascade inference (Ye et al., 2024).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any  # Any: integers of any width

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.integer[Any]]

NARROW_ROWS = 16
"""Rows of the smallest tile: tensor cores take no fewer."""

MAX_TILE_BYTES = 64 << 10
"""Of a tile's queries, which lie in shared memory beside two tiles of KV."""

MAX_LEVELS = 32
"""The Python loops here run once per depth of the tree, at most this often. What is shared only
deeper is read by each request for itself."""


@dataclass(frozen=True)
class AttentionShape:
    """Of one layer on one device.

    Attributes:
        head_size: elements of a head's key, and of its value.
        itemsize_bytes: of an element of the KV cache.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    itemsize_bytes: int
    block_size_tokens: int

    def __post_init__(self) -> None:
        if min(self.num_heads, self.num_kv_heads, self.head_size, self.itemsize_bytes) < 1:
            raise ValueError(f"every number of {self} must be positive")
        if self.block_size_tokens < 1:
            raise ValueError(f"block_size_tokens must be positive, not {self.block_size_tokens}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads ({self.num_heads}) must be a multiple of num_kv_heads "
                f"({self.num_kv_heads})"
            )

    @property
    def queries_per_kv_head(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def kv_bytes_per_token(self) -> int:
        """Key and value of all KV heads."""
        return 2 * self.num_kv_heads * self.head_size * self.itemsize_bytes

    @property
    def partial_bytes(self) -> int:
        """One request's result of one item, float32 with its LSE: written, and read again."""
        return 2 * 4 * self.num_heads * (self.head_size + 1)


@dataclass(frozen=True)
class Costs:
    """What grouping costs besides KV, as the bytes that could be read in the same time.

    **Not yet measured on a GPU**: reckoned for one with 132 multiprocessors and 3.3 TB/s, where a
    microsecond is 3.3 MB. `python -m benchmarks.kernels` on CUDA is there to correct them.

    Attributes:
        launch_bytes: of the launches that the ordinary kernel does not need, about 5 us.
        item_bytes: of one program's start and end, about 2 us of one multiprocessor.
        efficiency: bandwidth of our kernel as a share of the ordinary kernel's.
        rows_per_tile: queries (requests x heads of a KV head) that one program takes at most; a
            power of two. Every further tile of a split reads the same KV again.
        again: what reading again costs, as a share of reading first: it mostly finds the L2 cache.
        num_multiprocessors: splits are made until each has WIDE_PROGRAMS or NARROW_PROGRAMS.
        min_split_tokens: no split is shorter, however few programs there are.
        min_split_tokens_per_row: nor shorter than this for each row of its tile, as each row of a
            split costs a partial result. At 4, with 16-bit KV, that is half the bytes of the KV.
    """

    launch_bytes: int = 16 << 20
    item_bytes: int = 48 << 10
    efficiency: float = 0.7
    rows_per_tile: int = 128
    again: float = 0.4
    num_multiprocessors: int = 132
    min_split_tokens: int = 256
    min_split_tokens_per_row: int = 4

    def __post_init__(self) -> None:
        rows = self.rows_per_tile
        if rows < NARROW_ROWS or rows & (rows - 1):
            raise ValueError(f"rows_per_tile must be a power of two from {NARROW_ROWS}, not {rows}")
        if not 0 < self.efficiency <= 1:
            raise ValueError(f"efficiency must be in (0, 1], not {self.efficiency}")
        if not 0 <= self.again <= 1:
            raise ValueError(f"again must be in [0, 1], not {self.again}")
        if min(self.num_multiprocessors, self.min_split_tokens) < 1:
            raise ValueError("num_multiprocessors and min_split_tokens must be positive")


DEFAULT_COSTS = Costs()
FREE = Costs(launch_bytes=0, item_bytes=0, efficiency=1.0)
"""As if only bytes counted: for tests, and to see what the best case would be."""


# -- what is shared


@dataclass(frozen=True)
class Level:
    """The nodes of one depth of the tree, side by side, in the order of `PrefixTree.order`.

    Attributes:
        first, stop: the node's requests are `order[first:stop]`, two or more.
        end_block: its blocks are [end_block of its parent, end_block).
        parent: its index among the nodes above; -1 in the first level, whose blocks begin at 0.
    """

    first: Ints
    stop: Ints
    end_block: Ints
    parent: Ints


@dataclass(frozen=True)
class PrefixTree:
    """The requests, so ordered that those of every node are neighbours, and the levels from the
    root down."""

    order: Ints
    levels: tuple[Level, ...]


def find_tree(block_table: Ints, num_full_blocks: Ints) -> PrefixTree:
    """The tree of shared full leading blocks, at most MAX_LEVELS deep.

    Work: one sort of the rows that share their first block with another, one comparison of
    neighbours, O(num_requests * max_blocks) each (times log(num_requests) for the sort), and
    O(num_requests) for each level. The sort compares bytes: any order in which equal beginnings
    are neighbours will do.

    Args:
        block_table: [num_requests, max_blocks], integer; what lies behind a request's full blocks
            may be anything.
        num_full_blocks: [num_requests], integer, each at most max_blocks.
    """
    num_requests = len(block_table)
    nothing_shared = PrefixTree(np.arange(num_requests), ())
    if not num_requests or not block_table.shape[1]:
        return nothing_shared
    _, which, counts = np.unique(
        np.where(
            num_full_blocks > 0, block_table[:, 0].astype(np.int64), -1 - np.arange(num_requests)
        ),
        return_inverse=True,
        return_counts=True,
    )
    shares = counts[which] > 1
    sharing = np.flatnonzero(shares)
    if not len(sharing):
        return nothing_shared
    full = num_full_blocks[sharing]
    width = int(full.max())
    keys = np.ascontiguousarray(block_table[sharing, :width], dtype=np.int32)
    # What is not full must not come between rows that share more.
    fewest = int(full.min())
    keys[:, fewest:][np.arange(fewest, width) >= full[:, None]] = -1
    by_blocks = np.argsort(keys.view(f"V{keys.itemsize * width}").ravel(), kind="stable")
    keys, full = keys[by_blocks], full[by_blocks]
    differs = keys[1:] != keys[:-1]
    common = np.where(differs.any(axis=1), differs.argmax(axis=1), width)
    common = np.minimum(common, np.minimum(full[1:], full[:-1]))
    order = np.concatenate((sharing[by_blocks], np.flatnonzero(~shares)))
    return PrefixTree(order, tuple(_levels(common)))


def _levels(common: Ints) -> list[Level]:
    """From how many leading blocks each two neighbours share, [num_rows - 1]."""
    levels: list[Level] = []
    padded = np.append(common, 0)
    cuts = np.flatnonzero(common == 0) + 1
    first, stop = np.append(0, cuts), np.append(cuts, len(padded))
    parent = np.full(len(first), -1)
    while len(levels) < MAX_LEVELS:
        shared = stop - first > 1
        first, stop, parent = first[shared], stop[shared], parent[shared]
        if not len(first):
            break
        # Between neighbours of a node lie the places [first, stop - 1).
        bounds = np.stack((first, stop - 1), axis=1).ravel()
        end_block = np.minimum.reduceat(padded, bounds)[::2]
        levels.append(Level(first, stop, end_block, parent))
        node, place = ranges_of(first, stop - 1)
        cuts = place[padded[place] == end_block[node]] + 1
        above = first
        first, stop = np.sort(np.append(first, cuts)), np.sort(np.append(cuts, stop))
        parent = np.searchsorted(above, first, side="right") - 1
    return levels


def ranges_of(first: Ints, stop: Ints) -> tuple[Ints, Ints]:
    """All numbers of all ranges [first, stop), one after the other, and which range each is of."""
    lengths = stop - first
    which = np.repeat(np.arange(len(first)), lengths)
    offset = np.arange(len(which)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    return which, first[which] + offset


# -- what of it is worth a segment


@dataclass(frozen=True)
class Segments:
    """KV positions [kv_start, kv_end) of the requests `order[first : first + num_members]`."""

    first: Ints
    num_members: Ints
    kv_start: Ints
    kv_end: Ints

    @property
    def num_tokens(self) -> Ints:
        return self.kv_end - self.kv_start


@dataclass(frozen=True)
class Tiles:
    """How a segment's requests are cut; both numbers count requests."""

    narrow: int
    wide: int

    @classmethod
    def of(cls, shape: AttentionShape, costs: Costs) -> Tiles:
        per_kv_head = shape.queries_per_kv_head
        row_bytes = power_of_two(shape.head_size) * shape.itemsize_bytes
        rows = min(costs.rows_per_tile, max(NARROW_ROWS, MAX_TILE_BYTES // row_bytes))
        return cls(max(1, NARROW_ROWS // per_kv_head), max(1, rows // per_kv_head))

    def count(self, num_members: Ints) -> Ints:
        return -(-num_members // self.wide)


@dataclass(frozen=True)
class _Choice:
    """For the nodes of one level: whether to take each, if the a-th of its possible begins is where
    its requests have read up to. A begin is 0 (a = 0) or the end of the level a - 1."""

    begins: NDArray[np.float64]
    take: NDArray[np.bool_]


def _choices(tree: PrefixTree, shape: AttentionShape, costs: Costs) -> list[_Choice]:
    """Those that cost the fewest bytes, exactly, but that splits are counted at their shortest.

    From the leaves up: the least cost of all that lies under a node, for each of its begins. A loop
    over the levels, O(num_requests * levels) numbers.
    """
    begins = [np.zeros((len(level.first), 1)) for level in tree.levels[:1]]
    for above, level in zip(tree.levels, tree.levels[1:], strict=False):
        ends = above.end_block[level.parent][:, None]
        begins.append(np.concatenate((begins[-1][level.parent], ends), axis=1))
    tiles = Tiles.of(shape, costs)
    block_bytes = float(shape.kv_bytes_per_token * shape.block_size_tokens)
    choices: list[_Choice] = []
    below: Level | None = None
    least_below = np.zeros((0, 0))
    for depth in range(len(tree.levels) - 1, -1, -1):
        level, begin = tree.levels[depth], begins[depth]
        num_members = level.stop - level.first
        end = level.end_block[:, None].astype(np.float64)

        # Under the node: its children, and the tails of requests in none, less their whole length.
        in_no_child = num_members.astype(np.float64)
        under = np.zeros((len(num_members), depth + 2))
        if below is not None:
            np.subtract.at(in_no_child, below.parent, below.stop - below.first)
            np.add.at(under, below.parent, least_below)
        under -= block_bytes * in_no_child[:, None] * np.append(begin, end, axis=1)

        num_tiles = tiles.count(num_members)
        rows = np.minimum(num_members, tiles.wide) * shape.queries_per_kv_head
        split_tokens = np.maximum(costs.min_split_tokens, rows * costs.min_split_tokens_per_row)
        num_splits = (end - begin) * shape.block_size_tokens / split_tokens[:, None]
        split_bytes = num_members * shape.partial_bytes + num_tiles * costs.item_bytes
        taken = (
            block_bytes * _times_read(num_tiles, costs)[:, None] * (end - begin)
            + np.maximum(1, num_splits) * split_bytes[:, None]
            + under[:, -1:]
        )
        choices.append(_Choice(begin, taken < under[:, :-1]))
        least_below, below = np.minimum(taken, under[:, :-1]), level
    return choices[::-1]


def choose(tree: PrefixTree, shape: AttentionShape, costs: Costs) -> tuple[list[Segments], Ints]:
    """The segments of the levels taken, from the root down, and the block at which each request's
    own tail begins, [num_requests] in the tree's order."""
    size = shape.block_size_tokens
    chosen: list[Segments] = []
    tail_block = np.zeros(len(tree.order), dtype=np.int64)
    begun = np.zeros(0, dtype=np.int64)  # which of a node's begins it is
    for depth, choice in enumerate(_choices(tree, shape, costs)):
        level = tree.levels[depth]
        begun = begun[level.parent] if depth else np.zeros(len(level.first), dtype=np.int64)
        nodes = np.arange(len(begun))
        take = choice.take[nodes, begun]
        kv_start = choice.begins[nodes, begun].astype(np.int64)[take] * size
        first, stop, end_block = level.first[take], level.stop[take], level.end_block[take]
        chosen.append(Segments(first, stop - first, kv_start, end_block * size))
        node, place = ranges_of(first, stop)
        tail_block[place] = end_block[node]
        begun = np.where(take, depth + 1, begun)
    return chosen, tail_block


def _times_read(num_tiles: Ints, costs: Costs) -> NDArray[np.float64]:
    """What `num_tiles` tiles cost that read the same KV, if one costs 1."""
    return 1 + costs.again * (num_tiles.astype(np.float64) - 1)


def power_of_two(rows: int) -> int:
    """The least from NARROW_ROWS on that holds so many rows."""
    return max(NARROW_ROWS, 1 << (rows - 1).bit_length())
