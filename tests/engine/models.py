"""Small models with random weights, one for every layout of KV caches that vLLM runs on a CPU, and
the settings that fit each.

Layers with windows or chunks, linear attention, Mamba-2, MLA, and layers for multi-token
prediction (MTP), which draft. An MTP layer takes the model's last hidden state and the next token's
embedding. Here it is a copy of the last layer, fed with little of the hidden state, and the layer
before that adds little to an embedding. So drafts are often right, and depend on the layer's own KV
cache.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import vllm
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from sgl_vllm.demo import MODEL_PATH
from sgl_vllm.vllm_api.versions import release_of
from tests.engine.cpu_patches import (
    allow_prefix_caching,
    compute_delta_rule_by_token,
    let_mamba2_keep_states,
)
from tests.engine.engine import Engine
from tests.engine.play import LOGPROB_TOLERANCE, NEAR_TIE
from tests.engine.programs import MAX_MODEL_LEN

MLA_BLOCK_SIZE = 16
"""The only one of vLLM's reference backend, as 512 and 64 are the only sizes of latent vectors."""

MTP_LAYERS = 2
"""Layers of a model for MTP. The one of MTP comes after them."""

LAST_NORM = 5.0
"""Makes next tokens about as clear as in a real model."""
HIDDEN_SHARE = 0.15
"""How long hidden states are in the MTP layer, beside an embedding."""
FIRST_SHARE = 0.2
"""How much the first layer of a model for MTP adds, beside the second."""
RECURRENT_SHARE = 8.0
"""Makes the recurrent layers matter: with random weights they would add little to what the layers
before them pass on, and a wrong state would go unnoticed."""

BFLOAT16_STEP = 0.006
"""The step between neighbors in bfloat16 is 0.004 at the size of the logits."""
BFLOAT16_TOLERANCE = 0.024
"""Of log-probabilities, in many requests: stock is as far from itself where it computes a prompt of
186 tokens in chunks of 122, and in one pass."""

