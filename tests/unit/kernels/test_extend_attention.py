"""The extend kernel gives what plain attention over the whole sequence gives."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import triton

from sgl_vllm.kernels import reference
from sgl_vllm.kernels.extend_attention import _extend_kernel, extend_attention

TOLERANCE = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}


@dataclass(frozen=True)
class Shape:
    """`requests` has (prefix_len, number of new tokens) of each."""

    requests: Sequence[tuple[int, int]]
    num_heads: int = 4
    num_kv_heads: int = 2
    head_size: int = 32
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    layout: str = "NHD"
    padding: int = 0


def random_arguments(shape: Shape, seed: int = 0) -> dict[str, Any]:
    """As a layer of vLLM has them: query, key and value are views of one tensor, both caches are
    views of another, whose blocks are in random order and full of what must not be read."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=generator)

    d, h, kv = shape.head_size, shape.num_heads, shape.num_kv_heads
    prefix_lens = [prefix for prefix, _ in shape.requests]
    starts = [0]
    for _, num_new in shape.requests:
        starts.append(starts[-1] + num_new)
    num_tokens = starts[-1] + shape.padding
    together = normal(num_tokens, h + 2 * kv, d).to(shape.dtype)
    query, key, value = together.split([h, kv, kv], dim=1)

    num_needed = [-(-prefix // shape.block_size) for prefix in prefix_lens]
    num_blocks = sum(num_needed) + 2
    order = torch.randperm(num_blocks, generator=generator).to(torch.int32)
    block_table = torch.full(
        (len(prefix_lens), max([*num_needed, 0]) + 1), 2**30, dtype=torch.int32
    )
    used = 0
    kv_cache = torch.full((num_blocks, kv, shape.block_size, 2 * d), float("nan"))
    for request, (prefix, number) in enumerate(zip(prefix_lens, num_needed, strict=True)):
        blocks = order[used : used + number]
        used += number
        block_table[request, :number] = blocks
        for position in range(prefix):
            block = blocks[position // shape.block_size]
            kv_cache[block, :, position % shape.block_size] = normal(kv, 2 * d)
    kv_cache = kv_cache.to(shape.dtype)
    if shape.layout == "NHD":  # slots outside heads in memory; the shape stays
        kv_cache = kv_cache.transpose(1, 2).contiguous().transpose(1, 2)
    key_cache, value_cache = kv_cache.transpose(1, 2).split(d, dim=-1)
    return {
        "query": query,
        "key": key,
        "value": value,
        "key_cache": key_cache,
        "value_cache": value_cache,
        "block_table": block_table,
        "prefix_lens": torch.tensor(prefix_lens, dtype=torch.int32),
        "query_start_loc": torch.tensor(starts, dtype=torch.int32),
    }


def longest(shape: Shape) -> int:
    return max((num_new for _, num_new in shape.requests), default=0)


def check(shape: Shape, seed: int = 0, scale: float | None = None) -> None:
    arguments = random_arguments(shape, seed)
    expected, expected_lse = reference.extend_attention(**arguments, scale=scale)
    num_tokens = int(arguments["query_start_loc"][-1])
    lse = torch.full(expected_lse.shape, 7.0)
    out = torch.full(expected.shape, 7.0, dtype=shape.dtype)
    result = extend_attention(
        **arguments, max_query_len=longest(shape), scale=scale, out=out, lse=lse
    )
    assert result is out
    tolerance = TOLERANCE[shape.dtype]
    torch.testing.assert_close(
        out[:num_tokens].float(), expected[:num_tokens], atol=tolerance, rtol=tolerance
    )
    torch.testing.assert_close(
        lse[:, :num_tokens], expected_lse[:, :num_tokens], atol=tolerance, rtol=tolerance
    )
    assert (out[num_tokens:] == 7).all() and (lse[:, num_tokens:] == 7).all()


MIXED = ((21, 5), (0, 9), (40, 0), (3, 1), (0, 0), (16, 17), (33, 1))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_ragged_requests_of_every_type_and_layout(dtype: torch.dtype, layout: str) -> None:
    check(Shape(MIXED, dtype=dtype, layout=layout))


@pytest.mark.parametrize(("rows", "keys"), [(16, 64), (64, 16), (128, 32)])
def test_tiles_of_other_sizes(rows: int, keys: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on GPUs: the interpreter's own tile is small, and as long as wide."""
    tile = triton.Config({"TILE_ROWS": rows, "TILE_KEYS": keys})
    monkeypatch.setattr(_extend_kernel, "configs", [tile])
    check(Shape(((70, 40), *MIXED), num_heads=3, num_kv_heads=1))


RATIOS = [(1, 1), (3, 3), (6, 2), (7, 1), (20, 1)]


@pytest.mark.parametrize(
    "shape",
    [
        *(Shape(((13, 6), (0, 3), (5, 0)), heads, kv_heads) for heads, kv_heads in RATIOS),
        *(Shape(((19, 4), (0, 2)), 2, 1, head_size) for head_size in (16, 48, 80, 96, 256)),
        *(Shape(((50, 3), (48, 1)), 4, 1, 32, block_size) for block_size in (1, 5, 8, 16, 48, 128)),
    ],
    ids=lambda shape: (
        f"{shape.num_heads}-{shape.num_kv_heads}-{shape.head_size}-{shape.block_size}"
    ),
)
def test_any_ratio_of_heads_head_size_and_block_size(shape: Shape) -> None:
    check(shape)


@pytest.mark.parametrize("prefix_len", [0, 1, 15, 16, 17])
@pytest.mark.parametrize("num_new", [0, 1, 16, 17])
def test_one_request_around_the_edges_of_tiles(prefix_len: int, num_new: int) -> None:
    check(Shape(((prefix_len, num_new),), num_heads=1, num_kv_heads=1, head_size=16))


@pytest.mark.parametrize("seed", range(8))
def test_random_shapes(seed: int) -> None:
    choose = random.Random(seed)
    num_kv_heads = choose.choice([1, 2, 3])
    shape = Shape(
        requests=[
            (choose.choice([0, choose.randrange(60)]), choose.choice([0, 1, choose.randrange(20)]))
            for _ in range(choose.randrange(1, 5))
        ],
        num_heads=num_kv_heads * choose.randrange(1, 5),
        num_kv_heads=num_kv_heads,
        head_size=16 * choose.randrange(1, 6),
        block_size=choose.choice([4, 16, 48]),
        dtype=choose.choice(list(TOLERANCE)),
        layout=choose.choice(["NHD", "HND"]),
        padding=choose.randrange(3),
    )
    check(shape, seed, scale=choose.choice([None, 0.05, 1.0]))


def test_scores_far_apart_do_not_overflow() -> None:
    shape = Shape(((20, 8),))
    arguments = random_arguments(shape)
    arguments["query"] = arguments["query"] * 200
    out = extend_attention(**arguments, max_query_len=8)
    expected, _ = reference.extend_attention(**arguments)
    torch.testing.assert_close(out, expected, atol=1e-4, rtol=1e-4)


def test_what_is_cached_already_gives_the_same_as_new_tokens() -> None:
    """Cutting a prompt elsewhere changes nothing: the rest of it attends to the same keys."""
    shape = Shape(((0, 24),))
    arguments = random_arguments(shape)
    whole = extend_attention(**arguments, max_query_len=24)
    head_size, num_cached = shape.head_size, 19
    kv_cache = torch.zeros(2, shape.num_kv_heads, 16, 2 * head_size)
    blocks = kv_cache.transpose(1, 2)
    together = torch.cat([arguments["key"], arguments["value"]], dim=-1)
    blocks[1], blocks[0, :3] = together[:16], together[16:num_cached]
    key_cache, value_cache = blocks.split(head_size, dim=-1)
    rest = extend_attention(
        **{name: arguments[name][num_cached:] for name in ("query", "key", "value")},
        key_cache=key_cache,
        value_cache=value_cache,
        block_table=torch.tensor([[1, 0]], dtype=torch.int32),
        prefix_lens=torch.tensor([num_cached], dtype=torch.int32),
        query_start_loc=torch.tensor([0, 5], dtype=torch.int32),
        max_query_len=5,
    )
    torch.testing.assert_close(rest, whole[num_cached:], atol=1e-5, rtol=1e-5)


def test_no_requests_and_no_tokens() -> None:
    arguments = random_arguments(Shape(()))
    assert extend_attention(**arguments, max_query_len=0).shape == (0, 4, 32)
    arguments = random_arguments(Shape(((4, 0), (0, 0))))
    assert extend_attention(**arguments, max_query_len=1).shape == (0, 4, 32)


def test_max_query_len_may_be_more_than_there_is() -> None:
    arguments = random_arguments(Shape(MIXED))
    expected, _ = reference.extend_attention(**arguments)
    out = extend_attention(**arguments, max_query_len=1000)
    torch.testing.assert_close(out, expected, atol=2e-5, rtol=2e-5)


SOUND = Shape(((5, 3), (0, 2)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": torch.zeros(5, 4, 24)}, "multiple of 16"),
        ({"query": torch.zeros(5, 4, 272)}, "multiple of 16"),
        ({"query": torch.zeros(5, 3, 32)}, "do not divide"),
        ({"query": torch.zeros(5, 4, 32, dtype=torch.float64)}, "bfloat16, float16 or float32"),
        ({"query": torch.zeros(4, 32)}, "3 dimensions"),
        ({"key": torch.zeros(4, 2, 32)}, "key must have the shape"),
        ({"value": torch.zeros(5, 2, 32, dtype=torch.float16)}, "value is torch.float16"),
        ({"value": torch.zeros(5, 32, 2).transpose(1, 2)}, "last dimension of value"),
        ({"key_cache": torch.zeros(3, 16, 1, 32)}, "key_cache must have the shape"),
        ({"value_cache": torch.zeros(3, 8, 2, 32)}, "value_cache must have the shape"),
        ({"out": torch.zeros(5, 4, 32, dtype=torch.float16)}, "out is torch.float16"),
        ({"lse": torch.zeros(5, 4)}, "lse must be a contiguous float32"),
        ({"block_table": torch.zeros(2, 3, dtype=torch.int64)}, "block_table must be int32"),
        ({"block_table": torch.zeros(1, 3, dtype=torch.int32)}, r"int32 \[2, any\]"),
        ({"prefix_lens": torch.zeros(3, dtype=torch.int32)}, r"prefix_lens must be int32 \[2\]"),
        ({"query_start_loc": torch.zeros(3)}, "query_start_loc must be int32"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_wrong_argument_is_refused(change: dict[str, Any], message: str) -> None:
    arguments = random_arguments(SOUND)
    with pytest.raises(ValueError, match=message):
        extend_attention(**{**arguments, "max_query_len": 3, **change})
