"""Reads and writes keys and values of tokens in a layer's KV cache, however it is laid out.

Owns the layout of one layer's cache. Does not own which tokens are read or written (`copies.py`).

Attention backends lay a block out as their kernels want it: tokens first or heads first, keys
transposed, pairs of numbers interleaved for matrix instructions. All of them write a token's key
and value through `do_kv_cache_update`, which writes here too. What is read was found from the cache
after a block had been written whose numbers say which they are.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from vllm.model_executor.layers.attention.attention import Attention

_BASE = 128
"""Numbers are written digit by digit: integers up to this are exact in every floating dtype."""


class KVLayout:
    """The layout of the blocks of one layer: which number of a block is which of a key or value.

    Args:
        layer: its cache must exist and be idle. Block 0, which vLLM keeps free, is written, and
            then restored.
        block_size: tokens per block.

    Attributes:
        cache: the layer's cache as rows of blocks, shape (blocks, numbers per block).

    Raises:
        ValueError: the layout cannot be found, for a log line.
    """

    def __init__(self, layer: Attention, block_size: int) -> None:
        cache = layer.kv_cache
        heads, size = layer.num_kv_heads, layer.head_size
        if not cache.dtype.is_floating_point or cache.element_size() < 2:
            raise ValueError(f"the KV cache has the dtype {cache.dtype}")
        self.cache = _as_rows(cache)
        if self.cache.shape[1] != 2 * block_size * heads * size:
            raise ValueError(f"a layer's KV cache has the shape {tuple(cache.shape)}")
        self._layer = layer
        self._block_size = block_size
        self._columns = self._columns_after_writes().view(2, block_size, heads, size)
        """Of each number of a key and of a value, in a row."""

    def read(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of tokens, each of shape (tokens, heads, head_size).

        Args:
            slots: for each token its block, times the block's size, and its place in it; shape
                (tokens,).
        """
        blocks, offsets = slots // self._block_size, slots % self._block_size
        keys, values = (self.cache[blocks[:, None, None], part[offsets]] for part in self._columns)
        return keys, values

    def write(self, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """The inverse of `read`. No token is there twice."""
        layer = self._layer
        update = getattr(layer.impl, "do_kv_cache_update", None)
        if update is None:
            raise ValueError(f"{type(layer.impl).__name__} writes the KV cache in another way")
        update(layer, keys, values, layer.kv_cache, slots)

    def _columns_after_writes(self) -> torch.Tensor:
        """For each number of a block's keys, then of its values, its column in a row. Shape (2 *
        block_size * heads * head_size,)."""
        layer, rows = self._layer, self.cache
        shape = 2, self._block_size, layer.num_kv_heads, layer.head_size
        numbers = torch.arange(rows.shape[1], device=rows.device)
        slots = torch.arange(self._block_size, device=rows.device)
        before = rows[0].clone()
        found = torch.zeros_like(numbers)
        try:
            for digit in itertools.count():
                if _BASE**digit >= len(numbers):
                    break
                keys, values = (numbers // _BASE**digit % _BASE).to(rows.dtype).view(shape)
                self.write(slots, keys.contiguous(), values.contiguous())
                found += rows[0].long() * _BASE**digit
        finally:
            rows[0] = before
        if not torch.equal(found.sort().values, numbers):
            raise ValueError("the KV cache does not hold keys and values as they are written")
        columns = torch.empty_like(numbers)
        columns[found] = numbers
        return columns


def _as_rows(cache: torch.Tensor) -> torch.Tensor:
    """The same memory with a row for each block. ValueError if that is not possible."""
    order = sorted(range(1, cache.ndim), key=lambda dim: -cache.stride(dim))
    try:
        return cache.permute(0, *order).view(cache.shape[0], -1)
    except RuntimeError:
        raise ValueError("the numbers of a block are not one after the other") from None
