"""Extend attention: new tokens of several requests attend to their cached prefix and to each other.

Owns the kernel and its launch. The prefix is read from the paged KV cache, the new keys and values
from the tensors that the layer has just computed, whether or not they are in the cache already.

    keys of a request     [0 .......... prefix_len) [0 ............... num_new)
    lie in                |-- blocks of the cache --| |-- `key` and `value` --|
    seen by new token i   all of them                 [0, i]

All query heads of a KV head share a tile: its rows are (token, head) pairs, token by token, so that
a key is read once for all of them, and a tile is full with few tokens. One online softmax runs over
both parts, so nothing is written but the result.

Idea: the prefill on a cached prefix of RadixAttention (Zheng et al., arXiv 2312.07104, section 3);
the online softmax is FlashAttention's (Dao et al., arXiv 2205.14135).
"""

from __future__ import annotations

from typing import Any  # Any: Triton has no types

import torch
import triton
import triton.language as tl

from .checks import INTERPRETED, check_query, check_runs_on


def extend_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    prefix_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    max_query_len: int,
    *,
    scale: float | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of every new token over its request's prefix and the new tokens up to itself.

    Everything is on one device, of one of bfloat16, float16 and float32, and has any strides but
    in its last dimension, which is contiguous. Sums are taken in float32. Nothing waits for the
    device, so what only the device knows is not checked: lengths and block numbers must be right.
    No sliding window, soft cap, ALiBi, or quantised cache.

    Cost, in bytes: the least is each new token's query, key, value and result once and each cached
    key and value of a prefix once. This reads the keys and values anew for each tile of a request's
    queries, `ceil(num_new * num_heads / num_kv_heads / TILE_ROWS)` times, after the first mostly
    from the L2 cache, as the tiles of one request and KV head run side by side. A single request
    with few new tokens on a long prefix has few tiles: keys are not split over programs. The first
    call of a kind (heads to a KV head, head size, block size, type, one of four classes of length)
    compiles and tries tiles of several sizes on the GPU, which takes seconds.

    Args:
        query: [num_new_tokens, num_heads, head_size], the requests one after the other. head_size
            is a multiple of 16, at most 256; a power of two wastes no work.
        key: [num_new_tokens, num_kv_heads, head_size]; num_kv_heads divides num_heads.
        value: like `key`.
        key_cache: [num_blocks, block_size, num_kv_heads, head_size]. For vLLM's cache,
            [num_blocks, num_kv_heads, block_size, 2 * head_size]:
            `kv_cache.transpose(1, 2).split(head_size, dim=-1)` gives both.
        value_cache: like `key_cache`.
        block_table: int32 [num_requests, max_num_blocks], contiguous rows: the cache blocks of each
            request's prefix, in order. What lies behind the prefix is not read.
        prefix_lens: int32 [num_requests], in tokens; 0 for none.
        query_start_loc: int32 [num_requests + 1]: request `r` has the new tokens
            `[query_start_loc[r], query_start_loc[r + 1])`, none possibly. Tokens behind the last
            request's, padding of a batch, get no result.
        max_query_len: no request has more new tokens; sets the size of the grid.
        scale: of the scores; 1 / sqrt(head_size) if None.
        out: where the result goes; like `query`. Made if None.
        lse: float32 [num_heads, num_new_tokens], contiguous: gets the natural logarithm of each
            softmax's denominator, for merging with attention over other keys.

    Returns:
        [num_new_tokens, num_heads, head_size], `out` if it was given.

    Raises:
        ValueError: an argument's shape, type, strides or device is not as above, or the device is
            the CPU and Triton does not interpret (TRITON_INTERPRET=1, set before it is imported).
    """
    if out is None:
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
    _check(query, key, value, key_cache, value_cache, out)
    num_new_tokens, num_heads, head_size = query.shape
    num_requests = query_start_loc.numel() - 1
    _check_index("block_table", block_table, (num_requests, None), query)
    _check_index("prefix_lens", prefix_lens, (num_requests,), query)
    _check_index("query_start_loc", query_start_loc, (num_requests + 1,), query)
    if lse is not None and (
        lse.shape != (num_heads, num_new_tokens)
        or lse.dtype != torch.float32
        or lse.device != query.device
        or not lse.is_contiguous()
    ):
        raise ValueError(
            f"lse must be a contiguous float32 [num_heads, num_new_tokens] = "
            f"[{num_heads}, {num_new_tokens}] on {query.device}"
        )
    if num_requests < 1 or num_new_tokens == 0 or max_query_len < 1:
        return out

    num_kv_heads = key.shape[1]
    heads_per_kv_head = num_heads // num_kv_heads
    num_rows = min(max_query_len, num_new_tokens) * heads_per_kv_head
    arguments: dict[str, Any] = {
        "HEADS_PER_KV_HEAD": heads_per_kv_head,
        "HEAD_SIZE": head_size,
        "HEAD_SIZE_PADDED": triton.next_power_of_2(head_size),
        "BLOCK_SIZE": key_cache.shape[1],
        "HAS_LSE": lse is not None,
        "PRECISION": "ieee" if query.dtype == torch.float32 else "tf32",
        "WIDEN": INTERPRETED and query.dtype == torch.bfloat16,
        "ROWS_UP_TO": _rows_up_to(num_rows),
    }
    _extend_kernel[
        lambda meta: (triton.cdiv(num_rows, meta["TILE_ROWS"]), num_kv_heads, num_requests)
    ](
        query,
        key,
        value,
        key_cache,
        value_cache,
        block_table,
        prefix_lens,
        query_start_loc,
        out,
        out if lse is None else lse,
        (head_size**-0.5 if scale is None else scale) * _LOG2_E,
        num_new_tokens,
        *query.stride()[:2],
        *key.stride()[:2],
        *value.stride()[:2],
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        *out.stride()[:2],
        block_table.stride(0),
        **arguments,
    )
    return out


def chosen_tile() -> dict[str, int]:
    """The `tile_rows` and `tile_keys` of the last call."""
    return {name.lower(): size for name, size in _extend_kernel.best_config.kwargs.items()}


_LOG2_E = 1.4426950408889634
_LN_2 = tl.constexpr(0.6931471805599453)


def _rows_up_to(num_rows: int) -> int:
    """What the tile sizes are chosen by: few classes, as each is tuned and compiled by itself."""
    return next(bound for bound in (16, 64, 256, 1 << 30) if num_rows <= bound)


def _check(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    out: torch.Tensor,
) -> None:
    if query.dim() != 3 or key.dim() != 3 or key_cache.dim() != 4:
        raise ValueError(
            "query and key must have 3 dimensions and key_cache 4, not "
            f"{query.dim()}, {key.dim()} and {key_cache.dim()}"
        )
    num_new_tokens, num_heads, head_size = query.shape
    num_kv_heads = key.shape[1]
    check_query(query)
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(f"{num_kv_heads} KV heads do not divide {num_heads} query heads")
    check_runs_on(query.device)
    in_cache = (*key_cache.shape[:2], num_kv_heads, head_size)
    if in_cache[1] < 1:
        raise ValueError("the cache's blocks must have one slot at least")
    expected = {
        "query": (query, tuple(query.shape)),
        "key": (key, (num_new_tokens, num_kv_heads, head_size)),
        "value": (value, (num_new_tokens, num_kv_heads, head_size)),
        "key_cache": (key_cache, in_cache),
        "value_cache": (value_cache, in_cache),
        "out": (out, tuple(query.shape)),
    }
    for name, (tensor, shape) in expected.items():
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name} must have the shape {shape}, not {tuple(tensor.shape)}")
        if tensor.dtype != query.dtype or tensor.device != query.device:
            raise ValueError(
                f"{name} is {tensor.dtype} on {tensor.device}, but query is {query.dtype} on "
                f"{query.device}"
            )
        if tensor.stride(-1) != 1:
            raise ValueError(f"the last dimension of {name} must be contiguous")


def _check_index(
    name: str, tensor: torch.Tensor, shape: tuple[int | None, ...], query: torch.Tensor
) -> None:
    fits = tensor.dim() == len(shape) and all(
        wanted is None or found == wanted for found, wanted in zip(tensor.shape, shape, strict=True)
    )
    if not fits or tensor.dtype != torch.int32 or tensor.device != query.device:
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(
            f"{name} must be int32 [{wanted}] on {query.device}, not {tensor.dtype} "
            f"{list(tensor.shape)} on {tensor.device}"
        )
    if tensor.numel() and tensor.stride(-1) != 1:
        raise ValueError(f"the last dimension of {name} must be contiguous")


# -- the kernel


def _configs() -> list[triton.Config]:
    """Tiles that are tried on a GPU, by how many rows there are; one fixed in the interpreter."""
    if INTERPRETED:
        return [triton.Config({"TILE_ROWS": 16, "TILE_KEYS": 16})]
    return [
        triton.Config(
            {"TILE_ROWS": rows, "TILE_KEYS": keys}, num_warps=num_warps, num_stages=num_stages
        )
        for rows, keys, num_warps in (
            (16, 64, 4),
            (16, 128, 4),
            (64, 32, 4),
            (64, 64, 4),
            (64, 128, 4),
            (128, 64, 8),
            (128, 128, 8),
        )
        for num_stages in (2, 3)
    ]


def _worth_trying(
    configs: list[triton.Config], arguments: dict[str, Any], **constants: Any
) -> list[triton.Config]:
    """Tiles that the queries can fill, and not the smallest for many."""
    bound = constants["ROWS_UP_TO"]
    smallest = 16 if bound <= 64 else 64
    return [one for one in configs if smallest <= one.kwargs["TILE_ROWS"] <= bound]


@triton.autotune(
    configs=_configs(),
    key=["HEADS_PER_KV_HEAD", "HEAD_SIZE", "BLOCK_SIZE", "PRECISION", "ROWS_UP_TO"],
    prune_configs_by={"early_config_prune": _worth_trying},
)
@triton.jit
def _extend_kernel(
    query: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    block_table: tl.tensor,
    prefix_lens: tl.tensor,
    query_start_loc: tl.tensor,
    out: tl.tensor,
    lse: tl.tensor,
    scale_log2: tl.tensor,
    num_new_tokens: tl.tensor,
    query_stride_token: tl.tensor,
    query_stride_head: tl.tensor,
    key_stride_token: tl.tensor,
    key_stride_head: tl.tensor,
    value_stride_token: tl.tensor,
    value_stride_head: tl.tensor,
    key_cache_stride_block: tl.tensor,
    key_cache_stride_slot: tl.tensor,
    key_cache_stride_head: tl.tensor,
    value_cache_stride_block: tl.tensor,
    value_cache_stride_slot: tl.tensor,
    value_cache_stride_head: tl.tensor,
    out_stride_token: tl.tensor,
    out_stride_head: tl.tensor,
    block_table_stride: tl.tensor,
    HEADS_PER_KV_HEAD: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_SIZE_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_LSE: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
    ROWS_UP_TO: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
) -> None:
    """A tile of one request's queries, for the heads of one KV head. The last tile first: it sees
    the most keys."""
    request = tl.program_id(2)
    kv_head = tl.program_id(1)
    start = tl.load(query_start_loc + request)
    num_new = tl.load(query_start_loc + request + 1) - start
    first_row = (tl.num_programs(0) - 1 - tl.program_id(0)) * TILE_ROWS
    if first_row >= num_new * HEADS_PER_KV_HEAD:
        return
    prefix_len = tl.load(prefix_lens + request)

    rows = first_row + tl.arange(0, TILE_ROWS)
    token = rows // HEADS_PER_KV_HEAD
    head = kv_head * HEADS_PER_KV_HEAD + rows % HEADS_PER_KV_HEAD
    column = tl.arange(0, HEAD_SIZE_PADDED)
    is_column = column < HEAD_SIZE
    is_row = token < num_new
    token_in_batch = (start + token).to(tl.int64)
    q = tl.load(
        query
        + (token_in_batch * query_stride_token + head * query_stride_head)[:, None]
        + column[None, :],
        mask=is_row[:, None] & is_column[None, :],
        other=0.0,
    )
    acc = tl.full([TILE_ROWS, HEAD_SIZE_PADDED], 0.0, tl.float32)
    denominator = tl.full([TILE_ROWS], 0.0, tl.float32)
    maximum = tl.full([TILE_ROWS], float("-inf"), tl.float32)

    # The prefix: every row sees all of it.
    blocks = block_table + request.to(tl.int64) * block_table_stride
    key_cache += kv_head.to(tl.int64) * key_cache_stride_head
    value_cache += kv_head.to(tl.int64) * value_cache_stride_head
    for first_key in range(0, prefix_len, TILE_KEYS):
        position = first_key + tl.arange(0, TILE_KEYS)
        is_key = position < prefix_len
        block = tl.load(blocks + position // BLOCK_SIZE, mask=is_key, other=0).to(tl.int64)
        slot = position % BLOCK_SIZE
        is_cell = is_key[:, None] & is_column[None, :]
        k = tl.load(
            key_cache
            + (block * key_cache_stride_block + slot * key_cache_stride_slot)[:, None]
            + column[None, :],
            mask=is_cell,
            other=0.0,
        )
        v = tl.load(
            value_cache
            + (block * value_cache_stride_block + slot * value_cache_stride_slot)[:, None]
            + column[None, :],
            mask=is_cell,
            other=0.0,
        )
        acc, maximum, denominator = _attend(
            acc, maximum, denominator, q, k, v, is_key[None, :], scale_log2, PRECISION, WIDEN
        )

    # The new tokens: a row sees those up to its own.
    key += start.to(tl.int64) * key_stride_token + kv_head * key_stride_head
    value += start.to(tl.int64) * value_stride_token + kv_head * value_stride_head
    num_seen = tl.minimum(num_new, (first_row + TILE_ROWS - 1) // HEADS_PER_KV_HEAD + 1)
    for first_key in range(0, num_seen, TILE_KEYS):
        position = first_key + tl.arange(0, TILE_KEYS)
        is_cell = (position < num_seen)[:, None] & is_column[None, :]
        offset = position.to(tl.int64)[:, None]
        k = tl.load(key + offset * key_stride_token + column[None, :], mask=is_cell, other=0.0)
        v = tl.load(value + offset * value_stride_token + column[None, :], mask=is_cell, other=0.0)
        acc, maximum, denominator = _attend(
            acc,
            maximum,
            denominator,
            q,
            k,
            v,
            position[None, :] <= token[:, None],
            scale_log2,
            PRECISION,
            WIDEN,
        )

    result = acc / denominator[:, None]
    tl.store(
        out
        + (token_in_batch * out_stride_token + head * out_stride_head)[:, None]
        + column[None, :],
        result.to(out.dtype.element_ty),
        mask=is_row[:, None] & is_column[None, :],
    )
    if HAS_LSE:
        tl.store(
            lse + head.to(tl.int64) * num_new_tokens + token_in_batch,
            (maximum + tl.log2(denominator)) * _LN_2,
            mask=is_row,
        )


@triton.jit
def _attend(
    acc: tl.tensor,
    maximum: tl.tensor,
    denominator: tl.tensor,
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    is_seen: tl.tensor,
    scale_log2: tl.tensor,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """One step of the online softmax, in powers of two: a tile of keys enters the sums. Each row
    has seen a key after it: else its maximum would be minus infinity still and its sums no numbers.

    WIDEN is for the interpreter, which multiplies the bits of bfloat16 as integers. In float32 such
    a product is exact, as on a GPU.
    """
    if WIDEN:
        scores = tl.dot(q.to(tl.float32), tl.trans(k).to(tl.float32)) * scale_log2
    else:
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2
    scores = tl.where(is_seen, scores, float("-inf"))
    new_maximum = tl.maximum(maximum, tl.max(scores, 1))
    weights = tl.exp2(scores - new_maximum[:, None])
    fade = tl.exp2(maximum - new_maximum)
    denominator = denominator * fade + tl.sum(weights, 1)
    acc = acc * fade[:, None]
    if WIDEN:
        acc = tl.dot(weights.to(v.dtype).to(tl.float32), v.to(tl.float32), acc)
    else:
        acc = tl.dot(weights.to(v.dtype), v, acc, input_precision=PRECISION)
    return acc, new_maximum, denominator
