"""The slot copy writes the matched slots of the named blocks, in all layers, and nothing else."""

from __future__ import annotations

import random
from collections.abc import Sequence
from math import prod

import pytest
import torch

from sgl_vllm.kernels import reference
from sgl_vllm.kernels.slot_copy import SlotCopier

LAYOUTS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
"""vLLM's: the order in memory of layers, blocks, heads, slots and content."""


def layers(
    layout: str = "LBNHC",
    num_layers: int = 3,
    num_blocks: int = 5,
    num_heads: int = 2,
    slots: int = 4,
    content: int = 16,
    dtype: torch.dtype = torch.bfloat16,
) -> list[torch.Tensor]:
    """Views [num_blocks, num_heads, slots, content] of one allocation, of different numbers."""
    sizes = dict(zip("LBHNC", (num_layers, num_blocks, num_heads, slots, content), strict=True))
    width = torch.empty((), dtype=dtype).element_size()
    num_bytes = prod(sizes.values()) * width
    generator = torch.Generator().manual_seed(0)
    raw = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=generator)
    whole = raw.view(dtype).view([sizes[name] for name in layout])
    return list(whole.permute([layout.index(name) for name in "LBHNC"]))


def bits(caches: Sequence[torch.Tensor]) -> torch.Tensor:
    """Random bits may be no numbers, and no number equals itself."""
    return torch.stack([cache.contiguous().view(torch.uint8) for cache in caches])


def check(
    caches: Sequence[torch.Tensor],
    copies: Sequence[tuple[int, int, int]],
    block_size: int | None = None,
) -> None:
    expected = [cache.clone() for cache in caches]
    reference.copy_slots(expected, copies, block_size)
    table = torch.tensor(copies, dtype=torch.int32).reshape(-1, 3)
    SlotCopier(caches, block_size).copy(table)
    assert torch.equal(bits(caches), bits(expected))


def test_keys_and_values_apart() -> None:
    """[2, num_blocks, slots, num_heads, head_size] of each layer, as some backends have had it."""
    caches = [torch.randn(2, 6, 4, 3, 8) for _ in range(2)]
    check([half.transpose(1, 2) for cache in caches for half in cache], [(0, 5, 3)])


def test_blocks_of_several_blocks_of_the_cache() -> None:
    for layout in ("LBHNC", "LBNHC"):
        check(layers(layout, num_blocks=6), [(0, 2, 7)], block_size=8)
        check(layers(layout, num_blocks=6), [(1, 0, 9)], block_size=12)


def test_layers_that_share_a_cache_are_copied_once() -> None:
    first, second = layers(num_layers=2)
    copier = SlotCopier([first, second, first])
    assert copier.slot_bytes == 2 * 2 * 16 * 2
    check([first, second, first], [(0, 1, 2)])


@pytest.mark.parametrize("seed", range(20))
def test_random_copies(seed: int) -> None:
    choose = random.Random(seed)
    num_blocks, slots = choose.randrange(4, 20), choose.choice([1, 3, 16, 48])
    caches = layers(
        choose.choice(LAYOUTS),
        num_layers=choose.randrange(1, 4),
        num_blocks=num_blocks,
        num_heads=choose.randrange(1, 5),
        slots=slots,
        content=choose.choice([3, 7, 8, 24, 32, 80]),
        dtype=choose.choice([torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int8]),
    )
    order = choose.sample(range(num_blocks), num_blocks)
    sources, destinations = order[: num_blocks // 2], order[num_blocks // 2 :]
    check(
        caches,
        [
            (choose.choice(sources), destination, choose.randrange(slots + 1))
            for destination in destinations
        ],
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ((layers(slots=8)[0],), "layer 3 has the shape"),
        ((layers("LBHNC")[0],), "layer 3 has the strides"),
        ((layers(dtype=torch.float16)[0],), "layer 3 has the type"),
    ],
)
def test_layers_that_are_not_alike_are_refused(
    change: tuple[torch.Tensor, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=f"{message}.*copy blocks layer by layer"):
        SlotCopier([*layers(), *change])


def test_what_is_no_cache_of_slots_is_refused() -> None:
    with pytest.raises(ValueError, match="no layer"):
        SlotCopier([])
    with pytest.raises(ValueError, match="num_blocks, num_heads, slots, content"):
        SlotCopier([torch.zeros(2, 3, 4)])
    with pytest.raises(ValueError, match="contiguous"):
        SlotCopier([torch.zeros(2, 3, 4, 5).transpose(2, 3)])
    with pytest.raises(ValueError, match="no blocks of 8 slots"):
        SlotCopier(layers(num_blocks=5), block_size=8)
    with pytest.raises(ValueError, match="no blocks of 6 slots"):
        SlotCopier(layers(), block_size=6)


@pytest.mark.parametrize(
    ("copies", "message"),
    [
        ([[0, 5, 1]], "not one of the 5"),
        ([[-1, 2, 1]], "not one of the 5"),
        ([[0, 1, 5]], "slots that a block of 4"),
        ([[0, 1, -1]], "slots that a block of 4"),
        ([[0, 1, 1], [2, 1, 1]], "write a block twice"),
        ([[0, 1, 1], [1, 2, 1]], "read a block that they also write"),
        ([[3, 3, 1]], "read a block that they also write"),
        ([[0, 1]], r"int32 \[num_copies, 3\]"),
    ],
)
def test_copies_that_cannot_be_are_refused(copies: list[list[int]], message: str) -> None:
    caches = layers()
    before = bits(caches)
    with pytest.raises(ValueError, match=message):
        SlotCopier(caches).copy(torch.tensor(copies, dtype=torch.int32))
    assert torch.equal(bits(caches), before)
