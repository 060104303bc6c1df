"""A DeepSeek V2 of four layers with random weights, and what vLLM lacks to cache its prefixes here.

MLA keeps one latent vector per token instead of a key and a value for each head. On a CPU without
AMX, vLLM switches prefix caching and chunked prefill off for such models, though its reference
backend computes both.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig
from vllm.platforms.cpu import CpuPlatform

from tests.engine.window_models import random_model, save

BLOCK_SIZE = 16
"""The only one of the reference backend, as 512 and 64 are the only sizes of latent vectors."""

CONFIG: dict[str, Any] = {
    "first_k_dense_replace": 4,  # no experts: a choice of them would turn rounding into other texts
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
    "max_position_embeddings": 8192,
    # As in DeepSeek V2. With the default type, vLLM's CPU kernel rotates parts of other tokens: it
    # takes for contiguous what is a part of each head (seen in vLLM 0.32).
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 2.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
    },
}

LAST_NORM = 5.0
"""Makes next tokens about as clear as in a real model."""


def engine_args(model: Path) -> dict[str, Any]:
    """Of an engine for the model, with the backend that computes in float32."""
    return {"model": str(model), "block_size": BLOCK_SIZE, "attention_backend": "CPU_MLA"}


def write_model(folder: Path) -> Path:
    """Write the model, with the demo model's tokenizer, into a new folder. Takes about a second."""
    model = random_model("deepseek_v2", CONFIG)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 1:
                weight.fill_(LAST_NORM if name == "model.norm.weight" else 1.0)
            else:
                weight.normal_(0.0, weight.shape[1] ** -0.5, generator=generator)
    save(model, folder)
    return folder


def allow_prefix_caching(patch: pytest.MonkeyPatch) -> None:
    """From now on engines of this process cache prefixes and prefill in chunks if they are asked
    to, whatever their model."""
    configure = CpuPlatform.check_and_update_config.__func__

    def and_keep(cls: type[CpuPlatform], config: VllmConfig) -> None:
        scheduling = config.scheduler_config
        is_caching = config.cache_config.enable_prefix_caching
        is_chunked = scheduling.enable_chunked_prefill
        max_num_batched_tokens = scheduling.max_num_batched_tokens
        configure(cls, config)
        config.cache_config.enable_prefix_caching = is_caching
        scheduling.enable_chunked_prefill = is_chunked
        scheduling.max_num_batched_tokens = max_num_batched_tokens

    patch.setattr(CpuPlatform, "check_and_update_config", classmethod(and_keep))
