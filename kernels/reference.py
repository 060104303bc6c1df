"""What the kernels compute, in plain PyTorch: the same arguments, row by row and in float32.

For tests and for reading. Slow: loops in Python, and every length is read from the device.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch


def extend_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    prefix_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`extend_attention.extend_attention`, and its `lse`; both float32, and 0 for padding."""
    num_new_tokens, num_heads, head_size = query.shape
    scale = head_size**-0.5 if scale is None else scale
    block_size, num_kv_heads = key_cache.shape[1:3]
    out = torch.zeros(query.shape, dtype=torch.float32, device=query.device)
    lse = torch.zeros(num_heads, num_new_tokens, dtype=torch.float32, device=query.device)
    starts = query_start_loc.tolist()
    for request, prefix_len in enumerate(prefix_lens.tolist()):
        new = slice(starts[request], starts[request + 1])
        num_new = new.stop - new.start
        blocks = block_table[request, : -(-prefix_len // block_size)].long()

        keys, values = (
            torch.cat([cache[blocks].flatten(0, 1)[:prefix_len], tensor[new]])
            .float()
            .repeat_interleave(num_heads // num_kv_heads, dim=1)
            for cache, tensor in ((key_cache, key), (value_cache, value))
        )
        scores = torch.einsum("qhd,khd->hqk", query[new].float(), keys) * scale
        position = torch.arange(prefix_len + num_new, device=query.device)
        is_unseen = position[None, :] > position[prefix_len:, None]
        scores = scores.masked_fill(is_unseen, float("-inf"))
        weights = scores.softmax(dim=-1)
        out[new] = torch.einsum("hqk,khd->qhd", weights, values)
        lse[:, new] = scores.logsumexp(dim=-1)
    return out, lse


def copy_slots(
    kv_caches: Iterable[torch.Tensor],
    copies: Sequence[tuple[int, int, int]],
    block_size: int | None = None,
) -> None:
    """`slot_copy.SlotCopier.copy`: for each (source, destination, number of slots) the leading
    slots of a block over another's, in every cache [num_blocks, num_heads, slots, content]. A block
    of `block_size` slots may be several blocks of the cache, one after the other."""
    for cache in kv_caches:
        ratio = 1 if block_size is None else block_size // cache.shape[2]
        blocks = cache.unflatten(0, (cache.shape[0] // ratio, ratio))
        for source, destination, num_slots in copies:
            for slot in range(num_slots):
                part, inside = divmod(slot, cache.shape[2])
                blocks[destination, part, :, inside] = blocks[source, part, :, inside]
