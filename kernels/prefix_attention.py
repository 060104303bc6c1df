"""Decode attention that reads what requests share once: the Triton kernels of a `Plan`.

Owns the launches and the partial results between them. Which requests read what together is
`prefix_plan`'s; where the KV lies is the caller's. Three launches a call, two if no group is wide:

    wide items     up to 128 queries of a group x one split of its shared blocks
    narrow items   small groups, and each request's own tail
    merge          the partial results of each request and head, by their log-sum-exp

A query here is one head of one request: all those of a KV head share its keys, so the rows of a
tile are (request, head) pairs, as they are for the heads of a single request.

**Times have not been measured on a GPU yet**: docs/gpu.md says what has run.

Ideas: see `prefix_plan`; the online softmax is Milakov and Gimelshein's (arXiv 1805.02867).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any  # Any: Triton has no types

import numpy as np
import torch
import triton
import triton.language as tl

from .prefix_plan import ITEM_FIELDS, Plan

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_HEAD_SIZE = 256

INTERPRETED = bool(triton.knobs.runtime.interpret)
"""Whether the kernels run in Triton's interpreter: `triton.jit` decides it, above each of them."""


@dataclass(frozen=True)
class DevicePlan:
    """A `Plan`, its arrays on a device: one copy to it, without waiting for the device."""

    plan: Plan
    items: torch.Tensor
    members: torch.Tensor
    slots: torch.Tensor
    partial_starts: torch.Tensor

    @classmethod
    def upload(cls, plan: Plan, device: torch.device | str) -> DevicePlan:
        """About 40 bytes for each item, 4 for each partial result and 8 for each request."""
        arrays = (plan.items.reshape(-1), plan.members, plan.slots, plan.partial_starts)
        packed = torch.from_numpy(np.concatenate(arrays))
        if torch.device(device).type == "cuda":
            packed = packed.pin_memory()
        on_device = packed.to(device, non_blocking=True)
        items, members, slots, starts = on_device.split([len(array) for array in arrays])
        return cls(plan, items.view(-1, ITEM_FIELDS), members, slots, starts)


def prefix_decode_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    plan: DevicePlan,
    *,
    scale: float | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """softmax(scale * q k^T) v of one query token per request over its tokens in the paged cache.

    All tensors on one device, the current one; bf16, fp16 or fp32 with float32 sums; the last
    dimension contiguous, all others as they are (both NHD and HND caches). Does not wait for the
    device.

    The plan must be of this block table, and of lengths not above `seq_lens` for what it shares:
    it stays right while the requests grow. A request whose length on the device is shorter than
    planned is still computed right, from the tokens that it has.

    Cost: the KV bytes of the plan (`kv_tokens_distinct` once from memory, `kv_tokens_read` through
    the L2 cache; the least possible is each distinct block once), and its `partial_bytes`, which
    this call allocates half of.

    Args:
        query: [num_requests, num_heads, head_size]; head_size a multiple of 16 up to 256.
        key_cache, value_cache: [num_blocks, block_size_tokens, num_kv_heads, head_size], of the
            query's dtype. vLLM's FlashAttention cache, [num_blocks, num_kv_heads,
            block_size_tokens, 2 * head_size], is `transpose(1, 2).split(head_size, -1)` of it.
        block_table: [num_requests, max_blocks] int32.
        seq_lens: [num_requests] int32; 0 gives zeros.
        plan: for as many requests, made for this shape.
        scale: of the scores; 1 / sqrt(head_size) if None.
        out: where the result goes; like `query`. Made if None.

    Returns:
        `out`.

    Raises:
        ValueError: a shape, dtype, stride or device is not as above, or the device is the CPU and
            Triton does not interpret (TRITON_INTERPRET=1, set before it is imported).
    """
    if out is None:
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
    _check(query, key_cache, value_cache, block_table, seq_lens, plan, out)
    num_requests, num_heads, head_size = query.shape
    if not num_requests:
        return out
    host = plan.plan
    num_kv_heads = key_cache.shape[2]
    head_size_padded = triton.next_power_of_2(head_size)
    partial_out = torch.empty(
        (host.num_partials, num_heads, head_size), dtype=torch.float32, device=query.device
    )
    partial_lse = torch.empty(
        (host.num_partials, num_heads), dtype=torch.float32, device=query.device
    )
    num_items = len(host.items)
    launches = (
        (0, host.num_wide_items, host.wide_rows),
        (host.num_wide_items, num_items - host.num_wide_items, host.narrow_rows),
    )
    for first_item, count, rows in launches:
        if not count:
            continue
        _item_kernel[(count, num_kv_heads)](
            query,
            key_cache,
            value_cache,
            block_table,
            seq_lens,
            plan.items,
            plan.members,
            plan.slots,
            partial_out,
            partial_lse,
            (head_size**-0.5 if scale is None else scale) / math.log(2),
            first_item,
            num_heads,
            *query.stride()[:2],
            *key_cache.stride()[:3],
            *value_cache.stride()[:3],
            block_table.stride(0),
            HEADS_PER_KV_HEAD=num_heads // num_kv_heads,
            HEAD_SIZE=head_size,
            HEAD_SIZE_PADDED=head_size_padded,
            BLOCK_SIZE=key_cache.shape[1],
            TILE_ROWS=rows,
            FIELDS=ITEM_FIELDS,
            # The interpreter multiplies the bits of bf16 as integers.
            WIDEN=INTERPRETED and query.dtype == torch.bfloat16,
        )
    _merge_kernel[(num_requests, num_heads)](
        partial_out,
        partial_lse,
        plan.partial_starts,
        out,
        num_heads,
        *out.stride()[:2],
        HEAD_SIZE=head_size,
        HEAD_SIZE_PADDED=head_size_padded,
    )
    return out


