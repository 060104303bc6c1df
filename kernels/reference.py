"""What the kernels compute, in plain PyTorch: the same arguments, row by row, with float32 results.

For tests and for reading. Slow: loops in Python, and every length is read from the device.
"""

from __future__ import annotations

import torch


def decode_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """softmax(scale * q k^T) v of one query token per request over all its `seq_len` tokens.

    Args:
        query: [num_requests, num_heads, head_size].
        key_cache, value_cache: [num_blocks, block_size_tokens, num_kv_heads, head_size].
        block_table: [num_requests, max_blocks].
        seq_lens: [num_requests]; 0 gives zeros.

    Returns:
        [num_requests, num_heads, head_size] float32, accumulated in float64.
    """
    num_requests, num_heads, head_size = query.shape
    block_size_tokens, num_kv_heads = key_cache.shape[1:3]
    out = torch.zeros(num_requests, num_heads, head_size, dtype=torch.float64, device=query.device)
    for request in range(num_requests):
        length = int(seq_lens[request])
        if not length:
            continue
        blocks = block_table[request, : -(-length // block_size_tokens)].long()
        keys, values = (
            cache[blocks].flatten(0, 1)[:length].double() for cache in (key_cache, value_cache)
        )
        queries = query[request].double().unflatten(0, (num_kv_heads, -1))
        scores = torch.einsum("hgd,nhd->hgn", queries, keys) * scale
        out[request] = torch.einsum("hgn,nhd->hgd", scores.softmax(-1), values).flatten(0, 1)
    return out.float()
