"""Layers of well-known models, grouped by vLLM: the groups, and whether the tree serves them.

The layers are written here by hand from the models' configurations, and the groups from what vLLM's
documentation says of hybrid models.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from vllm.config import VllmConfig
from vllm.v1.core.kv_cache_utils import get_kv_cache_groups
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from sgl_vllm.radix.layouts import why_refused

BF16_BYTES = 2


def attention(num_kv_heads: int, head_size: int, block_size: int = 16) -> dict[str, Any]:
    return {
        "block_size": block_size,
        "num_kv_heads": num_kv_heads,
        "head_size": head_size,
        "dtype": torch.bfloat16,
    }


def full(*sizes: int, **values: int) -> KVCacheSpec:
    return FullAttentionSpec(**attention(*sizes), **values)


def window(length: int, *sizes: int, **values: int) -> KVCacheSpec:
    return SlidingWindowSpec(**attention(*sizes), **values, sliding_window=length)


def chunk(length: int, *sizes: int) -> KVCacheSpec:
    return ChunkedLocalAttentionSpec(**attention(*sizes), attention_chunk_size=length)


def mla(block_size: int = 16) -> KVCacheSpec:
    """One latent vector of 512 numbers and 64 for the position."""
    return MLAAttentionSpec(**attention(1, 512 + 64, block_size))


def recurrent(*shapes: tuple[int, ...], block_size: int, page_size: int) -> KVCacheSpec:
    return MambaSpec(
        block_size=block_size,
        shapes=shapes,
        dtypes=(torch.bfloat16,) * len(shapes),
        page_size_padded=page_size,
        mamba_cache_mode="align",
    )


# A convolution over the last 3 inputs, and a state of 128 x 128 in each of 32 heads.
QWEN3_NEXT_STATE = ((3, 2 * 16 * 128 + 32 * 128), (32, 128, 128))
KIMI_LINEAR_STATE = ((3, 3 * 32 * 128), (32, 128, 128))


@dataclass(frozen=True)
class Model:
    """`groups` counts vLLM's by kind, number of layers and tokens per block."""

    name: str
    layers: list[KVCacheSpec]
    groups: dict[tuple[str, int, int], int]
    refused: str | None = None
    max_model_len: int = 1 << 20


MODELS = [
    Model("Llama 3.3 70B", [full(8, 128)] * 80, {("FullAttentionSpec", 80, 16): 1}),
    Model("DeepSeek V3", [mla()] * 61, {("MLAAttentionSpec", 61, 16): 1}),
    Model(
        "gpt-oss-120b",
        [window(128, 8, 64), full(8, 64)] * 18,
        {("SlidingWindowSpec", 18, 16): 1, ("FullAttentionSpec", 18, 16): 1},
    ),
    Model(
        "Gemma 3 27B",
        ([window(1024, 16, 128)] * 5 + [full(16, 128)]) * 10 + [window(1024, 16, 128)] * 2,
        {
            ("SlidingWindowSpec", 9, 16): 4,
            ("SlidingWindowSpec", 8, 16): 2,
            ("FullAttentionSpec", 10, 16): 1,
        },
    ),
    Model(
        "Llama 4 Scout",
        ([chunk(8192, 8, 128)] * 3 + [full(8, 128)]) * 12,
        {("ChunkedLocalAttentionSpec", 12, 16): 3, ("FullAttentionSpec", 12, 16): 1},
    ),
    Model(
        "Qwen3-Next",
        (
            [recurrent(*QWEN3_NEXT_STATE, block_size=544, page_size=544 * 4 * 256 * BF16_BYTES)] * 3
            + [full(2, 256, 544)]
        )
        * 12,
        {("MambaSpec", 12, 544): 3, ("FullAttentionSpec", 12, 544): 1},
    ),
    Model(
        "Gemma 4 31B",
        ([window(1024, 16, 256)] * 5 + [full(4, 512)]) * 10,
        {("SlidingWindowSpec", 10, 16): 5, ("FullAttentionSpec", 10, 32): 1},
    ),
    Model(
        "MiMo V2 Flash",
        [
            full(4, 192, head_size_v=128)
            if layer == 0 or layer % 6 == 5
            else window(128, 8, 192, head_size_v=128)
            for layer in range(48)
        ],
        {
            ("SlidingWindowSpec", 8, 16): 4,
            ("SlidingWindowSpec", 7, 16): 1,
            ("FullAttentionSpec", 9, 32): 1,
        },
    ),
    Model(
        "Kimi Linear",
        (
            [recurrent(*KIMI_LINEAR_STATE, block_size=1920, page_size=1920 * 576 * BF16_BYTES)] * 3
            + [mla(1920)]
        )
        * 6
        + [recurrent(*KIMI_LINEAR_STATE, block_size=1920, page_size=1920 * 576 * BF16_BYTES)] * 2
        + [mla(1920)],
        {("MambaSpec", 7, 1920): 2, ("MambaSpec", 6, 1920): 1, ("MLAAttentionSpec", 7, 1920): 1},
    ),
    Model(
        "Phi-4-mini",
        [window(262144, 8, 128)] * 32,
        {("SlidingWindowSpec", 32, 16): 1},
        max_model_len=131072,
    ),
    Model(
        "Mistral 7B v0.1",
        [window(4096, 8, 128)] * 32,
        {("SlidingWindowSpec", 32, 16): 1},
        "SlidingWindowSpec layers keep only the last tokens of a request",
        max_model_len=32768,
    ),
    Model(
        "Mistral 7B v0.1 with --max-model-len 4096",
        [window(4096, 8, 128)] * 32,
        {("SlidingWindowSpec", 32, 16): 1},
        max_model_len=4096,
    ),
]


@pytest.fixture(scope="module")
def vllm_config() -> VllmConfig:
    config = VllmConfig()
    config.cache_config.kv_cache_layout = "LBNHC"
    return config


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_the_layers_of_a_real_model_are_grouped_and_judged(vllm_config, model):
    layers = {f"layers.{number}": spec for number, spec in enumerate(model.layers)}
    groups = get_kv_cache_groups(vllm_config, layers)
    found = Counter(
        (type(group.kv_cache_spec).__name__, len(group.layer_names), group.kv_cache_spec.block_size)
        for group in groups
    )
    assert found == model.groups
    config = KVCacheConfig(num_blocks=10, kv_cache_tensors=[], kv_cache_groups=groups)
    assert why_refused(config, model.max_model_len) == model.refused