def _check(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    plan: DevicePlan,
    out: torch.Tensor,
) -> None:
    """Of what the host knows: nothing here waits for the device."""
    count, shape = plan.plan.num_requests, plan.plan.shape
    of_query = (count, shape.num_heads, shape.head_size)
    of_cache = (None, shape.block_size_tokens, shape.num_kv_heads, shape.head_size)
    for name, tensor, sizes, dtype in (
        ("query", query, of_query, query.dtype),
        ("key_cache", key_cache, of_cache, query.dtype),
        ("value_cache", value_cache, of_cache, query.dtype),
        ("block_table", block_table, (count, None), torch.int32),
        ("seq_lens", seq_lens, (count,), torch.int32),
        ("out", out, of_query, query.dtype),
        ("plan.items", plan.items, (None, ITEM_FIELDS), torch.int32),
    ):
        found = tuple(tensor.shape)
        fits = len(found) == len(sizes) and all(
            want in (None, have) for want, have in zip(sizes, found, strict=True)
        )
        if not fits or tensor.dtype != dtype:
            raise ValueError(
                f"{name} must be {dtype} {list(sizes)} for this plan, not {tensor.dtype} "
                f"{list(found)}"
            )
        if tensor.stride(-1) != 1 and tensor.numel() > 1:
            raise ValueError(f"{name}'s last dimension must be contiguous: {tensor.stride()}")
        if tensor.device != query.device:
            raise ValueError(f"{name} is on {tensor.device}, the query on {query.device}")
    if shape.head_size % 16 or not 0 < shape.head_size <= MAX_HEAD_SIZE:
        raise ValueError(
            f"head_size must be a multiple of 16 up to {MAX_HEAD_SIZE}, not {shape.head_size}"
        )
    if query.dtype not in DTYPES:
        raise ValueError(f"query must be bfloat16, float16 or float32, not {query.dtype}")
    if query.device.type != "cuda" and not INTERPRETED:
        raise ValueError(
            "the kernel runs on a GPU, or on a CPU with TRITON_INTERPRET=1, not on "
            f"{query.device.type}"
        )


def _item_configs() -> list[triton.Config]:
    """Triton loads the block ids one stage before the KV, so 3 stages are one tile of KV under way
    and 5 are two."""
    if INTERPRETED:
        return [triton.Config({"TILE_KEYS": 32})]
    sizes = (
        *((32, 4, 5), (64, 4, 3), (64, 4, 5), (128, 4, 3)),
        *((32, 8, 3), (64, 8, 3), (64, 8, 5), (128, 8, 3)),
    )
    return [
        triton.Config({"TILE_KEYS": tokens}, num_warps=num_warps, num_stages=num_stages)
        for tokens, num_warps, num_stages in sizes
    ]


