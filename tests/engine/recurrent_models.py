"""A small model with random weights, three of whose four layers are recurrent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.engine.window_models import random_model, save

QWEN3_NEXT: dict[str, Any] = {
    "head_dim": 32,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
}

DTYPE = "bfloat16"
"""vLLM's CPU kernels of linear attention take no other."""

ROUNDING = 0.006
"""How far logits may be off: the step between neighbors in bfloat16 is 0.004 there."""

RECURRENT_SHARE = 8.0
"""Makes the recurrent layers matter: with random weights they would add little to what the layers
before them pass on, and a wrong state would go unnoticed."""


def engine_args(model: str) -> dict[str, Any]:
    """Of an engine for the model, with a cache of prefixes."""
    return {
        "model": model,
        "dtype": DTYPE,
        # On CPUs with AVX-512 BF16 vLLM keeps states so in any case. Their size is that of a block.
        "mamba_ssm_cache_dtype": "float32",
        "enable_prefix_caching": True,
    }


def write_qwen3_next(folder: Path) -> str:
    """Write the model, with the demo model's tokenizer, into a new folder. Returns its path."""
    model = random_model("qwen3_next", QWEN3_NEXT)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "linear_attn.out_proj" in name:
                parameter *= RECURRENT_SHARE
    return save(model.to(torch.bfloat16), folder)
