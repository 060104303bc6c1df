"""The work of a decode step that reads shared KV blocks once, and whether it pays.

Owns the work list for `prefix_attention`. Does not own which requests read what together
(`prefix_levels`). Owns no tensors and starts nothing on a device. Pure: numpy alone.

A segment is cut along the KV (splits) and along its requests (tiles) into *items*, one program per
KV head each.

Idea: split-KV (Flash-Decoding, Dao et al., 2023).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from .prefix_levels import (
    DEFAULT_COSTS,
    AttentionShape,
    Costs,
    Ints,
    PrefixTree,
    Segments,
    Tiles,
    choose,
    find_tree,
    power_of_two,
    ranges_of,
)

WIDE_PROGRAMS, NARROW_PROGRAMS = 1, 4
"""For each multiprocessor: a wide tile takes most of its shared memory, a narrow one waits for
memory and wants company. Not yet measured on a GPU either."""

ITEM_FIELDS = 8
(
    TABLE_ROW,  # a request whose row of the block table holds the item's blocks
    KV_START,  # the item's KV positions are [KV_START, KV_END)
    KV_END,
    IS_OPEN,  # 1: ends at the request's length on the device, whatever KV_END says
    FIRST_MEMBER,  # its requests are members[FIRST_MEMBER : FIRST_MEMBER + NUM_MEMBERS]
    NUM_MEMBERS,
    FIRST_SLOT,  # and their results go to slots[FIRST_SLOT : FIRST_SLOT + NUM_MEMBERS]
    TILE,  # which of the tiles that read the same KV: 0 reads it first
) = range(ITEM_FIELDS)


@dataclass(frozen=True)
class Plan:
    """The work of one decode step: every KV position of every request in exactly one item.

    Items whose requests' queries fit into NARROW_ROWS rows come last and are launched by
    themselves. The last split of a tail is *open*: it ends where the request ends on the device, so
    a plan stays right while its requests only grow, and every request has such an item, if with no
    token.

    Attributes:
        items: [num_items, ITEM_FIELDS] int32.
        members: [num_requests] int32, the requests, those of an item side by side.
        slots: [num_partials] int32, where in the partial results those of an item's requests go.
        partial_starts: [num_requests + 1] int32; the partial results of request r are
            [partial_starts[r], partial_starts[r + 1]).
        num_wide_items: the first items.
        wide_rows, narrow_rows: of a tile, a power of two from NARROW_ROWS on.
        num_segments: of levels, without tails.
        shared_blocks: [num_requests] int32, the leading blocks of each that are in such a segment:
            the plan is right for every block table that agrees with its own in these.
        shape: that it is made for.
    """

    items: NDArray[np.int32]
    members: NDArray[np.int32]
    slots: NDArray[np.int32]
    partial_starts: NDArray[np.int32]
    num_wide_items: int
    wide_rows: int
    narrow_rows: int
    num_segments: int
    shared_blocks: NDArray[np.int32]
    shape: AttentionShape = field(repr=False)

    @property
    def num_requests(self) -> int:
        return len(self.members)

    @property
    def num_partials(self) -> int:
        return len(self.slots)

    @property
    def _tokens(self) -> Ints:
        return self.items[:, KV_END].astype(np.int64) - self.items[:, KV_START]

    @property
    def kv_tokens_read(self) -> int:
        """That the programs load, for each KV head; also those that tiles after the first load
        again."""
        return int(self._tokens.sum())

    @property
    def kv_tokens_read_ungrouped(self) -> int:
        """The same if each request reads for itself: the sum of the lengths."""
        return int((self._tokens * self.items[:, NUM_MEMBERS]).sum())

    @property
    def kv_tokens_distinct(self) -> int:
        """That have to come from memory at least once, with the segments as they are."""
        return int(self._tokens[self.items[:, TILE] == 0].sum())

    @property
    def kv_bytes_read(self) -> int:
        return self.kv_tokens_read * self.shape.kv_bytes_per_token

    @property
    def kv_bytes_read_ungrouped(self) -> int:
        return self.kv_tokens_read_ungrouped * self.shape.kv_bytes_per_token

    @property
    def kv_bytes_distinct(self) -> int:
        return self.kv_tokens_distinct * self.shape.kv_bytes_per_token

    @property
    def partial_bytes(self) -> int:
        """Partial results, written and read again."""
        return self.num_partials * self.shape.partial_bytes

    def pays(self, costs: Costs = DEFAULT_COSTS) -> bool:
        """Whether it is to be expected that the ordinary kernel takes longer, from `costs`."""
        if not self.num_segments:
            return False
        moved = (
            self.kv_bytes_distinct
            + costs.again * (self.kv_bytes_read - self.kv_bytes_distinct)
            + self.partial_bytes
            + len(self.items) * costs.item_bytes
        )
        return moved / costs.efficiency + costs.launch_bytes < self.kv_bytes_read_ungrouped


def make_plan(
    block_table: Ints, seq_lens: Ints, shape: AttentionShape, costs: Costs = DEFAULT_COSTS
) -> Plan | None:
    """The cheapest plan, or None if the ordinary kernel is expected to be as fast without one.

    The question is asked every step, so the frequent no is cheap: without two requests that have
    the same first block it takes O(num_requests), and where even the sharing of everything that
    could be shared would not pay, as much. See `build_plan` for the arguments and the rest.
    """
    block_table, seq_lens = _checked(block_table, seq_lens, shape)
    # Whoever shares saves at most all its full blocks: none of it is possible below the launches.
    most_saved = int(seq_lens.sum() - (seq_lens.max() if len(seq_lens) else 0))
    if most_saved * shape.kv_bytes_per_token <= costs.launch_bytes:
        return None
    tree = find_tree(block_table, seq_lens // shape.block_size_tokens)
    if not tree.levels:
        return None
    plan = _plan_of(tree, seq_lens, shape, costs)
    return plan if plan.pays(costs) else None


def build_plan(
    block_table: Ints, seq_lens: Ints, shape: AttentionShape, costs: Costs = DEFAULT_COSTS
) -> Plan:
    """The cheapest plan, whether or not it pays; without a level if none is worth its segment.

    Only whole blocks with the same id that are full in all of the group's requests are shared.

    Args:
        block_table: [num_requests, max_blocks] int32, on the CPU.
        seq_lens: [num_requests] int32, tokens with a KV, that of the step's query token included.

    Raises:
        ValueError: a wrong shape or dtype, or a length outside [0, max_blocks * block_size_tokens].
    """
    block_table, seq_lens = _checked(block_table, seq_lens, shape)
    tree = find_tree(block_table, seq_lens // shape.block_size_tokens)
    return _plan_of(tree, seq_lens, shape, costs)


def _checked(block_table: Ints, seq_lens: Ints, shape: AttentionShape) -> tuple[Ints, Ints]:
    if block_table.ndim != 2 or block_table.dtype != np.int32:
        raise ValueError(
            "block_table must be [num_requests, max_blocks] int32, "
            f"not {list(block_table.shape)} {block_table.dtype}"
        )
    if seq_lens.shape != block_table.shape[:1] or seq_lens.dtype != np.int32:
        raise ValueError(
            f"seq_lens must be [{len(block_table)}] int32, "
            f"not {list(seq_lens.shape)} {seq_lens.dtype}"
        )
    room = block_table.shape[1] * shape.block_size_tokens
    if len(seq_lens) and (seq_lens.min() < 0 or seq_lens.max() > room):
        raise ValueError(
            f"seq_lens must lie in [0, {room}], what the block table has room for, "
            f"not in [{seq_lens.min()}, {seq_lens.max()}]"
        )
    return block_table, seq_lens.astype(np.int64)


def _plan_of(tree: PrefixTree, seq_lens: Ints, shape: AttentionShape, costs: Costs) -> Plan:
    tiles = Tiles.of(shape, costs)
    chosen, tail_block = choose(tree, shape, costs)
    num_requests = len(tree.order)
    shared_blocks = np.zeros(num_requests, dtype=np.int32)
    shared_blocks[tree.order] = tail_block
    tails = Segments(
        np.arange(num_requests),
        np.ones(num_requests, dtype=np.int64),
        tail_block * shape.block_size_tokens,
        seq_lens[tree.order],
    )
    shared = _concatenated(chosen)
    is_wide = shared.num_members > tiles.narrow
    wide, narrow = _picked(shared, is_wide), _concatenated([_picked(shared, ~is_wide), tails])
    widest = min(tiles.wide, int(wide.num_members.max(initial=1)))
    wide_rows = power_of_two(widest * shape.queries_per_kv_head)
    narrow_rows = power_of_two(min(tiles.narrow, num_requests or 1) * shape.queries_per_kv_head)

    num_open = len(tails.first)
    parts = [
        _items(wide, 0, tiles.wide, wide_rows, WIDE_PROGRAMS, shape, costs),
        _items(narrow, num_open, tiles.narrow, narrow_rows, NARROW_PROGRAMS, shape, costs),
    ]
    items = np.concatenate(parts)
    num_members = items[:, NUM_MEMBERS]
    items[:, FIRST_SLOT] = np.cumsum(num_members) - num_members
    items[:, TABLE_ROW] = tree.order[items[:, FIRST_MEMBER]]
    _, place = ranges_of(items[:, FIRST_MEMBER], items[:, FIRST_MEMBER] + num_members)
    request = tree.order[place]
    slots = np.empty(len(request), dtype=np.int32)
    slots[np.argsort(request, kind="stable")] = np.arange(len(request))
    starts = np.zeros(num_requests + 1, dtype=np.int32)
    np.cumsum(np.bincount(request, minlength=num_requests), out=starts[1:])
    return Plan(
        items=items.astype(np.int32),
        members=tree.order.astype(np.int32),
        slots=slots,
        partial_starts=starts,
        num_wide_items=len(parts[0]),
        wide_rows=wide_rows,
        narrow_rows=narrow_rows,
        num_segments=len(shared.first),
        shared_blocks=shared_blocks,
        shape=shape,
    )


def _items(
    segments: Segments,
    num_open: int,
    tile: int,
    rows: int,
    programs: int,
    shape: AttentionShape,
    costs: Costs,
) -> Ints:
    """The segments in splits and tiles, those of one split side by side; the last `num_open`
    segments are open. All columns but TABLE_ROW and FIRST_SLOT."""
    num_tokens = segments.num_tokens
    num_tiles = -(-segments.num_members // tile)
    work = int((num_tiles * num_tokens).sum()) * shape.num_kv_heads
    split_tokens = max(
        costs.min_split_tokens,
        rows * costs.min_split_tokens_per_row,
        -(-work // (programs * costs.num_multiprocessors)),
    )
    # Rounded to the nearest, as one program too many is another wave; all of a segment's splits of
    # one length, a whole number of tensor-core operands.
    num_splits = np.maximum(1, (2 * num_tokens + split_tokens) // (2 * split_tokens))
    split_tokens_of = -(-num_tokens // (16 * num_splits)) * 16
    num_splits = np.maximum(1, -(-num_tokens // np.maximum(1, split_tokens_of)))

    segment, number = ranges_of(np.zeros_like(num_tiles), num_splits * num_tiles)
    split, part = number // num_tiles[segment], number % num_tiles[segment]
    items = np.zeros((len(segment), ITEM_FIELDS), dtype=np.int64)
    items[:, KV_START] = segments.kv_start[segment] + split * split_tokens_of[segment]
    items[:, KV_END] = np.minimum(
        items[:, KV_START] + split_tokens_of[segment], segments.kv_end[segment]
    )
    is_last = split == num_splits[segment] - 1
    items[:, IS_OPEN] = is_last & (segment >= len(segments.first) - num_open)
    items[:, FIRST_MEMBER] = segments.first[segment] + part * tile
    items[:, NUM_MEMBERS] = np.minimum(tile, segments.num_members[segment] - part * tile)
    items[:, TILE] = part
    return items


def _concatenated(segments: list[Segments]) -> Segments:
    names = ("first", "num_members", "kv_start", "kv_end")
    empty = np.zeros(0, dtype=np.int64)
    return Segments(*(np.concatenate([empty, *(getattr(s, n) for s in segments)]) for n in names))


def _picked(segments: Segments, which: NDArray[np.bool_]) -> Segments:
    return Segments(
        segments.first[which],
        segments.num_members[which],
        segments.kv_start[which],
        segments.kv_end[which],
    )