def _fitting(configs: list[triton.Config], arguments: Any, **constants: Any) -> list[triton.Config]:
    """Four warps have too few registers for more than 64 x 128 sums; for fewer, eight are idle."""
    if INTERPRETED:
        return configs
    num_warps = 8 if constants["TILE_ROWS"] * constants["HEAD_SIZE_PADDED"] > 64 * 128 else 4
    return [config for config in configs if config.num_warps == num_warps]


def _merge_configs() -> list[triton.Config]:
    if INTERPRETED:
        return [triton.Config({"PARTIALS": 2})]
    sizes = ((8, 1), (8, 2), (16, 4), (32, 4))
    return [triton.Config({"PARTIALS": count}, num_warps=num_warps) for count, num_warps in sizes]


@triton.autotune(
    _item_configs(),
    ["HEADS_PER_KV_HEAD", "HEAD_SIZE", "BLOCK_SIZE", "TILE_ROWS"],
    prune_configs_by={"early_config_prune": _fitting},
)
@triton.jit(do_not_specialize=["first_item"])
def _item_kernel(
    query: tl.tensor,
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    block_table: tl.tensor,
    seq_lens: tl.tensor,
    items: tl.tensor,
    members: tl.tensor,
    slots: tl.tensor,
    partial_out: tl.tensor,
    partial_lse: tl.tensor,
    scale_log2: tl.tensor,  # scores come out as logarithms to base 2
    first_item: tl.tensor,
    num_heads: tl.tensor,
    query_stride_request: tl.tensor,
    query_stride_head: tl.tensor,
    key_cache_stride_block: tl.tensor,
    key_cache_stride_slot: tl.tensor,
    key_cache_stride_head: tl.tensor,
    value_cache_stride_block: tl.tensor,
    value_cache_stride_slot: tl.tensor,
    value_cache_stride_head: tl.tensor,
    block_table_stride: tl.tensor,
    HEADS_PER_KV_HEAD: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_SIZE_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    FIELDS: tl.constexpr,
    WIDEN: tl.constexpr,
    TILE_KEYS: tl.constexpr,
) -> None:
    """One item and KV head: its requests' queries against the item's KV, TILE_KEYS at a time."""
    item = items + (first_item + tl.program_id(0)) * FIELDS
    kv_head = tl.program_id(1)
    table_row = tl.load(item)
    kv_start = tl.load(item + 1)
    kv_end = tl.load(item + 2)
    if tl.load(item + 3) != 0:
        kv_end = tl.load(seq_lens + table_row)
    first_member = tl.load(item + 4)
    num_members = tl.load(item + 5)
    first_slot = tl.load(item + 6)

    # A row is one query head of one request.
    row = tl.arange(0, TILE_ROWS)
    member = row // HEADS_PER_KV_HEAD
    head = kv_head * HEADS_PER_KV_HEAD + row % HEADS_PER_KV_HEAD
    is_row = member < num_members
    request = tl.load(members + first_member + member, mask=is_row, other=0)
    length = tl.load(seq_lens + request, mask=is_row, other=0)
    kv_end = tl.minimum(kv_end, tl.max(length, axis=0))
    element = tl.arange(0, HEAD_SIZE_PADDED)
    is_element = element < HEAD_SIZE
    q = tl.load(
        query
        + request.to(tl.int64)[:, None] * query_stride_request
        + head[:, None] * query_stride_head
        + element[None, :],
        mask=is_row[:, None] & is_element[None, :],
        other=0.0,
    )
    if WIDEN:
        q = q.to(tl.float32)

    blocks = block_table + table_row.to(tl.int64) * block_table_stride
    keys = key_cache + kv_head.to(tl.int64) * key_cache_stride_head
    values = value_cache + kv_head.to(tl.int64) * value_cache_stride_head
    highest = tl.full([TILE_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([TILE_ROWS], tl.float32)
    weighted = tl.zeros([TILE_ROWS, HEAD_SIZE_PADDED], tl.float32)
    for start in tl.range(kv_start, kv_end, TILE_KEYS):
        position = start + tl.arange(0, TILE_KEYS)
        is_token = position < kv_end
        block = tl.load(blocks + position // BLOCK_SIZE, mask=is_token, other=0).to(tl.int64)
        token = (position % BLOCK_SIZE).to(tl.int64)
        k = tl.load(
            keys
            + (block * key_cache_stride_block + token * key_cache_stride_slot)[None, :]
            + element[:, None],
            mask=is_element[:, None] & is_token[None, :],
            other=0.0,
        )
        # What lies behind the last token may be anything, NaN too, and 0 * NaN is NaN.
        v = tl.load(
            values
            + (block * value_cache_stride_block + token * value_cache_stride_slot)[:, None]
            + element[None, :],
            mask=is_token[:, None] & is_element[None, :],
            other=0.0,
        )
        if WIDEN:
            k = k.to(tl.float32)
        scores = tl.dot(q, k, input_precision="ieee") * scale_log2
        is_seen = is_token[None, :] & (position[None, :] < length[:, None])
        scores = tl.where(is_seen, scores, float("-inf"))
        above = tl.maximum(highest, tl.max(scores, axis=1))
        shift = tl.where(above == float("-inf"), 0.0, above)
        weights = tl.exp2(scores - shift[:, None])
        fading = tl.exp2(highest - shift)
        total = total * fading + tl.sum(weights, axis=1)
        weights = weights.to(v.dtype)
        if WIDEN:
            weights = weights.to(tl.float32)
            v = v.to(tl.float32)
        weighted = tl.dot(weights, v, weighted * fading[:, None], input_precision="ieee")
        highest = above

    seen = total > 0
    divisor = tl.where(seen, total, 1.0)
    slot = tl.load(slots + first_slot + member, mask=is_row, other=0).to(tl.int64)
    result = slot * num_heads + head
    tl.store(
        partial_out + result[:, None] * HEAD_SIZE + element[None, :],
        weighted / divisor[:, None],
        mask=is_row[:, None] & is_element[None, :],
    )
    tl.store(
        partial_lse + result,
        tl.where(seen, highest + tl.log2(divisor), float("-inf")),
        mask=is_row,
    )


@triton.autotune(_merge_configs(), ["HEAD_SIZE"])
@triton.jit
def _merge_kernel(
    partial_out: tl.tensor,
    partial_lse: tl.tensor,
    partial_starts: tl.tensor,
    out: tl.tensor,
    num_heads: tl.tensor,
    out_stride_request: tl.tensor,
    out_stride_head: tl.tensor,
    HEAD_SIZE: tl.constexpr,
    HEAD_SIZE_PADDED: tl.constexpr,
    PARTIALS: tl.constexpr,
) -> None:
    """One request and head: the mean of its partial results, weighted by 2 to their LSE."""
    request = tl.program_id(0)
    head = tl.program_id(1)
    first = tl.load(partial_starts + request)
    stop = tl.load(partial_starts + request + 1)
    element = tl.arange(0, HEAD_SIZE_PADDED)
    is_element = element < HEAD_SIZE
    highest = float("-inf")
    total = 0.0
    weighted = tl.zeros([HEAD_SIZE_PADDED], tl.float32)
    for start in tl.range(first, stop, PARTIALS):
        partial = start + tl.arange(0, PARTIALS)
        is_partial = partial < stop
        result = partial.to(tl.int64) * num_heads + head
        lse = tl.load(partial_lse + result, mask=is_partial, other=float("-inf"))
        results = tl.load(
            partial_out + result[:, None] * HEAD_SIZE + element[None, :],
            mask=is_partial[:, None] & is_element[None, :],
            other=0.0,
        )
        above = tl.maximum(highest, tl.max(lse, axis=0))
        shift = tl.where(above == float("-inf"), 0.0, above)
        weights = tl.exp2(lse - shift)
        fading = tl.exp2(highest - shift)
        total = total * fading + tl.sum(weights, axis=0)
        weighted = weighted * fading + tl.sum(weights[:, None] * results, axis=0)
        highest = above
    mean = weighted / tl.where(total > 0, total, 1.0)
    tl.store(
        out + request.to(tl.int64) * out_stride_request + head * out_stride_head + element,
        mean.to(out.dtype.element_ty),
        mask=is_element,
    )
