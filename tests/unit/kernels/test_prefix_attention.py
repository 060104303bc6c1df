"""Attention by a plan is attention: against the plain reference, whatever is shared."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import pytest

pytest.importorskip("triton")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_vllm.kernels import decode_step, reference
from sgl_vllm.kernels import prefix_levels as pl
from sgl_vllm.kernels import prefix_plan as pp
from sgl_vllm.kernels.prefix_attention import DevicePlan, prefix_decode_attention

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
"""Absolute, of values around 1: the interpreter rounds to bf16 by cutting off."""

SPLITS = replace(pl.FREE, min_split_tokens=64, min_split_tokens_per_row=0, rows_per_tile=32)
"""Short splits and small tiles, so that few tokens have several of both."""


class Batch(NamedTuple):
    query: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor


def batch_of(
    table: list[list[int]],
    seq_lens: list[int],
    *,
    num_heads: int = 2,
    num_kv_heads: int = 1,
    head_size: int = 32,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    heads_first: bool = False,
) -> Batch:
    """The cache as vLLM has it: key beside value, and heads before tokens or after them."""
    generator = torch.Generator().manual_seed(seed)
    width = max((len(row) for row in table), default=0)
    block_table = torch.zeros(len(table), max(1, width), dtype=torch.int32)
    for row, blocks in enumerate(table):
        block_table[row, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
    num_blocks = int(block_table.max()) + 1 if len(table) else 1
    order = (1, 0) if heads_first else (0, 1)
    sizes = [(block_size, num_kv_heads)[one] for one in order]
    kv = torch.randn(num_blocks, *sizes, 2 * head_size, generator=generator)
    query = torch.randn(len(table), num_heads, head_size, generator=generator)
    kv = kv.to(dtype)
    key_cache, value_cache = (kv.transpose(1, 2) if heads_first else kv).split(head_size, dim=-1)
    lengths = torch.tensor(seq_lens, dtype=torch.int32)
    return Batch(query.to(dtype), key_cache, value_cache, block_table, lengths)


def shape_of(batch: Batch) -> pl.AttentionShape:
    _, num_heads, head_size = batch.query.shape
    _, block_size, num_kv_heads, _ = batch.key_cache.shape
    itemsize = batch.key_cache.element_size()
    return pl.AttentionShape(num_heads, num_kv_heads, head_size, itemsize, block_size)


def plan_of(batch: Batch, costs: pl.Costs = SPLITS) -> pp.Plan:
    # As if KV were dear, so that all is shared that can be.
    dear = replace(shape_of(batch), itemsize_bytes=64 * 1024 // batch.query.shape[2] // 32)
    return pp.build_plan(batch.block_table.numpy(), batch.seq_lens.numpy(), dear, costs)


def run(batch: Batch, plan: pp.Plan | None = None, **options: Any) -> torch.Tensor:
    plan = plan_of(batch) if plan is None else plan
    return prefix_decode_attention(*batch, DevicePlan.upload(plan, "cpu"), **options)


def assert_right(batch: Batch, plan: pp.Plan | None = None, looser: float = 1) -> None:
    result = run(batch, plan)
    assert result.dtype == batch.query.dtype
    expected = reference.decode_attention(*batch, scale=batch.query.shape[2] ** -0.5)
    tolerance = TOLERANCE[batch.query.dtype] * looser
    torch.testing.assert_close(result.float(), expected, atol=tolerance, rtol=0)


# -- what is shared

TWO_LEVELS = [[0, 1, 2, 3, 10], [0, 1, 2, 3, 11], [0, 1, 4, 12], [0, 1, 13], [5, 14], [0, 1, 2, 15]]
LENGTHS = [70, 65, 50, 33, 31, 49]


def test_one_level_in_several_tiles_and_splits() -> None:
    table = [[*range(6), 10 + request] for request in range(20)]
    batch = batch_of(table, [97 + request % 16 for request in range(20)])
    plan = plan_of(batch)
    assert plan.num_segments == 1
    wide = plan.items[: plan.num_wide_items]
    assert set(wide[:, pp.TILE]) == {0, 1}
    assert len(set(wide[:, pp.KV_START])) == 2
    assert_right(batch, plan)


@pytest.mark.parametrize(
    ("table", "seq_lens"),
    [
        pytest.param([[0, 1], [2, 3], [4, 5]], [20, 32, 1], id="nothing shared"),
        pytest.param([[3, 1, 2]], [40], id="one request"),
        pytest.param([[3]], [1], id="one token"),
        pytest.param([[0, 1], [0, 1]], [32, 32], id="no tail"),
        pytest.param([[0, 1, 2], [0, 1], [0, 1, 3]], [33, 32, 48], id="one without a tail"),
        pytest.param([[0, 1], [0, 2], [0, 0]], [0, 20, 0], id="lengths of 0"),
        pytest.param([[0], [0]], [0, 0], id="all of length 0"),
        pytest.param([[0, 1], [0, 1], [0, 1]], [31, 20, 25], id="the last block is not full"),
        pytest.param([[0, 9], [0, 9], [0, 9]], [17, 16, 0], id="what is behind the length is not"),
        pytest.param([[5, 5, 5], [5, 5, 6]], [48, 47], id="a block twice in a row"),
    ],
)
def test_edges(table: list[list[int]], seq_lens: list[int]) -> None:
    assert_right(batch_of(table, seq_lens))


@given(st.data())
@settings(max_examples=6)
def test_random_batches(data: st.DataObject) -> None:
    num_requests = data.draw(st.integers(1, 6))
    width = data.draw(st.integers(1, 4))
    row = st.lists(st.integers(0, 1), min_size=width, max_size=width)
    batch = batch_of(
        [
            [2 * place + one for place, one in enumerate(data.draw(row))]
            for _ in range(num_requests)
        ],
        data.draw(
            st.lists(st.integers(0, 16 * width), min_size=num_requests, max_size=num_requests)
        ),
        num_heads=data.draw(st.sampled_from([2, 6])),
        head_size=16,
        seed=data.draw(st.integers(0, 99)),
    )
    assert_right(batch)


# -- shapes and layouts


@pytest.mark.parametrize(
    "changed",
    [
        *({"num_heads": heads, "num_kv_heads": kv} for heads, kv in ((3, 3), (8, 2))),
        *({"head_size": head_size} for head_size in (16, 80, 256)),
        *({"block_size": block_size} for block_size in (1, 48)),
        *({"dtype": dtype} for dtype in (torch.float16, torch.bfloat16)),
        {"heads_first": True},
    ],
    ids=str,
)
def test_every_shape_type_and_layout(changed: dict[str, Any]) -> None:
    lengths = [length * changed.get("block_size", 16) // 16 for length in LENGTHS]
    assert_right(batch_of(TWO_LEVELS, lengths, **changed))


def test_blocks_far_into_a_large_cache() -> None:
    """Offsets above 2**31 elements, in a cache of which only the touched pages are real."""
    num_blocks, far = 2**31 // (16 * 64) + 8, [0, 5, 3]
    try:
        kv = torch.empty(num_blocks, 16, 1, 64, dtype=torch.float16)
    except RuntimeError:
        pytest.skip("no 4 GiB of addresses")
    table = torch.tensor([[num_blocks - 1 - one for one in far]] * 2, dtype=torch.int32)
    kv[table[0].long()] = torch.randn(3, 16, 1, 64).half()
    key_cache, value_cache = kv.split(32, dim=-1)
    lengths = torch.tensor([48, 37], dtype=torch.int32)
    query = torch.randn(2, 2, 32).half()
    assert_right(Batch(query, key_cache, value_cache, table, lengths))


# -- values


def test_what_lies_behind_a_request_is_not_seen() -> None:
    """Nor what is in block 0, which vLLM keeps for padding."""
    table = [[1 + block for block in row] for row in TWO_LEVELS]
    batch = batch_of(table, LENGTHS)
    expected = run(batch)
    for cache in (batch.key_cache, batch.value_cache):
        cache[0] = torch.nan
        for row, length in zip(table, LENGTHS, strict=True):
            cache[row[length // 16], length % 16 :] = torch.nan
    torch.testing.assert_close(run(batch), expected, atol=0, rtol=0)


# -- plans of another step


@pytest.mark.parametrize("grown_by", [1, 20])
def test_a_plan_stays_right_while_requests_grow(grown_by: int) -> None:
    table = [[*row, 20 + 2 * number, 21 + 2 * number] for number, row in enumerate(TWO_LEVELS)]
    batch = batch_of(table, [1, *LENGTHS[1:]])
    plan = plan_of(batch)
    assert_right(batch._replace(seq_lens=batch.seq_lens + grown_by), plan)


def test_a_request_that_is_shorter_than_planned_is_right() -> None:
    """As after a step whose drafts were not all accepted: lengths on the host are upper bounds."""
    batch = batch_of(TWO_LEVELS, LENGTHS)
    shorter = torch.tensor([63, 65, 20, 33, 0, 1], dtype=torch.int32)
    assert_right(batch._replace(seq_lens=shorter), plan_of(batch))


# -- as an engine calls it


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_attend_reads_vllms_cache_and_leaves_padding_alone(layout: str) -> None:
    generator = torch.Generator().manual_seed(0)
    num_tokens, num_rows = 5, 3
    block_table = torch.tensor([[4, 1, 2], [4, 1, 3], [0, 0, 0]], dtype=torch.int32)
    seq_lens = torch.tensor([40, 35, 0], dtype=torch.int32)
    if layout == "HND":
        kv_cache = torch.randn(5, 1, 16, 64, generator=generator)
    else:
        kv_cache = torch.randn(5, 16, 1, 64, generator=generator).transpose(1, 2)
    query = torch.randn(num_tokens, 4, 32, generator=generator)
    output = torch.full_like(query, 7.0)
    dear = pl.AttentionShape(4, 1, 32, 256, 16)
    plan = pp.build_plan(block_table[:2].numpy(), seq_lens[:2].numpy(), dear, SPLITS)
    assert plan.num_segments == 1
    decode_step.attend(
        query, kv_cache, block_table, seq_lens, DevicePlan.upload(plan, "cpu"), 0.3, output
    )
    caches = kv_cache.transpose(1, 2).split(32, dim=-1)
    expected = reference.decode_attention(
        query[:num_rows], *caches, block_table, seq_lens, scale=0.3
    )
    torch.testing.assert_close(output[:2], expected[:2], atol=2e-6, rtol=0)
    assert (output[2:] == 7.0).all()


# -- wrong arguments


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("query", lambda q: q[0], "query must be torch.float32"),
        ("query", lambda q: q.mT.contiguous().mT, "must be contiguous"),
        ("key_cache", lambda cache: cache[..., :16], "key_cache must be"),
        ("value_cache", lambda cache: cache.half(), "value_cache must be torch.float32"),
        ("block_table", lambda table: table.long(), "block_table must be torch.int32"),
        ("seq_lens", lambda lengths: lengths[1:], "seq_lens must be"),
        ("seq_lens", lambda lengths: lengths.to("meta"), "seq_lens is on meta"),
    ],
)
def test_a_wrong_argument_is_refused(name: str, change: Any, message: str) -> None:
    batch = batch_of(TWO_LEVELS, LENGTHS)
    changed = batch._replace(**{name: change(getattr(batch, name))})
    with pytest.raises(ValueError, match=message):
        run(changed, plan_of(batch))


def test_rows_that_see_very_unlike_scores() -> None:
    batch = batch_of(TWO_LEVELS, LENGTHS)
    assert_right(batch._replace(query=batch.query * 100), looser=50)
