"""vLLM's copies of blocks, on caches that it has allocated for layers of several groups."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from vllm.config import VllmConfig
from vllm.v1.core.kv_cache_utils import (
    KVCacheBlockCopy,
    get_kv_cache_config_from_groups,
    get_kv_cache_groups,
)
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache, copy_kv_cache_blocks_inplace

from sgl_vllm.radix.whole_copies import copy_whole_blocks

BLOCK_SIZE, KERNEL_BLOCK_SIZE = 128, 64
LAYOUT = "LBNHC"
"""One in which each layer has its own part of the memory, as by vLLM's default."""

MLA = MLAAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
HEADS = FullAttentionSpec(
    block_size=BLOCK_SIZE, num_kv_heads=2, head_size=128, dtype=torch.bfloat16
)


def states(page_size: int) -> KVCacheSpec:
    """States that fill nine tenths of a page."""
    num_numbers = page_size * 9 // 10 // 4
    return MambaSpec(
        block_size=BLOCK_SIZE,
        shapes=((num_numbers,),),
        dtypes=(torch.float32,),
        page_size_padded=page_size,
        mamba_cache_mode="align",
    )


def by_layer(names: list[str]) -> list[str]:
    """The order in which vLLM's V1 runner copies. The V2 runner copies by group."""
    return sorted(names, key=lambda name: int(name.split(".")[1]))


class Caches:
    """Caches full of random bytes, of layers of which three in four are recurrent."""

    def __init__(self, attention: MLAAttentionSpec | FullAttentionSpec) -> None:
        layers = [*[states(attention.page_size_bytes)] * 3, attention] * 2
        config = VllmConfig()
        config.cache_config.kv_cache_layout = LAYOUT
        by_name = {f"layers.{number}": spec for number, spec in enumerate(layers)}
        groups = get_kv_cache_groups(config, by_name)
        self.config: KVCacheConfig = get_kv_cache_config_from_groups(config, groups, 4 << 20)
        kernel_block_sizes = [
            BLOCK_SIZE if isinstance(group.kv_cache_spec, MambaSpec) else KERNEL_BLOCK_SIZE
            for group in groups
        ]
        device = torch.device("cpu")
        self.by_layer = allocate_kv_cache(
            self.config, device, KVCacheLayout[LAYOUT], kernel_block_sizes
        )
        for number, cache in enumerate(self.by_layer.values()):
            generator = torch.Generator().manual_seed(number)
            cache.copy_(torch.randn(cache.shape, generator=generator) * 100)

    def pages(self) -> dict[str, list[bytes]]:
        """What each layer reads of each block."""
        return {
            name: [
                page.contiguous().view(torch.uint8).numpy().tobytes()
                for page in cache.unflatten(0, (self.config.num_blocks, -1))
            ]
            for name, cache in self.by_layer.items()
        }


@pytest.mark.parametrize("order", [list, by_layer])
@pytest.mark.parametrize("attention", [MLA, HEADS], ids=["MLA", "heads"])
@pytest.mark.parametrize("is_in_use", [True, False])
def test_every_layer_gets_the_whole_block(attention, order, is_in_use):
    """vLLM alone leaves out the last tokens. Once it does not, `copy_whole_blocks` can go."""
    caches = Caches(attention)
    names = order([*caches.by_layer])
    runner = SimpleNamespace(kv_caches=[caches.by_layer[name] for name in names])
    runner.update_requests = None
    if is_in_use:
        worker: Any = SimpleNamespace(model_runner=runner)
        copy_whole_blocks(worker)
    before = caches.pages()
    copies = [KVCacheBlockCopy(1, 2), KVCacheBlockCopy(3, 4)]
    copy_kv_cache_blocks_inplace(runner.kv_caches, caches.config.num_blocks, copies)
    sources = {copy.dst_block_id: copy.src_block_id for copy in copies}
    wanted = {
        name: [pages[sources.get(number, number)] for number in range(len(pages))]
        for name, pages in before.items()
    }
    assert (caches.pages() == wanted) == is_in_use