_SLIDING, _FULL = "sliding_attention", "full_attention"
_COMMON = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
_MLA: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
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
_MTP: dict[str, Any] = {
    "num_hidden_layers": MTP_LAYERS,
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


def random_model(kind: str, more: Mapping[str, Any]) -> PreTrainedModel:
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
    for file in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        shutil.copy(MODEL_PATH / file, folder / file)
    return str(folder)


def _let_recurrent_layers_matter(model: PreTrainedModel) -> None:
    """Without the fixed values of Mamba-2, a state would by chance forget within a few tokens, or
    what goes around it would outweigh it, and a wrong one would go unnoticed."""
    for name, parameter in model.named_parameters():
        if "linear_attn.out_proj" in name or "mamba.out_proj" in name:
            parameter *= RECURRENT_SHARE
        if "mamba" in name and name.endswith((".A_log", ".D")):
            parameter.fill_(-5.0 if name.endswith(".A_log") else 0.05)


def _draw_clear(model: PreTrainedModel) -> None:
    """Weights of models with MLA or MTP."""
    generator, is_mtp = torch.Generator().manual_seed(0), model.config.num_hidden_layers == 2
    for name, weight in model.named_parameters():
        if name.endswith((".A_log", ".dt_bias")):
            continue
        if weight.dim() == 1:
            weight.fill_(LAST_NORM if name == "model.norm.weight" else 1.0)
            if model.config.model_type == "qwen3_next" and "linear_attn" not in name:
                weight.sub_(1.0)  # it is added to 1
            continue
        spread = 1.0 if is_mtp and "embed_tokens" in name else weight.shape[-1] ** -0.5
        weight.normal_(0.0, spread, generator=generator)
        if is_mtp and "layers.0." in name and ("o_proj" in name or "down_proj" in name):
            weight.mul_(FIRST_SHARE)


def _add_mtp_layer(folder: Path, kind: str, hidden: int) -> None:
    """Its parts have the names by which vLLM looks for them."""
    file = folder / "model.safetensors"
    weights = load_file(file)
    last, mtp = f"model.layers.{MTP_LAYERS - 1}.", f"model.layers.{MTP_LAYERS}."
    norm = weights["model.norm.weight"]
    projection = torch.cat([torch.eye(hidden), HIDDEN_SHARE * torch.eye(hidden)], dim=1)
    if kind in ("exaone_moe", "qwen3_next"):
        mtp = "mtp.layers.0."
        one = torch.full([hidden], float(kind == "exaone_moe"))  # Qwen3-Next adds 1 to it
        added = {
            "mtp.pre_fc_norm_embedding.weight": one.clone(),
            "mtp.pre_fc_norm_hidden.weight": one.clone(),
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


@dataclass(frozen=True)
class Model:
    """A model, and what its engines may be given.

    Attributes:
        kind: as transformers names it; empty for the demo model.
        config: over `_COMMON`.
        change_weights: after they were drawn.
        patch: what vLLM lacks to run it here.
        engine_args: of every engine of the model.
        block_sizes: to choose from.
        fewest_blocks: of a cache that holds hardly more than the longest request of a program, with
            blocks of 32 tokens and the smallest chunks, one of vLLM's own included; None: what that
            request holds in one group.
        chunk_sizes: of prefill, to choose from.
        is_always_chunked: whether prompts are never computed whole. With windows, a longer chunk
            takes more blocks.
        tolerance: of log-probabilities.
        near_tie: answers may part where two logits are as near.
        since: the vLLM that can run it.
    """

    kind: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    change_weights: Callable[[PreTrainedModel], None] | None = None
    patch: Callable[[pytest.MonkeyPatch], None] | None = None
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    block_sizes: tuple[int, ...] = (32,)
    fewest_blocks: int | None = None
    chunk_sizes: tuple[int, ...] = (48, 96)
    is_always_chunked: bool = True
    tolerance: float = LOGPROB_TOLERANCE
    near_tie: float = NEAR_TIE
    since: tuple[int, int] = (0, 31)

    def num_fewest_blocks(self, block_size: int) -> int:
        if self.fewest_blocks is not None:
            return self.fewest_blocks
        return MAX_MODEL_LEN // block_size + 1

    def prepare(self, folder: Path, patch: pytest.MonkeyPatch) -> dict[str, Any]:
        """Write the model into a new folder, which takes about a second, and patch what vLLM lacks
        to run it. Returns the arguments of its engines. Skips the test if vLLM cannot run it."""
        if release_of(vllm.__version__) < self.since:
            pytest.skip(f"vLLM {vllm.__version__} cannot run it on a CPU")
        if self.patch is not None:
            self.patch(patch)
        if not self.kind:
            return dict(self.engine_args)
        model = random_model(self.kind, self.config)
        if self.change_weights is not None:
            with torch.no_grad():
                self.change_weights(model)
        path = save(model.to(getattr(torch, self.engine_args.get("dtype", "float32"))), folder)
        if "num_nextn_predict_layers" in self.config:
            _add_mtp_layer(folder, self.kind, model.config.hidden_size)
        return {"model": path, **self.engine_args}


def _windows(kind: str, fewest_blocks: int, config: dict[str, Any], **engine_args: Any) -> Model:
    return Model(
        kind, {"head_dim": 32, **config}, fewest_blocks=fewest_blocks, engine_args=engine_args
    )


def _recurrent(kind: str, config: dict[str, Any], block_size: int, **more: Any) -> Model:
    """Of blocks of `block_size` tokens, as vLLM sets it so that a state fits."""
    engine_args = {
        # On CPUs with AVX-512 BF16 vLLM keeps linear attention's states so in any case. Their size
        # is that of a block.
        "mamba_ssm_cache_dtype": "float32",
        "enable_prefix_caching": True,
        "dtype": "bfloat16" if "tolerance" in more else "float32",
    }
    sizes: dict[str, Any] = {"chunk_sizes": (block_size + 16, 1024), "engine_args": engine_args}
    more.setdefault("change_weights", _let_recurrent_layers_matter)
    return Model(kind, config, **sizes, **more)


def _qwen3_next(config: dict[str, Any], **more: Any) -> Model:
    layers = {
        "head_dim": 32,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
    }
    more |= {"near_tie": BFLOAT16_STEP, "tolerance": BFLOAT16_TOLERANCE}
    return _recurrent("qwen3_next", {**layers, **config}, 544, fewest_blocks=20, **more)


def _mtp(kind: str, fewest_blocks: int, config: dict[str, Any], **more: Any) -> Model:
    more |= {"fewest_blocks": fewest_blocks, "patch": allow_prefix_caching}
    return Model(kind, {**_MTP, **config}, _draw_clear, **more)


_OF_MLA: dict[str, Any] = {
    "block_sizes": (MLA_BLOCK_SIZE,),
    # The backend that computes in float32.
    "engine_args": {"block_size": MLA_BLOCK_SIZE, "attention_backend": "CPU_MLA"},
}
WINDOWS = ("gemma3", "gemma4", "gpt_oss", "llama4")
MTP = ("glm4_moe", "deepseek_v3", "exaone_moe")
MODELS: dict[str, Model] = {
    "demo": Model(
        block_sizes=(32, 32, 64, 128), chunk_sizes=(48, 64, 128, 256, 1024), is_always_chunked=False
    ),
    "gemma3": _windows(
        "gemma3_text", 52, {"sliding_window": 64, "layer_types": [_SLIDING] * 3 + [_FULL]}
    ),
    "mistral": _windows("mistral", 8, {"sliding_window": 64}),
    # A token takes twice as many bytes in a window layer as in the other: blocks half as long.
    "gemma4": _windows(
        "gemma4_text",
        36,
        {
            "num_key_value_heads": 4,
            "global_head_dim": 64,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
            "sliding_window": 64,
            "layer_types": [_SLIDING] * 3 + [_FULL],
        },
    ),
    "gpt_oss": _windows(
        "gpt_oss",
        31,
        {
            "sliding_window": 64,
            "layer_types": [_SLIDING, _FULL] * 2,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
        # vLLM gives it a reasoning parser, and random weights never end their reasoning.
        structured_outputs_config={"enable_in_reasoning": True},
    ),
    "llama4": _windows(
        "llama4_text",
        48,
        {
            "intermediate_size_mlp": 128,
            "attention_chunk_size": 64,
            "interleave_moe_layer_step": 0,
            "moe_layers": [],
            "no_rope_layers": [1, 1, 1, 0],
        },
    ),
    # Gated delta rule (linear attention).
    "qwen3_next": _qwen3_next({"num_experts": 4}),
    "qwen3_next_mtp": _qwen3_next(
        {**_MTP, "num_experts": 2, "layer_types": ["linear_attention", _FULL]},
        change_weights=_draw_clear,
        patch=compute_delta_rule_by_token,
    ),
    # Mamba-2, as Granite 4 and Nemotron-H have it.
    "granite4": _recurrent(
        "granitemoehybrid",
        {
            "layer_types": ["mamba"] * 3 + ["attention"],
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "num_local_experts": 0,
            "shared_intermediate_size": 128,
            "mamba_n_heads": 4,
            "mamba_d_head": 32,
            "mamba_n_groups": 1,
            "mamba_d_state": 32,
            "mamba_expand": 2,
            "mamba_chunk_size": 16,
        },
        block_size=96,
        fewest_blocks=26,
        patch=let_mamba2_keep_states,
        since=(0, 32),  # before, there is no CPU kernel for Mamba-2 in float32
    ),
    "deepseek_v2": Model(
        "deepseek_v2",
        # No experts: a choice of them would turn rounding into other texts.
        {**_MLA, "first_k_dense_replace": 4, "max_position_embeddings": 8192},
        _draw_clear,
        allow_prefix_caching,
        chunk_sizes=(48, 64, 128, 256, 1024),
        is_always_chunked=False,
        **_OF_MLA,
    ),
    "glm4_moe": _mtp("glm4_moe", 27, {**_WITH_EXPERTS, "num_key_value_heads": 2, "head_dim": 32}),
    "deepseek_v3": _mtp(
        "deepseek_v3",
        54,
        {**_WITH_EXPERTS, **_MLA, "topk_method": "noaux_tc", "scoring_func": "sigmoid"},
        **_OF_MLA,
    ),
    "exaone_moe": _mtp(
        "exaone_moe",
        45,
        {
            "num_key_value_heads": 2,
            "head_dim": 32,
            "mlp_layer_types": ["dense"] * MTP_LAYERS,  # as is its MTP layer
            "sliding_window": 64,
            "layer_types": [_FULL, _SLIDING],
            "mtp_layer_types": [_SLIDING],
        },
        since=(0, 32),  # before, its windows cannot be read
    ),
}


@contextmanager
def starting(
    name: str, start: Callable[..., Engine], folder: Path
) -> Iterator[Callable[..., Engine]]:
    """`start`, the fixture, for a model that is written into `folder`."""
    with pytest.MonkeyPatch.context() as patch:
        engine_args = MODELS[name].prepare(folder / name, patch)
        yield lambda plugin=None, **more: start(plugin, **{**engine_args, **more})
