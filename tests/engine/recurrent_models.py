"""Small models with random weights, some of whose layers are recurrent."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from sgl_vllm.demo import MODEL_PATH

_LINEAR = {
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_next": (
        "qwen3_next",
        {
            **_LINEAR,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 64,
        },
    ),
}
"""By name: transformers' kind of model, and what its configuration has beside `_COMMON`."""

_COMMON = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")

DTYPE = "bfloat16"
"""vLLM's CPU kernels of linear attention take no other."""

RECURRENT_SHARE = 8.0
"""Makes the recurrent layers matter: with random weights they would add little to what the layers
before them pass on, and a wrong state would go unnoticed."""


def write_model(name: str, folder: Path) -> str:
    """Write a model, with the demo model's tokenizer, into a new folder. Returns its path."""
    demo = json.loads((MODEL_PATH / "config.json").read_text())
    special = {key: demo[key] for key in ("vocab_size", "bos_token_id", "eos_token_id")}
    kind, more = CONFIGS[name]
    config = AutoConfig.for_model(kind, **_COMMON, **special, pad_token_id=0, **more)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "linear_attn.out_proj" in parameter_name:
                parameter *= RECURRENT_SHARE
    model.to(torch.bfloat16).save_pretrained(folder)
    for file in _TOKENIZER:
        shutil.copy(MODEL_PATH / file, folder / file)
    return str(folder)
