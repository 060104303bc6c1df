"""The slot copy against vLLM's copy of whole blocks, before a forward pass.

A case is so many radix hits inside a block in one step: each has a block to copy from, one to copy
to, and 1 to `block size - 1` matched slots. *least* is what has to be read and written: the matched
slots, once each. *stock* is vLLM's `copy_kv_cache_blocks_inplace`: whole blocks, into a temporary
tensor and out of it, two launches for each layer (two in all, in layouts with blocks outside of
layers).

With CUDA: *ms* is the whole call from a list of copies on the CPU, as vLLM's worker has it, and so
is *stock ms*; *kernel ms* is without the check and the transfer of the list; *GB/s* is least /
kernel ms; *ratio* is stock ms / ms, above 1 the slot copy is faster. *off* is the largest absolute
difference from the reference in plain PyTorch, and has to be 0.
"""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import prod
from typing import Any

import torch

from benchmarks.kernels.device import (
    AGAINST_STOCK,
    LEAST,
    MS,
    entry,
    milliseconds,
    per_least,
    times,
)

MAX_WORDS = 1 << 22
"""Random numbers are made in pieces of so many."""


@dataclass(frozen=True)
class Case:
    """`layout` is vLLM's: the order in memory of Layers, Blocks, Heads, slots (N) and Content."""

    num_copies: int
    num_layers: int = 32
    layout: str = "LBNHC"
    block_size: int = 16
    num_kv_heads: int = 8
    head_size: int = 128
    width_bytes: int = 2

    @property
    def name(self) -> str:
        return (
            f"{self.num_copies} x {self.num_layers} layers, {self.layout}, blocks of "
            f"{self.block_size}"
        )

    @property
    def slot_bytes(self) -> int:
        """Of keys and values in all layers."""
        return self.num_layers * self.num_kv_heads * 2 * self.head_size * self.width_bytes

    @property
    def num_blocks(self) -> int:
        return max(64, 4 * self.num_copies)

    def small(self) -> Case:
        return replace(
            self, num_copies=min(self.num_copies, 4), num_layers=2, num_kv_heads=2, head_size=16
        )

    def copies(self) -> list[tuple[int, int, int]]:
        choose = random.Random(0)
        blocks = choose.sample(range(self.num_blocks), 2 * self.num_copies)
        return [
            (source, destination, choose.randrange(1, self.block_size))
            for source, destination in zip(blocks[::2], blocks[1::2], strict=True)
        ]

    def caches(self, device: str) -> list[torch.Tensor]:
        """As vLLM allocates: one tensor, of which each layer has a view."""
        content = 2 * self.head_size
        sizes = dict(
            zip(
                "LBHNC",
                (self.num_layers, self.num_blocks, self.num_kv_heads, self.block_size, content),
                strict=True,
            )
        )
        raw = torch.empty(prod(sizes.values()), dtype=torch.bfloat16, device=device)
        for piece in raw.split(MAX_WORDS):
            piece.normal_()
        whole = raw.view([sizes[name] for name in self.layout])
        return list(whole.permute([self.layout.index(name) for name in "LBHNC"]))


CASES = (
    Case(1),
    Case(8),
    Case(64),
    Case(64, layout="LBHNC"),
    Case(64, layout="BLHNC"),
    Case(64, block_size=128),
    Case(64, num_layers=80),
    Case(256),
)


def least_bytes(case: Case) -> int:
    return 2 * sum(num_slots for *_, num_slots in case.copies()) * case.slot_bytes


def kernel_bytes(case: Case, tile_cells: int = 32) -> int:
    """With what its programs read first: the three numbers of a copy, the address of a layer."""
    num_tiles = -(-case.block_size * case.num_kv_heads // tile_cells)
    num_programs = case.num_copies * case.num_layers * num_tiles
    return least_bytes(case) + num_programs * (3 * 4 + 8)


def stock_bytes(case: Case) -> int:
    """Whole blocks: read, written to a temporary tensor, read, written."""
    return 4 * case.num_copies * case.block_size * case.slot_bytes


def measure(case: Case, has_cuda: bool) -> dict[str, Any]:
    from sgl_vllm.kernels import reference
    from sgl_vllm.kernels.slot_copy import SlotCopier

    run = case if has_cuda else case.small()
    caches = run.caches("cuda" if has_cuda else "cpu")
    copies = run.copies()
    expected = [cache.clone() for cache in caches]
    reference.copy_slots(expected, copies)
    copier = SlotCopier(caches)
    on_cpu = torch.tensor(copies, dtype=torch.int32)
    copier.copy(on_cpu)
    off = max(
        float((cache - wanted).abs().max()) for cache, wanted in zip(caches, expected, strict=True)
    )
    row: dict[str, Any] = {
        "case": case.name,
        **asdict(case),
        "least_bytes": least_bytes(case),
        "kernel_bytes": kernel_bytes(case),
        "stock_bytes": stock_bytes(case),
        "off": off,
    }
    if has_cuda:
        del expected
        row |= _times(run, copier, caches, copies, on_cpu)
    return row


def _times(
    case: Case,
    copier: Any,
    caches: list[torch.Tensor],
    copies: list[tuple[int, int, int]],
    on_cpu: torch.Tensor,
) -> dict[str, float]:
    from vllm.v1.core.kv_cache_utils import KVCacheBlockCopy
    from vllm.v1.worker.utils import copy_kv_cache_blocks_inplace

    whole = [KVCacheBlockCopy(source, destination) for source, destination, _ in copies]
    least = least_bytes(case)
    stock = partial(copy_kv_cache_blocks_inplace, caches, case.num_blocks, whole)
    kernel_ms = milliseconds(partial(copier.copy, on_cpu.cuda()))
    return {
        **times(partial(copier.copy, on_cpu), stock, least),
        "kernel_ms": kernel_ms,
        "gb_s": least / kernel_ms / 1e6,
    }


COLUMNS = (
    entry("case", "case"),
    LEAST,
    per_least("kernel", ".3f"),
    per_least("stock"),
    entry("off", "off", "g"),
    MS,
    entry("kernel ms", "kernel_ms", ".3f"),
    *AGAINST_STOCK,
)
