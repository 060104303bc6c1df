"""Slot copy: leading slots of blocks of the KV cache into other blocks, all layers in one launch.

A radix hit that ends inside a block needs the block's matched slots in a block of its own before
the forward pass. vLLM copies whole blocks instead, each layer by itself: it reads them, writes
them to a temporary tensor, reads that and writes the copies.

    block to copy from    [ matched ......... | others' tokens ... )
    its copy              [ copied by this .. | written by the passes that follow )

Owns the kernel, the check that all layers are alike, and their addresses on the device. Does not
own which blocks are copied, nor when: a copy runs on the current stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

from .checks import INTERPRETED, check_runs_on

_WORDS = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}
"""By size in bytes. What is copied is bits: the cache's own type does not matter."""
_VECTOR_BYTES = 16
"""What one thread of a GPU loads at most, at an address that is a multiple of it."""


@dataclass(frozen=True)
class _Layout:
    """What all layers have in common; strides and sizes in words.

    Attributes:
        num_words: of a cell, the content of one slot for one head.
        blocks_per_block: how many blocks of the cache make one that copies name.
        is_aligned: addresses and strides are multiples of what a thread loads at once.
    """

    word_bytes: int
    num_words: int
    num_heads: int
    slots: int
    blocks_per_block: int
    stride_block: int
    stride_head: int
    stride_slot: int
    is_aligned: bool


