"""Where a layer's KV cache holds the key and the value of a token: found by writing some.

Owns the layout of one layer's cache. Does not own which tokens are read or written (`copies.py`).

Attention backends lay a block out as their kernels want it: tokens first or heads first, keys
transposed, pairs of numbers interleaved for matrix instructions. All of them write a token's key
and value through `do_kv_cache_update`. So the layout is read from the cache after a block has been
written whose numbers say which they are.
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
        keys, values: for each token of a block, the columns of its key and value, shape
            (block_size, heads, head_size).

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
        columns = _columns_after_writes(layer, self.cache, block_size)
        self.keys, self.values = columns.view(2, block_size, heads, size)
        self._strided = [_strided(self.cache, columns) for columns in (self.keys, self.values)]

    def read(
        self, blocks: torch.Tensor, offsets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of tokens, each of shape (tokens, heads, head_size).

        Args:
            blocks, offsets: for each token its block, and its place in it; shape (tokens,).
        """
        keys, values = (
            view[blocks, offsets]
            if view is not None
            else self.cache[blocks[:, None, None], columns[offsets]]
            for view, columns in self._views()
        )
        return keys, values

    def write(
        self,
        blocks: torch.Tensor,
        offsets: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> None:
        """The inverse of `read`. No token is there twice."""
        for (view, columns), what in zip(self._views(), (keys, values), strict=True):
            if view is not None:
                view[blocks, offsets] = what
            else:
                self.cache[blocks[:, None, None], columns[offsets]] = what

    def _views(self) -> list[tuple[torch.Tensor | None, torch.Tensor]]:
        return list(zip(self._strided, (self.keys, self.values), strict=True))


def _as_rows(cache: torch.Tensor) -> torch.Tensor:
    """The same memory with a row for each block. ValueError if that is not possible."""
    order = sorted(range(1, cache.ndim), key=lambda dim: -cache.stride(dim))
    try:
        return cache.permute(0, *order).view(cache.shape[0], -1)
    except RuntimeError:
        raise ValueError("the numbers of a block are not one after the other") from None


def _columns_after_writes(layer: Attention, rows: torch.Tensor, block_size: int) -> torch.Tensor:
    """For each number of a block's keys, then of its values, its column in a row. Shape (2 *
    block_size * heads * head_size,)."""
    num_numbers = rows.shape[1]
    shape = 2, block_size, layer.num_kv_heads, layer.head_size
    numbers = torch.arange(num_numbers, device=rows.device)
    slots = torch.arange(block_size, device=rows.device)
    write = getattr(layer.impl, "do_kv_cache_update", None)
    if write is None:
        raise ValueError(f"{type(layer.impl).__name__} writes the KV cache in another way")
    before = rows[0].clone()
    found = torch.zeros_like(numbers)
    try:
        for digit in itertools.count():
            if _BASE**digit >= num_numbers:
                break
            keys, values = (numbers // _BASE**digit % _BASE).to(rows.dtype).view(shape)
            write(layer, keys.contiguous(), values.contiguous(), layer.kv_cache, slots)
            found += rows[0].long() * _BASE**digit
    finally:
        rows[0] = before
    if not torch.equal(found.sort().values, numbers):
        raise ValueError("the KV cache does not hold keys and values as they are written")
    columns = torch.empty_like(numbers)
    columns[found] = numbers
    return columns


def _strided(rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor | None:
    """A view of shape (blocks, block_size, heads, head_size) of the same memory, which is faster to
    index than its numbers one by one; None where strides cannot describe `columns`."""
    first = int(columns[0, 0, 0])
    steps = []
    for dim, length in enumerate(columns.shape):
        steps.append(int(columns.select(dim, 1)[0, 0]) - first if length > 1 else 0)
    ranges = [
        torch.arange(length, device=columns.device) * step
        for length, step in zip(columns.shape, steps, strict=True)
    ]
    described = first + ranges[0][:, None, None] + ranges[1][:, None] + ranges[2]
    if not torch.equal(described, columns) or min(steps) < 0:
        return None
    return rows.as_strided(
        (rows.shape[0], *columns.shape),
        (rows.stride(0), *steps),
        rows.storage_offset() + first,
    )
