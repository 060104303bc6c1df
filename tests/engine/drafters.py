"""Speculative decoding for tests: configurations of vLLM, and drafters made of the demo model.

An EAGLE drafter takes the model's hidden state and the next token's embedding. The one made here
ignores the hidden state and runs the model's own layers over the embeddings, so its drafts are
often right, and they depend on its KV cache as much as the model's tokens do on the model's.

An EAGLE 3 drafter takes the hidden states of several of the model's layers. They are what its
layers add to, and its first layer reads the embedding beside them: here that layer's attention does
no more than add the embedding of the token it is at. Then come the model's own layers. The hidden
states are made small, so they spoil some drafts and leave most as they are.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from vllm.v1.core.sched.output import GrammarOutput
from vllm.v1.engine.output_processor import OutputProcessor

from sgl_vllm.demo import MODEL_PATH
from tests.engine import window_models
from tests.engine.engine import Engine
from tests.engine.programs import Call, Phase, Program
from tests.platforms.platform import Platform

NUM_DRAFTS = 3

HIDDEN_SHARE = 0.3
"""How long hidden states are in the EAGLE 3 drafter, beside an embedding."""

SHARPNESS = 12.0
"""Of its first layer's attention: what keys and queries consist of."""

CUTS_AT_STOP_TEXTS = hasattr(OutputProcessor, "_trim_surplus_tokens")
"""Whether an answer ends at a stop text, and not with the drafts accepted after it. Since vLLM
0.32."""

MASKS_AFTER_DRAFTS = hasattr(GrammarOutput, "num_acceptable_drafts")
"""Whether a draft can only be accepted if what follows it is masked. vLLM 0.31 leaves it unmasked
with asynchronous scheduling, if no step is in flight."""


def why_it_cannot_run(method: str, platform: Platform) -> str | None:
    """Why vLLM cannot run a method of `speculation` on a CPU with this platform; None if it can."""
    if method == "ngram" and platform.is_async and not platform.uses_v2_runner:
        return (
            "vLLM schedules n-grams asynchronously with the method ngram_gpu only, whose drafter "
            "for the V1 runner pins memory, which needs a GPU"
        )
    if method == "mtp" and platform.is_async and not platform.uses_v2_runner:
        return (
            "when a request with a penalty joins, vLLM's V1 runner loses count of the tokens that "
            "are in flight, and asserts where a request fills the context; stock does so too"
        )
    return None


def speculation(
    method: str, folder: Path, *, model: str = "demo", is_async: bool = False
) -> dict[str, Any]:
    """vLLM's `speculative_config` for a method; a drafter's weights are written to `folder`.

    Args:
        model: one of `soak_models.MODELS`. EAGLE's drafter for the demo model is often right; for
            the others it is random, and hardly ever.
        is_async: whether the engine schedules asynchronously, for which n-grams have a method of
            their own.
    """
    drafts = {"method": method, "num_speculative_tokens": NUM_DRAFTS}
    if method == "ngram":
        name = "ngram_gpu" if is_async else "ngram"
        return drafts | {"method": name, "prompt_lookup_min": 1, "prompt_lookup_max": 4}
    if method == "mtp":  # a drafter does not take over the model's backend
        return drafts | ({"attention_backend": "CPU_MLA"} if model == "deepseek_v3" else {})
    if method == "draft_model":  # the model drafts for itself
        return drafts | {"model": str(MODEL_PATH)}
    if model != "demo":
        path = window_models.write_eagle_drafter(folder / method, is_eagle3=method == "eagle3")
        return drafts | {"model": path}
    write = {"eagle": write_eagle_drafter, "eagle3": write_eagle3_drafter}[method]
    return drafts | {"model": str(write(folder / method))}


@contextmanager
def counting_drafts(engine: Engine) -> Iterator[Counter[str]]:
    """Counts the drafts that the model has verified, and those that it has accepted."""
    counts: Counter[str] = Counter()
    scheduler = engine.scheduler
    make_stats = scheduler.make_spec_decoding_stats

    def counted(*args: Any, **kwargs: Any) -> Any:
        counts["drafts"] += kwargs["num_draft_tokens"]
        counts["accepted"] += kwargs["num_accepted_tokens"]
        return make_stats(*args, **kwargs)

    scheduler.make_spec_decoding_stats = counted
    try:
        yield counts
    finally:
        del scheduler.make_spec_decoding_stats  # the class has it


def write_eagle_drafter(folder: Path) -> Path:
    """Write an EAGLE drafter for the demo model into a new folder."""
    weights = load_file(MODEL_PATH / "model.safetensors")
    # EAGLE has no norm before its first layer. All embeddings are about as long as the median one,
    # so dividing by that does nearly what the norm does.
    norm = weights["model.layers.0.input_layernorm.weight"].float() / _median_scale(weights)
    drafter = {}
    for name, weight in weights.items():
        if not name.startswith("model.layers.") or name.endswith("layers.0.input_layernorm.weight"):
            continue
        if any(f"layers.0.self_attn.{part}_proj" in name for part in "qkv"):
            weight = weight.float() * norm
        drafter[name.removeprefix("model.")] = weight
    hidden = len(norm)
    drafter["fc.weight"] = torch.cat([torch.eye(hidden), torch.zeros(hidden, hidden)], dim=1)
    return _write_drafter(folder, drafter, {})


