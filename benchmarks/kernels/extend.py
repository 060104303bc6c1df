"""Extend attention against vLLM's FlashAttention, which does the same over its paged cache.

A case is one layer of a step: so many requests, each with a cached prefix and new tokens. *least*
is what has to be moved: each new token's query, key, value and result, and each cached key and
value, once. *kernel / least* counts every read that a program asks for, tile by tile (of 128 rows
without CUDA); those after the first of the same keys are mostly met by the L2 cache.

With CUDA: *stock* is `flash_attn_varlen_func` with a block table, over keys of new tokens that lie
in the cache already (writing them there, which both need, is in neither time); *ratio* is stock ms
/ ms, above 1 this kernel is faster; *GB/s* is least / ms. *off* is the largest absolute difference
from the reference in plain PyTorch, *stock off* FlashAttention's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from benchmarks.kernels.device import (
    AGAINST_STOCK,
    LEAST,
    MS,
    OFF,
    STOCK_OFF,
    Row,
    entry,
    flash_attention,
    per_least,
    times,
)

ASSUMED_TILE_ROWS = 128


@dataclass(frozen=True)
class Case:
    """`requests` has (prefix_len, number of new tokens) of each."""

    name: str
    requests: tuple[tuple[int, int], ...]
    num_heads: int = 32
    num_kv_heads: int = 8
    head_size: int = 128
    block_size: int = 16
    dtype: torch.dtype = torch.bfloat16

    def small(self) -> Case:
        """Of its kind: the same heads to a KV head, lengths and head size a small part."""
        requests = tuple(
            (prefix and max(1, prefix // 200), max(1, new // 16))
            for prefix, new in self.requests[:3]
        )
        return replace(
            self,
            requests=requests,
            num_heads=self.num_heads // self.num_kv_heads,
            num_kv_heads=1,
            head_size=32,
        )


CASES = (
    Case("32 requests, 64 new on 2,048", ((2048, 64),) * 32),
    Case("64 requests, 16 new on 1,024", ((1024, 16),) * 64),
    Case("8 requests, 256 new on 8,192", ((8192, 256),) * 8),
    Case("1 request, 128 new on 32,768", ((32768, 128),)),
    Case("16 requests, 512 new, no prefix", ((0, 512),) * 16),
    Case(
        "32 ragged requests",
        tuple((257 * (index * 7 % 16), 1 + 37 * (index * 5 % 11)) for index in range(32)),
    ),
    Case("32 requests, 64 new on 2,048, 28 / 4 heads", ((2048, 64),) * 32, 28, 4),
    Case("32 requests, 64 new on 2,048, blocks of 48", ((2048, 64),) * 32, block_size=48),
)


def token_bytes(case: Case) -> tuple[int, int]:
    """Of a new token's query and result, and of a token's key and value."""
    width = case.dtype.itemsize
    return (
        2 * case.num_heads * case.head_size * width,
        2 * case.num_kv_heads * case.head_size * width,
    )


def least_bytes(case: Case) -> int:
    of_query, of_key = token_bytes(case)
    return sum(new * (of_query + of_key) + prefix * of_key for prefix, new in case.requests)


def kernel_bytes(case: Case, tile_rows: int) -> int:
    """Every tile reads the prefix and the new tokens up to its last row's, and block numbers."""
    of_query, of_key = token_bytes(case)
    heads_per_kv_head = case.num_heads // case.num_kv_heads
    total = 0
    for prefix, new in case.requests:
        total += new * of_query
        for first_row in range(0, new * heads_per_kv_head, tile_rows):
            seen = min(new, (first_row + tile_rows - 1) // heads_per_kv_head + 1)
            total += (prefix + seen) * of_key + 4 * prefix * case.num_kv_heads
    return total


def arguments_of(case: Case, device: str) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Of the kernel, and the length of each request's sequence. The new tokens' keys and values are
    in the cache too, whose blocks are in random order; the layout is vLLM's NHD."""
    generator = torch.Generator().manual_seed(0)
    lengths = [prefix + new for prefix, new in case.requests]
    num_needed = [-(-length // case.block_size) for length in lengths]
    num_blocks, d = sum(num_needed), case.head_size
    kv_cache = torch.randn(
        num_blocks, case.block_size, case.num_kv_heads, 2 * d, generator=generator
    )
    kv_cache = kv_cache.to(case.dtype).to(device)
    order = torch.randperm(num_blocks, generator=generator).to(torch.int32).to(device)
    block_table = torch.zeros(len(lengths), max(num_needed), dtype=torch.int32, device=device)
    new_keys = []
    starts = [0]
    used = 0
    for request, (prefix, new) in enumerate(case.requests):
        blocks = order[used : used + num_needed[request]]
        used += len(blocks)
        block_table[request, : len(blocks)] = blocks
        position = torch.arange(prefix, prefix + new, device=device)
        block = blocks[position // case.block_size].long()
        new_keys.append(kv_cache[block, position % case.block_size])
        starts.append(starts[-1] + new)
    key, value = torch.cat(new_keys).split(d, dim=-1)
    key_cache, value_cache = kv_cache.split(d, dim=-1)
    query = torch.randn(starts[-1], case.num_heads, d, generator=generator)
    arguments = {
        "query": query.to(case.dtype).to(device),
        "key": key,
        "value": value,
        "key_cache": key_cache,
        "value_cache": value_cache,
        "block_table": block_table,
        "prefix_lens": torch.tensor(
            [prefix for prefix, _ in case.requests], dtype=torch.int32, device=device
        ),
        "query_start_loc": torch.tensor(starts, dtype=torch.int32, device=device),
    }
    return arguments, torch.tensor(lengths, dtype=torch.int32, device=device)


def measure(case: Case, has_cuda: bool) -> dict[str, Any]:
    from sgl_vllm.kernels import extend_attention, reference

    run = case if has_cuda else case.small()
    arguments, lengths = arguments_of(run, "cuda" if has_cuda else "cpu")
    longest = max(new for _, new in run.requests)
    call = partial(extend_attention.extend_attention, **arguments, max_query_len=longest)
    expected, _ = reference.extend_attention(**arguments)
    off = float((call().float() - expected).abs().max())
    row: dict[str, Any] = {
        "case": case.name,
        "least_bytes": least_bytes(case),
        "tile_rows": ASSUMED_TILE_ROWS,
        "off": off,
    }
    if has_cuda:
        stock = flash_attention(arguments, arguments["query_start_loc"], lengths, longest)
        row |= extend_attention.chosen_tile()
        row["stock_off"] = float((stock().float() - expected).abs().max())
        row |= times(call, stock, row["least_bytes"])
    row["kernel_bytes"] = kernel_bytes(case, row["tile_rows"])
    return row


def _tile(row: Row) -> str | None:
    return f"{row['tile_rows']} x {row['tile_keys']}" if "tile_keys" in row else None


COLUMNS = (
    entry("case", "case"),
    LEAST,
    per_least("kernel"),
    OFF,
    STOCK_OFF,
    ("tile", _tile, ""),
    MS,
    *AGAINST_STOCK,
)
