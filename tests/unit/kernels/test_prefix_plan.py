"""Which requests read what together: against the tree by hand, and every position exactly once."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from sgl_vllm.kernels import prefix_levels as pl
from sgl_vllm.kernels import prefix_plan as pp
from tests.effort import examples

SHAPE = pl.AttentionShape(
    num_heads=4, num_kv_heads=2, head_size=64, itemsize_bytes=2, block_size_tokens=4
)
SMALL = replace(pl.FREE, min_split_tokens=8, min_split_tokens_per_row=0)

# -- batches


class Batch(NamedTuple):
    block_table: np.ndarray
    seq_lens: np.ndarray


@st.composite
def batches(draw: st.DrawFn, max_requests: int = 9, max_blocks: int = 7) -> Batch:
    """Rows grown from one another, with unlike lengths, and anything behind the full blocks."""
    num_requests = draw(st.integers(0, max_requests))
    width = draw(st.integers(1, max_blocks))
    size = SHAPE.block_size_tokens
    table = np.zeros((num_requests, width), dtype=np.int32)
    lengths = np.zeros(num_requests, dtype=np.int32)
    for request in range(num_requests):
        table[request] = draw(
            st.one_of(
                st.lists(st.integers(0, 2), min_size=width, max_size=width),
                st.lists(st.integers(0, 10**6), min_size=width, max_size=width),
            )
        )
        if request and draw(st.integers(0, 3)):
            other = draw(st.integers(0, request - 1))
            same = draw(st.integers(0, width))
            table[request, :same] = table[other, :same]
        lengths[request] = draw(
            st.one_of(
                st.integers(0, width * size),
                st.integers(0, width).map(lambda blocks: blocks * size),
                st.just(width * size),
            )
        )
    return Batch(table, lengths)


shapes = st.builds(
    lambda per_kv_head, num_kv_heads, itemsize_bytes: pl.AttentionShape(
        per_kv_head * num_kv_heads, num_kv_heads, 16, itemsize_bytes, SHAPE.block_size_tokens
    ),
    st.sampled_from([1, 2, 4, 7, 16, 71]),
    st.integers(1, 3),
    st.sampled_from([2, 256]),  # so that few tokens are many bytes, and much is shared
)
costs = st.builds(
    pl.Costs,
    launch_bytes=st.just(0),
    item_bytes=st.sampled_from([0, 500, 5_000]),
    efficiency=st.just(1.0),
    rows_per_tile=st.sampled_from([16, 32, 128]),
    again=st.sampled_from([0.0, 0.4, 1.0]),
    num_multiprocessors=st.sampled_from([1, 8, 132]),
    min_split_tokens=st.sampled_from([1, 8, 1000]),
    min_split_tokens_per_row=st.integers(0, 1),
)


# -- the tree, by hand


class Node(NamedTuple):
    """Blocks [start, end) shared by `requests`."""

    requests: frozenset[int]
    start: int
    end: int


def nodes_by_hand(table: np.ndarray, full: np.ndarray) -> set[Node]:
    def grow(requests: list[int], start: int) -> Iterator[Node]:
        """Below a node that ends at `start`."""
        by_block: dict[int, list[int]] = {}
        for request in requests:
            if full[request] > start:
                by_block.setdefault(int(table[request, start]), []).append(request)
        for group in by_block.values():
            if len(group) < 2:
                continue
            end = start + 1
            while all(full[request] > end for request in group) and (
                len({int(table[request, end]) for request in group}) == 1
            ):
                end += 1
            yield Node(frozenset(group), start, end)
            yield from grow(group, end)

    return set(grow(list(range(len(table))), 0))


def nodes_of(tree: pl.PrefixTree) -> set[Node]:
    nodes = set()
    for depth, level in enumerate(tree.levels):
        for node in range(len(level.first)):
            requests = tree.order[level.first[node] : level.stop[node]]
            above = tree.levels[depth - 1].end_block[level.parent[node]] if depth else 0
            nodes.add(Node(frozenset(map(int, requests)), int(above), int(level.end_block[node])))
    return nodes


@settings(max_examples=examples(20))
@given(batches())
def test_the_tree_is_the_one_found_by_hand(batch: Batch) -> None:
    full = batch.seq_lens // SHAPE.block_size_tokens
    tree = pl.find_tree(batch.block_table, full)
    assert sorted(tree.order) == list(range(len(full)))
    assert nodes_of(tree) == nodes_by_hand(batch.block_table, full)


def test_levels_below_the_limit_are_left_out() -> None:
    count = pl.MAX_LEVELS + 5
    table = np.tile(np.arange(count, dtype=np.int32), (count, 1))
    table[np.arange(count), np.arange(count)] += 1000  # row i leaves at block i
    tree = pl.find_tree(table, np.full(count, count))
    assert len(tree.levels) == pl.MAX_LEVELS
    lengths = np.full(count, count * SHAPE.block_size_tokens, dtype=np.int32)
    assert_covered(pp.build_plan(table, lengths, SHAPE, SMALL), Batch(table, lengths))


# -- the plan


def assert_covered(plan: pp.Plan, batch: Batch, grown_by: int = 0) -> None:
    """Every position of every request in exactly one item, read from its own block."""
    size = plan.shape.block_size_tokens
    lengths = batch.seq_lens + grown_by
    seen = [np.zeros(length, dtype=int) for length in lengths]
    written = np.zeros(plan.num_partials, dtype=int)
    for item in plan.items:
        begin, end = item[pp.KV_START], item[pp.KV_END]
        if item[pp.IS_OPEN]:
            assert item[pp.NUM_MEMBERS] == 1
            end = lengths[item[pp.TABLE_ROW]]
        for number in range(item[pp.NUM_MEMBERS]):
            request = plan.members[item[pp.FIRST_MEMBER] + number]
            slot = plan.slots[item[pp.FIRST_SLOT] + number]
            seen[request][begin:end] += 1
            written[slot] += 1
            assert plan.partial_starts[request] <= slot < plan.partial_starts[request + 1]
            blocks = slice(begin // size, -(-end // size))
            table = batch.block_table
            if request != item[pp.TABLE_ROW]:
                assert (table[request, blocks] == table[item[pp.TABLE_ROW], blocks]).all()
                assert end <= batch.seq_lens[request] // size * size
    assert all((of_request == 1).all() for of_request in seen)
    assert (written == 1).all()


@settings(max_examples=examples(20))
@given(batches(), shapes, costs, st.integers(1, 9))
def test_a_plan_covers_every_position_once_in_tiles_that_hold_it(
    batch: Batch, shape: pl.AttentionShape, costs: pl.Costs, grown_by: int
) -> None:
    """Also while requests grow. It reads no more than without, and is made only if it pays."""
    wider = Batch(np.pad(batch.block_table, ((0, 0), (0, 3)), constant_values=7), batch.seq_lens)
    plan = pp.build_plan(*wider, shape, costs)
    assert_covered(plan, wider)
    assert_covered(plan, wider, grown_by)
    assert plan.kv_tokens_distinct <= plan.kv_tokens_read <= plan.kv_tokens_read_ungrouped
    assert plan.kv_tokens_read_ungrouped == batch.seq_lens.sum()
    rows = plan.items[:, pp.NUM_MEMBERS] * shape.queries_per_kv_head
    assert (rows[: plan.num_wide_items] <= plan.wide_rows).all()
    assert (rows[plan.num_wide_items :] <= plan.narrow_rows).all()
    assert plan.wide_rows <= max(costs.rows_per_tile, 2 * shape.queries_per_kv_head)
    assert (pp.make_plan(*wider, shape, costs) is not None) == plan.pays(costs)


@settings(max_examples=examples(20))
@given(batches(max_blocks=5), shapes, costs)
def test_the_chosen_levels_are_the_cheapest_choice(
    batch: Batch, shape: pl.AttentionShape, costs: pl.Costs
) -> None:
    costs = replace(costs, min_split_tokens=1000)  # an item's end is the end of its level
    size = shape.block_size_tokens
    nodes = sorted(nodes_by_hand(batch.block_table, batch.seq_lens // size), key=lambda n: n.start)
    assume(len(nodes) <= 7)
    most_rows = min(costs.rows_per_tile, max(16, 2**16 // (16 * shape.itemsize_bytes)))
    tile = max(1, most_rows // shape.queries_per_kv_head)

    def cost_of(chosen: Collection[Node]) -> float:
        total = 0.0
        ends = np.zeros(len(batch.seq_lens), dtype=int)
        for node in nodes:
            if node not in chosen:
                continue
            requests = sorted(node.requests)
            num_tiles = -(-len(requests) // tile)
            tokens = (node.end - ends[requests[0]]) * size
            total += (1 + costs.again * (num_tiles - 1)) * tokens * shape.kv_bytes_per_token
            total += len(requests) * shape.partial_bytes + num_tiles * costs.item_bytes
            ends[requests] = node.end
        return total + float((batch.seq_lens - ends * size).sum()) * shape.kv_bytes_per_token

    plan = pp.build_plan(*batch, shape, costs)
    taken = set()
    for item in plan.items[plan.items[:, pp.IS_OPEN] == 0]:
        first = item[pp.FIRST_MEMBER]
        members = set(map(int, plan.members[first : first + item[pp.NUM_MEMBERS]]))
        end = int(item[pp.KV_END])
        taken |= {one for one in nodes if members <= one.requests and one.end * size == end}
    assert len(taken) == plan.num_segments
    every_choice = itertools.chain.from_iterable(
        itertools.combinations(nodes, count) for count in range(len(nodes) + 1)
    )
    assert cost_of(taken) == pytest.approx(min(map(cost_of, every_choice)))


# -- whether it pays


LARGE = pl.AttentionShape(
    num_heads=32, num_kv_heads=8, head_size=128, itemsize_bytes=2, block_size_tokens=16
)


def one_group(num_requests: int, shared_blocks: int, own_blocks: int) -> Batch:
    blocks = np.arange(num_requests * (shared_blocks + own_blocks), dtype=np.int32)
    table = blocks.reshape(num_requests, -1) + shared_blocks
    table[:, :shared_blocks] = np.arange(shared_blocks)
    tokens = (shared_blocks + own_blocks) * LARGE.block_size_tokens
    return Batch(table, np.full(num_requests, tokens, dtype=np.int32))


def test_many_requests_with_a_long_prefix_pay() -> None:
    plan = pp.make_plan(*one_group(64, 512, 16), LARGE)
    assert plan is not None
    assert plan.kv_bytes_read_ungrouped > 15 * plan.kv_bytes_read
    assert plan.partial_bytes < plan.kv_bytes_read / 4


@pytest.mark.parametrize(
    "batch",
    [
        pytest.param(one_group(64, 0, 512), id="nothing shared"),
        pytest.param(one_group(1, 2000, 1), id="one request"),
        pytest.param(one_group(64, 1, 512), id="one block"),
        pytest.param(one_group(2, 100, 16), id="two short requests"),
        pytest.param(one_group(4, 400, 2000), id="more tail than prefix"),
        pytest.param(Batch(np.zeros((0, 4), np.int32), np.zeros(0, np.int32)), id="no request"),
        pytest.param(Batch(np.zeros((64, 0), np.int32), np.zeros(64, np.int32)), id="no block"),
        pytest.param(Batch(np.ones((64, 99), np.int32), np.zeros(64, np.int32)), id="no token"),
    ],
)
def test_a_plan_that_saves_too_little_is_none(batch: Batch) -> None:
    assert pp.make_plan(*batch, LARGE) is None


# -- wrong arguments


@pytest.mark.parametrize(
    ("table", "lengths", "message"),
    [
        (np.zeros((2, 3), np.int64), np.zeros(2, np.int32), "block_table must be"),
        (np.zeros(3, np.int32), np.zeros(3, np.int32), "block_table must be"),
        (np.zeros((2, 3), np.int32), np.zeros(3, np.int32), "seq_lens must be"),
        (np.zeros((2, 3), np.int32), np.zeros(2, np.float32), "seq_lens must be"),
        (np.zeros((2, 3), np.int32), np.array([13, 0], np.int32), "has room for"),
        (np.zeros((2, 3), np.int32), np.array([-1, 0], np.int32), "has room for"),
    ],
)
def test_a_wrong_batch_is_refused(table: np.ndarray, lengths: np.ndarray, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pp.build_plan(table, lengths, SHAPE)
