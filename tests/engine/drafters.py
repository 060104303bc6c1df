"""Speculative decoding for tests: configurations of vLLM, and a drafter made of the demo model.

An EAGLE drafter takes the model's hidden state and the next token's embedding. The one made here
ignores the hidden state and runs the model's own layers over the embeddings, so its drafts are
often right, and they depend on its KV cache as much as the model's tokens do on the model's.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from sgl_vllm.demo import MODEL_PATH
from tests.engine.programs import Call, Phase, Program
from tests.platforms.platform import Platform

NUM_DRAFTS = 3


def why_it_cannot_run(method: str, platform: Platform) -> str | None:
    """Why vLLM cannot run a method of `speculation` on a CPU with this platform; None if it can."""
    if method == "ngram" and platform.is_async and not platform.uses_v2_runner:
        return (
            "vLLM schedules n-grams asynchronously with the method ngram_gpu only, whose drafter "
            "for the V1 runner pins memory, which needs a GPU"
        )
    return None


def speculation(method: str, folder: Path, *, is_async: bool = False) -> dict[str, Any]:
    """vLLM's `speculative_config` for a method; a drafter's weights are written to `folder`.

    Args:
        is_async: whether the engine schedules asynchronously, for which n-grams have a method of
            their own.
    """
    drafts = {"method": method, "num_speculative_tokens": NUM_DRAFTS}
    if method == "ngram":
        name = "ngram_gpu" if is_async else "ngram"
        return drafts | {"method": name, "prompt_lookup_min": 1, "prompt_lookup_max": 4}
    if method == "draft_model":  # the model drafts for itself
        return drafts | {"model": str(MODEL_PATH)}
    assert method == "eagle"
    return drafts | {"model": str(write_eagle_drafter(folder / "eagle"))}


def write_eagle_drafter(folder: Path) -> Path:
    """Write an EAGLE drafter for the demo model into a new folder."""
    folder.mkdir(parents=True, exist_ok=True)
    model = MODEL_PATH
    weights = load_file(model / "model.safetensors")
    config = json.loads((model / "config.json").read_text())
    embedding = weights["model.embed_tokens.weight"].float()
    # EAGLE has no norm before its first layer. All embeddings are about as long as the median one,
    # so dividing by that does nearly what the norm does.
    scale = embedding.pow(2).mean(-1).sqrt().median()
    norm = weights["model.layers.0.input_layernorm.weight"].float() / scale
    drafter = {}
    for name, weight in weights.items():
        if not name.startswith("model.layers.") or name.endswith("layers.0.input_layernorm.weight"):
            continue
        if any(f"layers.0.self_attn.{part}_proj" in name for part in "qkv"):
            weight = weight.float() * norm
        drafter[name.removeprefix("model.")] = weight.to(torch.bfloat16).contiguous()
    hidden = config["hidden_size"]
    takes_embedding = torch.cat([torch.eye(hidden), torch.zeros(hidden, hidden)], dim=1)
    drafter["fc.weight"] = takes_embedding.to(torch.bfloat16)
    save_file(drafter, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    for file in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        shutil.copy(model / file, folder / file)
    return folder


def for_speculation(program: Program) -> Program:
    """The same program without what vLLM cannot do beside n-gram drafts on a CPU: top-k sampling,
    so several samples of a request."""
    return dataclasses.replace(
        program,
        phases=tuple(
            Phase(tuple(map(_greedy, phase.calls)), phase.reset_cache_after)
            for phase in program.phases
        ),
    )


def _greedy(call: Call) -> Call:
    if call.params.temperature == 0:
        return call
    params = call.params.clone()
    params.temperature, params.top_k, params.n = 0.0, 0, 1
    return dataclasses.replace(call, params=params)
