"""Small models with random weights and a layer for multi-token prediction (MTP), which drafts.

An MTP layer takes the model's last hidden state and the next token's embedding. In these models it
is a copy of the last layer, fed with little of the hidden state, and the layer before that adds
little to an embedding. So drafts are often right, and depend on the layer's own KV cache.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.engine import mla_model
from tests.engine.window_models import random_model, save

NUM_LAYERS = 2
"""Of the model. The one of MTP comes after them."""

HIDDEN_SHARE = 0.15
"""How long hidden states are in the MTP layer, beside an embedding."""

FIRST_SHARE = 0.2
"""How much the first layer adds, beside the second."""

_COMMON: dict[str, Any] = {
    "num_hidden_layers": NUM_LAYERS,
    "max_position_embeddings": 8192,
    "num_nextn_predict_layers": 1,
}
_WITH_EXPERTS: dict[str, Any] = {
    # vLLM's MTP layers have experts. All of them compute each token: a choice would turn rounding
    # into other texts.
    "first_k_dense_replace": 1,
    "n_routed_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "n_group": 1,
    "topk_group": 1,
}
_OF_MLA = (
    "num_key_value_heads",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "rope_parameters",
)
CONFIGS: dict[str, dict[str, Any]] = {
    "glm4_moe": {**_WITH_EXPERTS, "num_key_value_heads": 2, "head_dim": 32},
    "deepseek_v3": {
        **_WITH_EXPERTS,
        **{name: mla_model.CONFIG[name] for name in _OF_MLA},
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
    },
    "exaone_moe": {
        "num_key_value_heads": 2,
        "head_dim": 32,
        "mlp_layer_types": ["dense"] * NUM_LAYERS,  # as is its MTP layer
        "sliding_window": 64,
        "layer_types": ["full_attention", "sliding_attention"],
        "mtp_layer_types": ["sliding_attention"],
    },
}
"""By transformers' kind of model: what its configuration has over `_COMMON`."""


TINY = {"glm4_moe": 27, "deepseek_v3": 54, "exaone_moe": 45}
"""Blocks of a cache that holds hardly more than the longest request, if its prompt is computed in
chunks."""


def engine_args(kind: str, model: Path) -> dict[str, Any]:
    """Of an engine for the model."""
    return mla_model.engine_args(model) if kind == "deepseek_v3" else {"model": str(model)}


def write_model(kind: str, folder: Path) -> Path:
    """Write a model, with the demo model's tokenizer, into a new folder. Takes about a second."""
    model = random_model(kind, {**_COMMON, **CONFIGS[kind]})
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 1:
                weight.fill_(mla_model.LAST_NORM if name == "model.norm.weight" else 1.0)
            else:
                spread = 1.0 if "embed_tokens" in name else weight.shape[-1] ** -0.5
                weight.normal_(0.0, spread, generator=generator)
                if "layers.0." in name and ("o_proj" in name or "down_proj" in name):
                    weight.mul_(FIRST_SHARE)
    save(model, folder)
    _add_mtp_layer(folder, kind, model.config.hidden_size)
    return folder


def _add_mtp_layer(folder: Path, kind: str, hidden: int) -> None:
    """Its parts have the names by which vLLM looks for them."""
    file = folder / "model.safetensors"
    weights = load_file(file)
    last, mtp = f"model.layers.{NUM_LAYERS - 1}.", f"model.layers.{NUM_LAYERS}."
    norm = weights["model.norm.weight"]
    projection = torch.cat([torch.eye(hidden), HIDDEN_SHARE * torch.eye(hidden)], dim=1)
    if kind == "exaone_moe":
        mtp = "mtp.layers.0."
        added = {
            "mtp.pre_fc_norm_embedding.weight": torch.ones(hidden),
            "mtp.pre_fc_norm_hidden.weight": torch.ones(hidden),
            "mtp.fc.weight": projection,
            "mtp.norm.weight": norm.clone(),
        }
    else:
        added = {
            f"{mtp}enorm.weight": torch.ones(hidden),
            f"{mtp}hnorm.weight": torch.ones(hidden),
            f"{mtp}eh_proj.weight": projection,
            f"{mtp}shared_head.norm.weight": norm.clone(),
            f"{mtp}shared_head.head.weight": weights["lm_head.weight"].clone(),
            f"{mtp}embed_tokens.weight": weights["model.embed_tokens.weight"].clone(),
        }
    added |= {
        f"{mtp}{name.removeprefix(last)}": weight.clone()
        for name, weight in weights.items()
        if name.startswith(last)
    }
    save_file(weights | added, file, metadata={"format": "pt"})
