"""Grammars and jumps with LoRA adapters: each adapter's answers, and no hits across."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from vllm.lora.request import LoRARequest

from tests.engine.engine import MODEL, Ask, Engine, greedy, in_format, tokens_of, words
from tests.engine.one_by_one import decoding_one_by_one
from tests.engine.test_jump_forward import CARD

RANK = 4
SETTINGS: dict[str, Any] = {
    "enable_lora": True,
    "max_loras": 2,
    "max_lora_rank": 8,
    "lora_target_modules": ["q_proj", "v_proj"],
}


def write_adapter(folder: Path, seed: int) -> Path:
    """Random, and large enough to change most answers."""
    config = json.loads((Path(MODEL) / "config.json").read_text())
    hidden = config["hidden_size"]
    head = config.get("head_dim") or hidden // config["num_attention_heads"]
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(config["num_hidden_layers"]):
        for name, width in (
            ("q_proj", head * config["num_attention_heads"]),
            ("v_proj", head * config["num_key_value_heads"]),
        ):
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            a = torch.randn(RANK, hidden, generator=generator) / hidden**0.5
            weights[f"{prefix}.lora_A.weight"] = a
            weights[f"{prefix}.lora_B.weight"] = torch.randn(width, RANK, generator=generator)
    folder.mkdir()
    save_file(weights, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(
        json.dumps(
            {
                "peft_type": "LORA",
                "r": RANK,
                "lora_alpha": 2 * RANK,
                "target_modules": ["q_proj", "v_proj"],
                "bias": "none",
            }
        )
    )
    return folder


@pytest.fixture(scope="module")
def adapters(tmp_path_factory) -> list[LoRARequest | None]:
    """Two, and none."""
    folder = tmp_path_factory.mktemp("adapters")
    return [
        LoRARequest(name, number, str(write_adapter(folder / name, number)))
        for number, name in ((1, "first"), (2, "second"))
    ] + [None]


def run(engine: Engine, asks: Sequence[Ask], adapters: Sequence[LoRARequest | None]) -> list[Any]:
    """Requests of all adapters together, then those of the base model, in the order of `asks`.

    Not in one batch: there, vLLM's CPU build applies one of the adapters to the base model's tokens
    too, because it reads "no adapter", -1, as an index.
    """
    results: dict[int, Any] = {}
    for is_base in (False, True):
        turn = [n for n, adapter in enumerate(adapters) if (adapter is None) == is_base]
        if not turn:
            continue
        outputs = engine.llm.generate(
            [asks[n].as_prompt for n in turn],
            [asks[n].params for n in turn],
            lora_request=[adapters[n] for n in turn],
            use_tqdm=False,
        )
        results.update(zip(turn, outputs, strict=True))
    return [results[n] for n in range(len(asks))]


def interleaved(
    adapters: Sequence[LoRARequest | None],
) -> tuple[list[Ask], list[LoRARequest | None]]:
    """The same prompts for each adapter in turn, with and without a format, with common starts."""
    asks: list[Ask] = []
    of: list[LoRARequest | None] = []
    for number in range(8):
        prompt = words(100)[: 40 + 7 * number] + words(9, seed=number % 3)
        card = in_format(70, {"regex": CARD})
        for adapter in adapters:
            asks.append(Ask(prompt, card if number % 2 else greedy(8)))
            of.append(adapter)
    return asks, of


@pytest.fixture(scope="module")
def wanted(start, adapters) -> list[list[int]]:
    """Stock's answers."""
    engine = start(enable_prefix_caching=False, async_scheduling=False, **SETTINGS)
    asks, of = interleaved(adapters)
    with decoding_one_by_one(engine.scheduler):
        return [tokens_of(one) for one in run(engine, asks, of)]


@pytest.fixture(scope="module")
def engine(start, wanted) -> Engine:
    started: Engine = start({}, **SETTINGS)
    assert set(started.scheduler.sgl_vllm.stats().parts.values()) == {"on"}
    return started


def test_each_adapter_gets_its_own_answers(engine, wanted, adapters):
    asks, of = interleaved(adapters)
    assert wanted[0::3] != wanted[2::3] and wanted[1::3] != wanted[2::3]  # adapters matter
    for _ in range(2):  # the second time from the cache
        assert [tokens_of(one) for one in run(engine, asks, of)] == wanted
    stats = engine.scheduler.sgl_vllm.stats()
    assert stats.jump_forward.forced_tokens > 300
    assert stats.radix.hit_tokens > 1000
    engine.check_nothing_is_left()


def test_what_one_adapter_has_computed_is_no_hit_for_another(engine, adapters):
    prompt = Ask(words(150, seed=77), greedy())
    cached = [run(engine, [prompt], [adapter])[0].num_cached_tokens for adapter in adapters * 2]
    assert cached == [0, 0, 0, 149, 149, 149]


def test_with_room_for_one_adapter_at_a_time_and_a_tiny_cache_all_go_on(start, wanted, adapters):
    """A jumped request waits with its blocks while other adapters have the room."""
    tiny = {"max_loras": 1, "num_gpu_blocks_override": 14, "max_num_batched_tokens": 64}
    engine: Engine = start({}, **(SETTINGS | tiny), max_model_len=256)
    asks, of = interleaved(adapters)
    assert [tokens_of(one) for one in run(engine, asks, of)] == wanted
    assert engine.scheduler.sgl_vllm.stats().jump_forward.forced_tokens > 300
    engine.check_nothing_is_left()
