"""Small models with random weights whose layers read different parts of what precedes a token."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from sgl_vllm.demo import MODEL_PATH

_SLIDING, _FULL = "sliding_attention", "full_attention"

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": (
        "gemma3_text",
        {"head_dim": 32, "sliding_window": 64, "layer_types": [_SLIDING] * 3 + [_FULL]},
    ),
    # A token takes twice as many bytes in a window layer as in the other: blocks half as long.
    "gemma4": (
        "gemma4_text",
        {
            "head_dim": 32,
            "num_key_value_heads": 4,
            "global_head_dim": 64,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
            "sliding_window": 64,
            "layer_types": [_SLIDING] * 3 + [_FULL],
        },
    ),
    "gpt_oss": (
        "gpt_oss",
        {
            "head_dim": 32,
            "sliding_window": 64,
            "layer_types": [_SLIDING, _FULL] * 2,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    "llama4": (
        "llama4_text",
        {
            "head_dim": 32,
            "intermediate_size_mlp": 128,
            "attention_chunk_size": 64,
            "interleave_moe_layer_step": 0,
            "moe_layers": [],
            "no_rope_layers": [1, 1, 1, 0],
        },
    ),
}
"""By name: transformers' kind of model, and what its configuration has over `_COMMON`."""

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


ENGINE_ARGS: dict[str, dict[str, Any]] = {
    "gpt_oss": {"structured_outputs_config": {"enable_in_reasoning": True}}
}
"""vLLM gives gpt-oss a reasoning parser, and random weights never end their reasoning."""

TINY = {"gemma3": 52, "gemma4": 36, "gpt_oss": 31, "llama4": 48}
"""Blocks of the smallest caches: hardly more than what the longest request holds."""


def write_model(name: str, folder: Path) -> str:
    """Write a model, with the demo model's tokenizer, into a new folder. Returns its path."""
    return save(random_model(*CONFIGS[name]).to(torch.float32), folder)


def write_eagle_drafter(folder: Path, *, is_eagle3: bool = False) -> str:
    """Write a random EAGLE or EAGLE 3 drafter for any of these models, of one layer with full
    attention. Returns its path."""
    if folder.exists():
        return str(folder)
    model = random_model("llama", {"head_dim": 32, "num_hidden_layers": 1}).float()
    save(model, folder)
    file = folder / "model.safetensors"
    weights = load_file(file)
    size = model.config.hidden_size
    layer = {
        name.removeprefix("model."): weight
        for name, weight in weights.items()
        if name.startswith("model.layers") and (is_eagle3 or "input_layernorm" not in name)
    }
    if is_eagle3:
        for name in layer:
            if any(f"self_attn.{part}_proj" in name for part in "qkv"):  # reads embeddings, too
                layer[name] = torch.cat([layer[name], torch.randn_like(layer[name]) / size], dim=1)
        norm = {"layers.0.hidden_norm.weight": torch.ones(size), "norm.weight": torch.ones(size)}
        layer |= norm | {"lm_head.weight": weights["lm_head.weight"]}
        config = json.loads((folder / "config.json").read_text())
        config["eagle_aux_hidden_state_layer_ids"] = [1, 2, 3]
        (folder / "config.json").write_text(json.dumps(config))
    layer["fc.weight"] = torch.randn(size, (3 if is_eagle3 else 2) * size) / size
    save_file(layer, file, metadata={"format": "pt"})
    return str(folder)


def random_model(kind: str, more: dict[str, Any]) -> PreTrainedModel:
    """A model of transformers' `kind`, with `more` in its configuration over `_COMMON`."""
    demo = json.loads((MODEL_PATH / "config.json").read_text())
    special = {key: demo[key] for key in ("vocab_size", "bos_token_id", "eos_token_id")}
    config = AutoConfig.for_model(kind, **{**_COMMON, **special, "pad_token_id": 0, **more})
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    return model


def save(model: PreTrainedModel, folder: Path) -> str:
    """Write a model, with the demo model's tokenizer, into a new folder. Returns its path."""
    model.save_pretrained(folder)
    for file in _TOKENIZER:
        shutil.copy(MODEL_PATH / file, folder / file)
    return str(folder)