def write_eagle3_drafter(folder: Path) -> Path:
    """Write an EAGLE 3 drafter for the demo model into a new folder."""
    weights = load_file(MODEL_PATH / "model.safetensors")
    config = json.loads((MODEL_PATH / "config.json").read_text())
    hidden, num_heads = config["hidden_size"], config["num_attention_heads"]
    drafter = {
        "fc.weight": torch.cat([torch.eye(hidden) / 3] * 3, dim=1),
        "norm.weight": weights["model.norm.weight"],
        "lm_head.weight": weights["model.embed_tokens.weight"],
        **_layer_that_adds_embeddings(config, float(_median_scale(weights))),
    }
    for name, weight in weights.items():
        if not name.startswith("model.layers."):
            continue
        number, rest = name.removeprefix("model.layers.").split(".", 1)
        part = f"layers.{int(number) + 1}.{rest}"
        if rest in ("self_attn.k_proj.weight", "self_attn.v_proj.weight"):
            heads = weight.reshape(-1, config["head_dim"], hidden)
            repeated = heads.repeat_interleave(num_heads // len(heads), dim=0)
            weight = repeated.reshape(hidden, hidden)
        drafter[part] = weight
        if rest.startswith("self_attn"):
            drafter[f"{part.removesuffix('weight')}bias"] = torch.zeros(hidden)
    changes = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": config["num_hidden_layers"] + 1,
        # As many values as there are dimensions, so that attention can pass an embedding on.
        "num_key_value_heads": num_heads,
        "attention_bias": True,
        "norm_before_residual": True,
        "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
        "draft_vocab_size": config["vocab_size"],
    }
    return _write_drafter(folder, drafter, changes)


def _layer_that_adds_embeddings(config: Mapping[str, Any], scale: float) -> dict[str, torch.Tensor]:
    """An EAGLE 3 drafter's first layer. Its output is the hidden state, made small, plus the
    embedding. Both are about as long as `scale` says."""
    hidden, mlp = config["hidden_size"], config["intermediate_size"]
    none, nothing = torch.zeros(hidden), torch.zeros(hidden, 2 * hidden)
    layer = {
        "hidden_norm.weight": torch.full((hidden,), HIDDEN_SHARE * scale),
        "input_layernorm.weight": torch.full((hidden,), scale),
        "post_attention_layernorm.weight": torch.ones(hidden),
        # Equal queries and keys: rotated, they fit only where they are at the same token.
        "self_attn.q_proj.weight": nothing,
        "self_attn.q_proj.bias": none + SHARPNESS,
        "self_attn.k_proj.weight": nothing,
        "self_attn.k_proj.bias": none + SHARPNESS,
        "self_attn.v_proj.weight": torch.eye(hidden, 2 * hidden),
        "self_attn.v_proj.bias": none,
        "self_attn.o_proj.weight": torch.eye(hidden),
        "self_attn.o_proj.bias": none,
        "mlp.gate_proj.weight": torch.zeros(mlp, hidden),
        "mlp.up_proj.weight": torch.zeros(mlp, hidden),
        "mlp.down_proj.weight": torch.zeros(hidden, mlp),
    }
    return {f"midlayer.{name}": weight for name, weight in layer.items()}


def _median_scale(weights: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Of the embeddings: the root of the mean square of their elements."""
    embedding = weights["model.embed_tokens.weight"].float()
    return embedding.pow(2).mean(-1).sqrt().median()


def _write_drafter(
    folder: Path, weights: Mapping[str, torch.Tensor], changes: Mapping[str, Any]
) -> Path:
    """Into a new folder, with the demo model's tokenizer, and its configuration but for
    `changes`."""
    folder.mkdir(parents=True, exist_ok=True)
    contiguous = {
        name: weight.to(torch.bfloat16).clone().contiguous() for name, weight in weights.items()
    }
    save_file(contiguous, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((MODEL_PATH / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    for file in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        shutil.copy(MODEL_PATH / file, folder / file)
    return folder


def for_speculation(program: Program) -> Program:
    """The same program without what vLLM cannot do beside drafts on a CPU: top-k sampling, so
    several samples of a request, and in vLLM 0.31 stop texts."""
    return dataclasses.replace(
        program,
        phases=tuple(
            Phase(tuple(map(_possible, phase.calls)), phase.reset_cache_after)
            for phase in program.phases
        ),
    )


def _possible(call: Call) -> Call:
    params = call.params.clone()
    if params.temperature != 0:
        params.temperature, params.top_k, params.n = 0.0, 0, 1
    if not CUTS_AT_STOP_TEXTS:
        params.stop = []
    return dataclasses.replace(call, params=params)