class SlotCopier:
    """Copies slots of the same blocks in every layer of a KV cache.

    Built once, when the cache has been allocated; keeps the layers' addresses on their device, and
    the tensors alive.

    Args:
        kv_caches: a view [num_blocks, num_heads, slots, content] of each layer, as vLLM's workers
            have them (content: the key and the value of a head; with MLA, which has one head, the
            latent vector). Any type, any strides but in the last dimension, which is contiguous:
            blocks may lie inside or outside of layers, and heads inside or outside of slots. Layers
            that share a cache are copied once. A cache with keys and values apart is given as two
            views of each layer.
        block_size: slots of a block that `copy` names, if the cache's own blocks are smaller parts
            of it, one after the other; the cache's if None.

    Raises:
        ValueError: the layers are not all alike, so that blocks have to be copied layer by layer;
            or the device is the CPU and Triton does not interpret.
    """

    def __init__(self, kv_caches: Sequence[torch.Tensor], block_size: int | None = None) -> None:
        if not kv_caches:
            raise ValueError("there is no layer to copy in")
        distinct = {cache.data_ptr(): cache for cache in kv_caches}
        self._layers = list(distinct.values())
        first = self._layers[0]
        self._check_alike()
        slots = first.shape[2]
        self.block_size = slots if block_size is None else block_size
        """In slots."""
        num_parts = self.block_size // slots
        if num_parts < 1 or self.block_size % slots or first.shape[0] % num_parts:
            raise ValueError(
                f"{first.shape[0]} blocks of {slots} slots are no blocks of {self.block_size} slots"
            )
        self.num_blocks = first.shape[0] // num_parts
        self._layout = self._common_layout()
        self._pointers = torch.tensor(list(distinct), dtype=torch.int64, device=first.device)

    @property
    def device(self) -> torch.device:
        return self._layers[0].device

    @property
    def slot_bytes(self) -> int:
        """Of one slot in all layers."""
        one = self._layout
        return len(self._layers) * one.num_heads * one.num_words * one.word_bytes

    def least_bytes(self, num_slots: int) -> int:
        """What a copy of so many slots, of all blocks together, has to read and write."""
        return 2 * num_slots * self.slot_bytes

    def copy(self, copies: torch.Tensor) -> None:
        """Copy the leading slots of blocks over those of others. The rest of both stays as it is.

        In one call no block is written twice, and none is both read and written: the copies run in
        no order. Reading one block for several copies is fine. vLLM's scheduler keeps to that: a
        copy goes to a block that was free, and both blocks stay reserved until the step has run.

        Cost: one launch. Every copied slot is read once and written once, which is the least, and
        each program reads 12 bytes of `copies` and a pointer.

        Args:
            copies: int32 [num_copies, 3], contiguous: source block, destination block, number of
                slots. On the CPU it is checked here, and sent to the device without waiting for it.
                On the device it is taken as it is: a wrong block would be memory that is not ours.

        Raises:
            ValueError: wrong shape, type or device; or, of copies on the CPU, a block or a number
                of slots that does not exist, or copies that are not independent.
        """
        if copies.dim() != 2 or copies.shape[1] != 3 or copies.dtype != torch.int32:
            raise ValueError(
                f"copies must be int32 [num_copies, 3], not {copies.dtype} {list(copies.shape)}"
            )
        if copies.device.type == "cpu":
            self.check(copies)
            if self.device.type == "cuda":
                copies = copies.pin_memory().to(self.device, non_blocking=True)
        if copies.device != self.device or not copies.is_contiguous():
            raise ValueError(f"copies must be contiguous and on the CPU or {self.device}")
        if len(copies) == 0:
            return
        one = self._layout
        num_cells = self.block_size * one.num_heads
        _slot_copy_kernel[
            lambda meta: (
                len(copies) * triton.cdiv(num_cells, meta["TILE_CELLS"]),
                len(self._layers),
            )
        ](
            self._pointers,
            copies,
            NUM_CELLS=num_cells,
            NUM_HEADS=one.num_heads,
            NUM_WORDS=one.num_words,
            NUM_WORDS_PADDED=triton.next_power_of_2(one.num_words),
            SLOTS=one.slots,
            BLOCKS_PER_BLOCK=one.blocks_per_block,
            STRIDE_BLOCK=one.stride_block,
            STRIDE_HEAD=one.stride_head,
            STRIDE_SLOT=one.stride_slot,
            WORD=_WORDS[one.word_bytes],
            ALIGNED_BYTES=_VECTOR_BYTES if one.is_aligned else one.word_bytes,
        )

    # -- checks -------------------------------------------------------------------------------

    def _check_alike(self) -> None:
        first = self._layers[0]
        check_runs_on(first.device)
        if first.dim() != 4:
            raise ValueError(
                "each layer must be [num_blocks, num_heads, slots, content], not "
                f"{list(first.shape)}: copy blocks layer by layer"
            )
        if first.numel() == 0 or first.stride(3) != 1:
            raise ValueError(
                "the content of a slot must be contiguous and not empty: copy blocks layer by layer"
            )
        for number, layer in enumerate(self._layers):
            for what, found, wanted in (
                ("shape", tuple(layer.shape), tuple(first.shape)),
                ("strides", layer.stride(), first.stride()),
                ("type", layer.dtype, first.dtype),
                ("device", layer.device, first.device),
            ):
                if found != wanted:
                    raise ValueError(
                        f"layer {number} has the {what} {found} and layer 0 {wanted}: copy blocks "
                        "layer by layer"
                    )

    def _common_layout(self) -> _Layout:
        first = self._layers[0]
        size = first.element_size()
        num_heads, slots, content = first.shape[1:]
        in_bytes = [stride * size for stride in first.stride()[:3]]
        addresses = [layer.data_ptr() for layer in self._layers]
        word = next(
            word
            for word in _WORDS
            if all(one % word == 0 for one in (content * size, *in_bytes, *addresses))
        )
        stride_block, stride_head, stride_slot = (stride // word for stride in in_bytes)
        return _Layout(
            word_bytes=word,
            num_words=content * size // word,
            num_heads=num_heads,
            slots=slots,
            blocks_per_block=self.block_size // slots,
            stride_block=stride_block,
            stride_head=stride_head,
            stride_slot=stride_slot,
            is_aligned=all(
                one % _VECTOR_BYTES == 0 for one in (content * size, *in_bytes, *addresses)
            ),
        )

    def check(self, copies: torch.Tensor) -> None:
        """Raise what `copy` would raise because of the blocks and slots of copies on the CPU."""
        blocks, num_slots = copies.numpy()[:, :2], copies.numpy()[:, 2]
        if not ((blocks >= 0) & (blocks < self.num_blocks)).all():
            raise ValueError(f"copies name a block that is not one of the {self.num_blocks}")
        if not ((num_slots >= 0) & (num_slots <= self.block_size)).all():
            raise ValueError(f"copies ask for slots that a block of {self.block_size} has not")
        sources, destinations = blocks[:, 0], blocks[:, 1]
        if len(np.unique(destinations)) < len(copies):
            raise ValueError("copies write a block twice")
        if np.isin(destinations, sources).any():
            raise ValueError("copies read a block that they also write")


# -- the kernel


def _configs() -> list[triton.Config]:
    """How many cells a program copies; one fixed in the interpreter."""
    if INTERPRETED:
        return [triton.Config({"TILE_CELLS": 32})]
    return [
        triton.Config({"TILE_CELLS": cells}, num_warps=num_warps)
        for cells in (8, 16, 32, 64)
        for num_warps in (2, 4, 8)
    ]


@triton.autotune(
    configs=_configs(),
    key=["NUM_CELLS", "NUM_WORDS", "STRIDE_HEAD", "STRIDE_SLOT", "ALIGNED_BYTES"],
)
@triton.jit
def _slot_copy_kernel(
    pointers: tl.tensor,
    copies: tl.tensor,
    NUM_CELLS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_WORDS: tl.constexpr,
    NUM_WORDS_PADDED: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCKS_PER_BLOCK: tl.constexpr,
    STRIDE_BLOCK: tl.constexpr,
    STRIDE_HEAD: tl.constexpr,
    STRIDE_SLOT: tl.constexpr,
    WORD: tl.constexpr,
    ALIGNED_BYTES: tl.constexpr,
    TILE_CELLS: tl.constexpr,
) -> None:
    """One tile of one copy's cells in one layer: (slot, head) pairs, slot by slot. Tiles behind the
    last slot to copy have nothing to do."""
    TILES: tl.constexpr = (NUM_CELLS + TILE_CELLS - 1) // TILE_CELLS
    number = tl.program_id(0) // TILES
    first_cell = (tl.program_id(0) % TILES) * TILE_CELLS
    num_cells = tl.minimum(tl.load(copies + number * 3 + 2) * NUM_HEADS, NUM_CELLS)
    if first_cell >= num_cells:
        return
    source = tl.load(copies + number * 3).to(tl.int64)
    destination = tl.load(copies + number * 3 + 1).to(tl.int64)
    layer = tl.load(pointers + tl.program_id(1)).to(tl.pointer_type(WORD))
    layer = tl.multiple_of(layer, ALIGNED_BYTES)

    cell = first_cell + tl.arange(0, TILE_CELLS)
    word = tl.arange(0, NUM_WORDS_PADDED)
    slot = cell // NUM_HEADS
    part = (slot // SLOTS).to(tl.int64)
    offset = part * STRIDE_BLOCK + (slot % SLOTS).to(tl.int64) * STRIDE_SLOT
    offset += (cell % NUM_HEADS).to(tl.int64) * STRIDE_HEAD
    cells = layer + offset[:, None] + word[None, :]
    is_word = (cell < num_cells)[:, None] & (word < NUM_WORDS)[None, :]
    content = tl.load(cells + source * (BLOCKS_PER_BLOCK * STRIDE_BLOCK), mask=is_word)
    tl.store(cells + destination * (BLOCKS_PER_BLOCK * STRIDE_BLOCK), content, mask=is_word)
