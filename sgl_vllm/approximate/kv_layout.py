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


_WIDER = {4: torch.int32, 8: torch.int64}
"""The dtype of a number that has this many bytes."""

_GROUPS = (1, 2, 4, 8, 16, 32)
"""How many tokens or dimensions may be interleaved."""


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
        columns = self._columns_after_writes().view(2, block_size, heads, size)
        self._parts = [_Part(self.cache, part) for part in columns]

    def read(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of tokens, each of shape (tokens, heads, head_size).

        Args:
            slots: for each token its block, times the block's size, and its place in it; shape
                (tokens,).
        """
        blocks, offsets = slots // self._block_size, slots % self._block_size
        keys, values = (part.read(blocks, offsets) for part in self._parts)
        return keys, values

    def write(self, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """The inverse of `read`. No token is there twice."""
        layer = self._layer
        layer.impl.do_kv_cache_update(layer, keys, values, layer.kv_cache, slots)

    def _columns_after_writes(self) -> torch.Tensor:
        """For each number of a block's keys, then of its values, its column in a row. Shape (2 *
        block_size * heads * head_size,)."""
        layer, rows = self._layer, self.cache
        if not hasattr(layer.impl, "do_kv_cache_update"):
            raise ValueError(f"{type(layer.impl).__name__} writes the KV cache in another way")
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


class _Part:
    """The keys or the values of all blocks of a layer.

    Where strides can describe the layout, tokens are indexed in a view of the same memory, which is
    faster than its numbers one by one. Layouts for matrix instructions interleave a few tokens or a
    few dimensions. So a token's place is given by two numbers, its quotient and its remainder by
    `group`, and a dimension likewise:

        (blocks, block_size / group, group, heads, head_size / step, step)

    Interleaved dimensions are indexed as one wider number, where there is one.
    """

    def __init__(self, rows: torch.Tensor, columns: torch.Tensor) -> None:
        self._rows = rows
        self._columns = columns
        self._view: torch.Tensor | None = None
        self._group = 1
        block_size, heads, size = columns.shape
        for group, step in itertools.product(_GROUPS, _GROUPS):
            if block_size % group or size % step:
                continue
            shape = block_size // group, group, heads, size // step, step
            strides = _strides(columns.reshape(shape))
            if strides is not None:
                first = rows.storage_offset() + int(columns[0, 0, 0])
                view = rows.as_strided((len(rows), *shape), (rows.stride(0), *strides), first)
                self._view = _as_wider_numbers(view)
                self._group = group
                return

    def read(self, blocks: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        if self._view is None:
            return self._rows[blocks[:, None, None], self._columns[offsets]]
        found = self._view[blocks, offsets // self._group, offsets % self._group]
        return found.view(self._rows.dtype).flatten(2)


def _as_rows(cache: torch.Tensor) -> torch.Tensor:
    """The same memory with a row for each block. ValueError if that is not possible."""
    order = sorted(range(1, cache.ndim), key=lambda dim: -cache.stride(dim))
    try:
        return cache.permute(0, *order).view(cache.shape[0], -1)
    except RuntimeError:
        raise ValueError("the numbers of a block are not one after the other") from None


def _as_wider_numbers(view: torch.Tensor) -> torch.Tensor:
    """A view of the same memory whose last dimension has one number, or as few as before."""
    wider = _WIDER.get(view.shape[-1] * view.element_size())
    unaligned = [stride % view.shape[-1] for stride in (*view.stride()[:-1], view.storage_offset())]
    if wider is None or view.stride(-1) != 1 or any(unaligned):
        return view
    return view.view(wider)


def _strides(columns: torch.Tensor) -> tuple[int, ...] | None:
    """The strides of a view that has these columns of a row, from its first one on; None if there
    is none."""
    described, strides = columns.flatten()[0], []
    for dim, length in enumerate(columns.shape):
        first = columns.movedim(dim, 0).flatten(1)[:, 0]
        strides.append(int(first[1] - first[0]) if length > 1 else 0)
        steps = torch.arange(length, device=columns.device) * strides[-1]
        described = described[..., None] + steps
    if not torch.equal(described, columns) or min(strides) < 0:
        return None
    return tuple(strides)
