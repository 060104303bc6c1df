"""Speculative decoding for tests: configurations of vLLM, and drafters made of the demo model.

An EAGLE drafter takes the model's hidden state and the next token's embedding. The one made here
ignores the hidden state and runs the model's own layers over the embeddings, so its drafts are
often right, and they depend on its KV cache as much as the model's tokens do on the model's.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from vllm.v1.core.sched.output import GrammarOutput
from vllm.v1.engine.output_processor import OutputProcessor

from sgl_vllm.demo import MODEL_PATH
from tests.engine.engine import Engine
from tests.engine.models import random_model, save
from tests.engine.programs import Call, Phase, Program
from tests.platforms.platform import Platform

NUM_DRAFTS = 3


CUTS_AT_STOP_TEXTS = hasattr(OutputProcessor, "_trim_surplus_tokens")
"""Whether an answer ends at a stop text, and not with the drafts accepted after it. Since vLLM
0.32."""

MASKS_AFTER_DRAFTS = hasattr(GrammarOutput, "num_acceptable_drafts")
"""Whether a draft can only be accepted if what follows it is masked. vLLM 0.31 leaves it unmasked
with asynchronous scheduling, if no step is in flight."""


def why_it_cannot_run(method: str, platform: Platform, model: str = "demo") -> str | None:
    """Why vLLM cannot run a method of `speculation` on a CPU with this platform; None if it can."""
    if model == "qwen3_next_mtp" and not platform.uses_v2_runner:
        return "vLLM's V1 runner moves recurrent states with Triton, which needs a GPU"
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
        model: one of `models.MODELS`. EAGLE's drafter for the demo model is often right; for
            the others EAGLE's and EAGLE 3's are random, and hardly ever.
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
        path = write_random_drafter(folder / method, is_eagle3=method == "eagle3")
        return drafts | {"model": path}
    return drafts | {"model": str(write_eagle_drafter(folder / method))}


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


def write_random_drafter(folder: Path, *, is_eagle3: bool = False) -> str:
    """Write a random EAGLE or EAGLE 3 drafter for any of the small models, of one layer with full
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


def write_eagle_drafter(folder: Path) -> Path:
    """Write an EAGLE drafter for the demo model into a new folder."""
    weights = load_file(MODEL_PATH / "model.safetensors")
    # EAGLE has no norm before its first layer. All embeddings are about as long as the median one,
    # so dividing by that does nearly what the norm does.
    embedding = weights["model.embed_tokens.weight"].float()
    scale = embedding.pow(2).mean(-1).sqrt().median()
    norm = weights["model.layers.0.input_layernorm.weight"].float() / scale
    hidden = len(norm)
    drafter = {"fc.weight": torch.cat([torch.eye(hidden), torch.zeros(hidden, hidden)], dim=1)}
    for name, weight in weights.items():
        if not name.startswith("model.layers.") or name.endswith("layers.0.input_layernorm.weight"):
            continue
        if any(f"layers.0.self_attn.{part}_proj" in name for part in "qkv"):
            weight = weight.float() * norm
        drafter[name.removeprefix("model.")] = weight
    folder.mkdir(parents=True, exist_ok=True)
    contiguous = {
        name: weight.to(torch.bfloat16).clone().contiguous() for name, weight in drafter.items()
    }
    save_file(contiguous, folder / "model.safetensors", metadata={"format": "pt"})
    for file in (
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
    ):
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
